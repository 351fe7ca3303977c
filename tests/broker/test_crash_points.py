"""Runs of 200 broker operations, crashed at every sixth disk operation or offset inside a write.

More than 800 crash points in total; tests/deep tries every byte, and many runs.
"""

from __future__ import annotations

import pytest

from tests.support.broker_explorer import Explorer, either, kill, power_loss

#: A loaded machine takes several times as long.
pytestmark = pytest.mark.timeout(600)


def explore(explorer: Explorer) -> None:
    explorer.run()
    assert sum(explorer.trace.performed.values()) == 200
    assert len(explorer.trace.observed.frames) > 80
    assert explorer.crashes > 200
    assert explorer.double_crashes > 15
    assert explorer.failed_syncs > 12


@pytest.mark.parametrize("number", [1, 2])
def test_with_flush_sync_nothing_acknowledged_is_lost_at_any_crash_point(number: int, seed: int):
    explore(Explorer(seed + number, "sync", either, every=5, first=number))


def test_with_flush_async_a_dying_process_loses_nothing_acknowledged(seed: int):
    explore(Explorer(seed, "async", kill, every=5))


def test_with_flush_async_a_power_loss_loses_only_an_unsynced_tail(seed: int):
    explore(Explorer(seed, "async", power_loss, all_written=False, every=5))
