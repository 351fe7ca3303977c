"""Brokers' lives of 200 operations, crashed at every sixth of their disk operations and places inside writes.

More than 800 crash points together; tests/deep goes through every byte, and through many lives.
"""

from __future__ import annotations

import pytest

from tests.support.broker_explorer import Explorer, either, kill, power_loss

#: A machine under load takes several times as long.
pytestmark = pytest.mark.timeout(600)


def explore(explorer: Explorer) -> None:
    explorer.run()
    assert sum(explorer.trace.performed.values()) == 200
    assert len(explorer.trace.told.frames) > 80
    assert explorer.crashes > 200
    assert explorer.double_crashes > 15
    assert explorer.failed_syncs > 12


@pytest.mark.parametrize("number", [1, 2])
def test_with_flush_sync_nothing_acknowledged_is_lost_at_any_crash_point(number: int, seed: int):
    explore(Explorer(seed + number, "sync", either, every=6, first=number))


def test_with_flush_async_a_dying_process_loses_nothing_acknowledged(seed: int):
    explore(Explorer(seed, "async", kill, every=6))


def test_with_flush_async_a_power_loss_takes_only_an_end_that_was_not_synced(seed: int):
    explore(Explorer(seed, "async", power_loss, all_written=False, every=6))
