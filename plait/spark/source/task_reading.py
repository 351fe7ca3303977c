"""The work of one task: reads frames and builds record batches."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from plait.errors import FrameError
from plait.spark.inputs.input import InputTask
from plait.spark.inputs.parquet_files import ArchiveReadTask
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source.read_options import ReadOptions
from plait.spark.source.row_picker import Picker
from plait.spark.source.spark_columns import record_batches
from plait.storage.reading.log_chunks import WantedRows


def read_task(
    task: InputTask | ArchiveReadTask | None, options: ReadOptions, wanted: WantedRows, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a task as batches with the columns of the schema; nothing if ``task`` is None."""
    if task is None:
        return
    prepare_worker()
    if isinstance(task, ArchiveReadTask):
        yield from task.batches(options, wanted, schema)
        return
    try:
        yield from record_batches(task.frames(options, wanted), schema, task.group, Picker.of(wanted))
    except FrameError as error:
        raise task.damage(options, str(error)) from error
