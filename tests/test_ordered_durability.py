"""A cluster of processes under faults keeps every key in order; tests/deep/test_ordered.py runs longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ordered_chaos import FAULTS, Chaos, script


@pytest.mark.timeout(900)
async def test_keys_stay_in_order_while_every_kind_of_process_fails(tmp_path: Path, seed: int):
    chaos = Chaos(tmp_path, seed, seconds=15.0)
    await chaos.run()
    assert chaos.sink.handovers > 0


def test_a_script_has_every_kind_of_fault_and_is_determined_by_its_seed():
    faults = script(7, 15.0)
    assert faults == script(7, 15.0) != script(8, 15.0)
    assert {fault.kind for fault in faults} == set(FAULTS)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert len(script(7, 45.0)) == 3 * len(faults)
