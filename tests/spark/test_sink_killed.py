"""Drivers, workers and brokers are killed while a stream is written: each message is stored once, each key in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.require import require_package
from tests.support.sink_chaos import SinkChaos


@pytest.mark.timeout(600)
def test_a_stream_whose_driver_worker_and_broker_are_killed_writes_every_message_once(tmp_path: Path, seed: int):
    require_package("pyspark", extra="spark")
    chaos = SinkChaos(tmp_path, seed, kills=3, batches=6)
    chaos.run()
    assert chaos.killed == {"driver": 1, "worker": 1, "broker": 1}
    # Files that the killed driver could not remove stay in the test's directory.
    assert list((tmp_path / "scratch").glob("blockmgr-*"))
