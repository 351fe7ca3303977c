"""A session of Spark that leaves nothing behind."""

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
    """A session as ``plait.spark.runtime.session`` makes it; its Java ends with the block."""
    require_package("pyspark", extra="spark")
    from pyspark import SparkContext

    session = plait.spark.runtime.session("plait-tests", master=master, config=config)
    gateway = SparkContext._gateway
    assert gateway is not None
    try:
        yield session
    finally:
        session.stop()
        # Java would end with this process only, and the run's leak check comes before that.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=120)
        SparkContext._gateway = SparkContext._jvm = None
