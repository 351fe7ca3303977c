"""One task's work: frames in, record batches out."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from plait.errors import FrameError
from plait.spark.archive_task import ArchiveTask
from plait.spark.columns import record_batches
from plait.spark.options import ReadOptions
from plait.spark.picking import Picker
from plait.spark.places import Task
from plait.spark.worker import prepare_worker
from plait.storage.chunks import Wanted


def read_task(
    task: Task | ArchiveTask | None, options: ReadOptions, wanted: Wanted, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a task as batches of the schema's columns; nothing where there is no task."""
    if task is None:
        return
    prepare_worker()
    if isinstance(task, ArchiveTask):
        yield from task.batches(options, wanted, schema)
        return
    try:
        yield from record_batches(task.frames(options, wanted), schema, task.group, Picker.of(wanted))
    except FrameError as error:
        raise task.damage(options, str(error)) from error
