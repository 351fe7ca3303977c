"""Twenty kills of a streaming query's broker, driver and workers: every message is written once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.spark_kills import StreamUnderFire

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.deep("spark")
def test_a_stream_killed_twenty_times_writes_every_message_once(spark: SparkSession, tmp_path: Path, seed: int):
    rng = random.Random(seed)
    with StreamUnderFire(tmp_path, rng) as stream:
        for _ in range(20):
            stream.batches(rng.randint(1, 3))
            stream.kill(rng.choice(["broker", "worker", "driver"]))
        stream.check(spark)
