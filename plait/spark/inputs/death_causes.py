"""The causes of dead letters: their reasons in the retained log, or in its archived copy."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from plait.errors import FrameError
from plait.spark.archiving.manifest import Archive
from plait.spark.inputs.parquet_files import read_columns
from plait.storage.disk import RealDisk
from plait.storage.logs.recovery import LogScan
from plait.storage.logs.retained_log import DIRECTORY, is_header, note_of
from plait.storage.reading.log_reader import LogReader


class Cause(NamedTuple):
    """The reason that dead letters of a group share."""

    group: int
    #: The exception's type and the handler that raised it.
    type: str
    handler: str


#: The columns of a cause in an archive.
_CAUSE: Final = ["group_number", "type", "handler"]


def deaths(path: str, *, since: int, until: int) -> Counter[Cause]:
    """Dead letters that were stored at times [since, until], by cause. Removed letters are not counted."""
    reader = LogReader(RealDisk(path, read_only=True), DIRECTORY, path)
    log = reader.mapped()
    found: Counter[Cause] = Counter()
    if not log.segments:
        return found
    start = log.segments[0].base
    for _, frame in LogScan(log, start, start, stamps_durable=False):
        if is_header(frame):
            continue
        try:
            note = note_of(frame)
        except FrameError:
            # Unreadable notes are reported by ``plait doctor``.
            continue
        # A retained frame has the store time of the frame that its rows are from.
        if note.death is not None and since <= frame.store_time <= until:
            reason = note.death.reason
            found[Cause(note.group, reason.type, reason.handler)] += len(frame.sequences())
    return found


def archived_deaths(archive: Archive, path: str, apart: int, *, since: int, until: int) -> Counter[Cause]:
    """Dead letters of one archived file that were stored at times [since, until], by cause.

    ``apart`` is added to the numbers of groups.
    """
    table = read_columns(archive, path, [*_CAUSE, "store_time"])
    time = table.column("store_time").cast(pa.int64())
    table = table.filter(pc.and_(pc.greater_equal(time, since), pc.less_equal(time, until)))
    counts = table.group_by(_CAUSE).aggregate([([], "count_all")])
    columns = [counts.column(name).to_pylist() for name in (*_CAUSE, "count_all")]
    return Counter({Cause(n + apart, kind or "", by or ""): count for n, kind, by, count in zip(*columns, strict=True)})
