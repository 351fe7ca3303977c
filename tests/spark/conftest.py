"""One Spark session for all tests: starting one takes seconds, using one does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import plait.spark
from tests.support.require import require_package

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Tests are many small jobs: compiling quickly matters more than compiling well.
TEST_CONFIG = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": 2,
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A real local session, as ``plait.spark.session`` makes it."""
    require_package("pyspark", extra="spark")
    from pyspark import SparkContext

    session = plait.spark.session("plait-tests", master="local[2]", config=TEST_CONFIG)
    gateway = SparkContext._gateway
    assert gateway is not None
    yield session
    session.stop()
    # Java would end with this process only, and the run's leak check comes before that.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)
    SparkContext._gateway = SparkContext._jvm = None
