"""Twenty kills of drivers, workers and brokers while streams are written: every message once, every key in order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.deep import Cycles
from tests.support.require import require_package
from tests.support.sink_chaos import SinkChaos


@pytest.mark.deep("spark")
def test_streams_whose_drivers_workers_and_brokers_are_killed_write_every_message_once(
    tmp_path: Path, seed: int, cycles: Cycles
):
    require_package("pyspark", extra="spark")
    for number in cycles(5):
        directory = tmp_path / str(number)
        directory.mkdir()
        chaos = SinkChaos(directory, seed + number, kills=4)
        chaos.run()
        assert chaos.killed.total() == 4
        shutil.rmtree(directory)
