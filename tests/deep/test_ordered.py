"""Ten minutes of faults in a cluster of real processes, each minute with other faults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.deep import Cycles
from tests.support.ordered_chaos import Chaos


@pytest.mark.deep("ordered")
async def test_ordered_messages_keep_their_order_for_ten_minutes_of_faults(tmp_path: Path, seed: int, cycles: Cycles):
    for number in cycles(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        await Chaos(directory, seed + number, seconds=60.0).run()
        shutil.rmtree(directory)
