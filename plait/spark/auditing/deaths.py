"""Why messages died: what stands beside dead letters in the kept log."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from plait.errors import FrameError
from plait.storage.disk import RealDisk
from plait.storage.kept import DIRECTORY, is_head, note_of
from plait.storage.reader import LogReader, MappedSegment
from plait.storage.recovery import LogScan


class Cause(NamedTuple):
    """What letters of a group died of."""

    group: int
    #: The exception's type and the handler that raised it.
    type: str
    handler: str


class _Segments(NamedTuple):
    directory: str
    segments: list[MappedSegment]


def deaths(path: str, *, since: int, until: int) -> Counter[Cause]:
    """Letters by what they died of at times [since, until]; those that are not kept any more are not among them."""
    reader = LogReader(RealDisk(path, read_only=True), DIRECTORY, path)
    mapped = [reader.map(number) for number in range(len(reader.files))]
    segments = [segment for segment in mapped if segment is not None and not segment.blank]
    found: Counter[Cause] = Counter()
    if not segments:
        return found
    start = segments[0].base
    for _, frame in LogScan(_Segments(path, segments), start, start, stamps_durable=False):
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
