"""The part of a subject's history that an archive has as copied segments (``--raw``) and not as Parquet files.

Copied segments are read as a log. That needs local files: for an archive elsewhere the lookup logs a warning and does
not read them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyarrow import fs

from plait.spark.archiving.manifest import RAW, Archive, ArchivedSource, RawSegment
from plait.spark.history.archived_part import FileGone
from plait.spark.history.live_part import LivePlan, plan_live
from plait.spark.history.selection import HistorySelection
from plait.storage.reading.log_reader import MESSAGE_DIRECTORY


def is_readable(archive: Archive) -> bool:
    """Whether its copied segments can be read."""
    return isinstance(archive.files, fs.LocalFileSystem)


def message_segments(source: ArchivedSource) -> list[RawSegment]:
    """The copied segments of a source's message log that end after its Parquet files, in log order."""
    found = [raw for raw in source.raw if raw.path.split("/")[-2] == MESSAGE_DIRECTORY]
    return sorted((raw for raw in found if raw.end > source.message_offset), key=lambda raw: raw.start)


def plan_raw(archive: Archive, name: str, source: ArchivedSource, selection: HistorySelection) -> LivePlan | None:
    """The pieces of a source's segments after the end of its Parquet files; None: there are no such segments."""
    segments = message_segments(source)
    if not segments:
        return None
    for segment in segments:
        if archive.files.get_file_info(archive.path(segment.path)).type == fs.FileType.NotFound:
            raise FileGone(
                f"{archive.location}/{segment.path} does not exist, and the archive's manifest names it. Restore the "
                "file from a copy"
            )
    # Up to the committed offset: a run that did not commit may have left more segments.
    path = archive.path(f"{RAW}/{name}")
    return plan_live(path, source.group, selection, source.message_offset, source.raw_message_offset)


def uncovered(segments: list[RawSegment], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of log offsets between ``start`` and ``end`` that no segment has."""
    for segment in segments:
        if start < min(segment.start, end):
            yield start, min(segment.start, end)
        start = max(start, segment.end)
    if start < end:
        yield start, end
