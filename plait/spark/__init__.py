"""Spark for Plait: a session that knows ``format("plait")``, on this machine's Java or on one from PyPI.

Needs ``pip install "plait[spark]"``; importing this package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.spark.archiving import ArchiveReport, archive
from plait.spark.java import SparkUnavailable
from plait.spark.session import session
from plait.spark.warmup import prepare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ArchiveReport", "SparkUnavailable", "archive", "prepare", "register", "session"]


def register(spark: SparkSession) -> None:
    """Make ``format("plait")`` known to a session; `session` does it for those it makes.

    The source narrows what it reads by filters, which Spark must be told to allow: it is told here.
    """
    from plait.spark.source import PlaitDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(PlaitDataSource)
