"""A Spark session whose Java process ends with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import plait.spark
from tests.support.require import require_package

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def spark_session(master: str, config: Mapping[str, object]) -> Iterator[SparkSession]:
    """A session as ``plait.spark.session`` makes it; its Java ends with the block."""
    require_package("pyspark", extra="spark")
    from pyspark import SparkContext

    session = plait.spark.session("plait-tests", master=master, config=config)
    gateway = SparkContext._gateway
    assert gateway is not None
    try:
        yield session
    finally:
        session.stop()
        # Otherwise Java ends with this process only, after the run's leak check.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=120)
        SparkContext._gateway = SparkContext._jvm = None
