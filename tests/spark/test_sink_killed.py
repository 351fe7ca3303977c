"""Drivers and brokers are killed while a stream is written: every message is stored once, every key in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.require import require_package
from tests.support.sink_chaos import SinkChaos


@pytest.mark.timeout(600)
def test_a_stream_whose_driver_and_broker_are_killed_writes_every_message_once(tmp_path: Path, seed: int):
    require_package("pyspark", extra="spark")
    chaos = SinkChaos(tmp_path, seed, kills=2, batches=6)
    chaos.run()
    assert chaos.killed == {"driver": 1, "broker": 1}
