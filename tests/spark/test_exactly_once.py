"""A streaming query from a broker to Parquet files writes every message once, whatever is killed while it runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.spark_kills import StreamUnderFire

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(240)
def test_every_message_is_written_once_though_broker_worker_and_driver_are_killed(spark: SparkSession, tmp_path: Path):
    with StreamUnderFire(tmp_path, random.Random(5)) as stream:
        for what in ("broker", "worker", "driver"):
            stream.batches(2)
            stream.kill(what)
        stream.check(spark)
    assert len(stream.sent) > 2000
    # Files that the killed driver could not remove stay in the test's directory.
    assert list((tmp_path / "scratch").glob("blockmgr-*"))
    assert list((tmp_path / "scratch").glob("liblz4-java-*")) or list((tmp_path / "scratch").glob("snappy-*"))
