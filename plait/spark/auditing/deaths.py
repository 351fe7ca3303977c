"""Why messages died: what stands beside dead letters in the kept log, and of that in an archive."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from plait.errors import FrameError
from plait.spark.auditing.archived_events import read_columns
from plait.spark.manifest import Archive
from plait.storage.disk import RealDisk
from plait.storage.kept import DIRECTORY, is_head, note_of
from plait.storage.reader import LogReader, MappedLog
from plait.storage.recovery import LogScan


class Cause(NamedTuple):
    """What letters of a group died of."""

    group: int
    #: The exception's type and the handler that raised it.
    type: str
    handler: str


#: As an archive has it.
_CAUSE: Final = ["group_number", "type", "handler"]


def deaths(path: str, *, since: int, until: int) -> Counter[Cause]:
    """Letters by what they died of at times [since, until]; those that are not kept any more are not among them."""
    reader = LogReader(RealDisk(path, read_only=True), DIRECTORY, path)
    mapped = [reader.map(number) for number in range(len(reader.files))]
    segments = [segment for segment in mapped if segment is not None and not segment.blank]
    found: Counter[Cause] = Counter()
    if not segments:
        return found
    start = segments[0].base
    for _, frame in LogScan(MappedLog(path, segments), start, start, stamps_durable=False):
        if is_head(frame):
            continue
        try:
            note = note_of(frame)
        except FrameError:
            # It is of no use to anybody, and doctor tells of it.
            continue
        if note.death is not None and since <= note.death.last_time <= until:
            reason = note.death.reason
            found[Cause(note.group, reason.type, reason.handler)] += len(frame.sequences())
    return found


def archived_deaths(archive: Archive, path: str, apart: int, *, since: int, until: int) -> Counter[Cause]:
    """The same of one archived file; ``apart`` is added to the numbers of groups."""
    table = read_columns(archive, path, ["time", *_CAUSE])
    time = table.column("time").cast(pa.int64())
    table = table.filter(pc.and_(pc.greater_equal(time, since), pc.less_equal(time, until)))
    counts = table.group_by(_CAUSE).aggregate([("time", "count")])
    columns = [counts.column(name).to_pylist() for name in (*_CAUSE, "time_count")]
    return Counter({Cause(n + apart, kind or "", by or ""): count for n, kind, by, count in zip(*columns, strict=True)})
