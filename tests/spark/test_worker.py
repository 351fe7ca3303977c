"""What a Spark worker does once at its start, and no other process does."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from plait.spark.runtime.worker import prepare_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


def test_a_process_that_is_no_worker_is_not_changed():
    before = gc.get_freeze_count()
    prepare_worker()
    assert gc.get_freeze_count() == before


def test_a_worker_excludes_its_modules_from_garbage_collection(spark: SparkSession):
    def frozen(_: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        import gc as collector

        from plait.spark.runtime.worker import prepare_worker as prepare

        prepare()
        yield pa.RecordBatch.from_pydict({"count": [collector.get_freeze_count()]})

    rows = spark.range(2).mapInArrow(frozen, "count bigint").collect()
    assert min(row["count"] for row in rows) > 10_000


#: Replaces Spark's daemon: a module of its name that runs as the main program, with a worker that loses its Java.
DAEMON = """
import sys
import types
from importlib.machinery import ModuleSpec

def worker(sock, authenticated):
    raise BrokenPipeError(32, "Broken pipe")

sys.modules["__main__"].__spec__ = ModuleSpec("pyspark.daemon", None)
from plait.spark.runtime.worker import prepare_worker
prepare_worker()
prepare_worker()
worker(None, True)
"""


def test_a_worker_that_loses_its_java_ends_without_output():
    ended = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
