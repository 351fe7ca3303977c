"""A cluster of real processes under fire keeps every key in order; the long form is tests/deep/test_ordered.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ordered_chaos import FAULTS, Chaos, script


@pytest.mark.timeout(900)
async def test_ordered_messages_keep_their_order_while_everything_fails(tmp_path: Path, seed: int):
    chaos = Chaos(tmp_path, seed, seconds=15.0)
    await chaos.run()
    assert chaos.sink.handovers > 0


def test_a_script_has_every_kind_of_fault_and_follows_from_its_seed():
    faults = script(7, 15.0)
    assert faults == script(7, 15.0) != script(8, 15.0)
    assert {fault.kind for fault in faults} == set(FAULTS)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert len(script(7, 45.0)) == 3 * len(faults)
