"""The pieces of a subject's history: files of an archive, parts of a log, and ranges of partitions at brokers.

A piece is planned in one process and may be read in another. Of an archive, the manifest selects files, statistics
select row groups, and the columns of the conditions are read before all others. Frames that cannot have matching rows
are skipped: by their headers, then by key hashes and producer sequences, whole columns at a time. Message headers are
decoded only for rows that match all other conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from plait.errors import FrameError, SubjectNotFound
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.spark.archiving.manifest import (
    MESSAGES,
    RAW,
    Archive,
    ArchivedFile,
    ArchivedSource,
    ArchiveManifest,
    PartitionLife,
    RawSegment,
)
from plait.spark.history.selection import HistorySelection
from plait.spark.inputs.broker_input import BrokerInput, BrokerTask
from plait.spark.inputs.log_input import LogTask
from plait.spark.inputs.parquet_files import FileGone, OpenFile, OpenFiles, reading
from plait.spark.source import arrow_scalars as bare
from plait.spark.source import header_columns
from plait.spark.source.joined_frames import Frames
from plait.spark.source.read_options import ReadOptions
from plait.spark.source.row_picker import Picker
from plait.spark.source.spark_columns import BATCH_COUNT, BATCH_SIZE, COLUMNS
from plait.storage.reading.log_chunks import ChunkPartition, WantedRows, plan
from plait.storage.reading.log_reader import MESSAGE_DIRECTORY, open_log

#: The columns of history rows: those of the source, and optionally the headers as they were sent.
SCHEMA: Final = pa.schema([pa.field(name, column.type, column.nullable) for name, column in COLUMNS.items()])
ENCODED: Final = "headers_encoded"
ENCODED_SCHEMA: Final = SCHEMA.append(pa.field(ENCODED, pa.binary()))
#: How far a broker's clock may have been set back without a search by time missing rows.
CLOCK_MICROS: Final = 3_600_000_000
_ROW: Final = "__row"


# --- files of an archive ------------------------------------------------------------------------


@dataclass(frozen=True)
class ArchivedPiece:
    """One file that may have matching rows."""

    #: The address of the archive.
    archive: str
    file: ArchivedFile

    @property
    def size(self) -> int:
        return self.file.size

    @property
    def time_min(self) -> int:
        """The least store time of its rows."""
        return self.file.time_min

    def read(
        self, selection: HistorySelection, *, encoded: bool = False, files: OpenFiles | None = None
    ) -> Iterator[pa.Table]:
        """The matching rows. ``encoded`` adds a column with the headers as they were sent, null where all values are
        text. ``files`` caches open files.
        """
        archive = Archive.at(self.archive)
        with reading(archive, self.file.path, self.file.count):
            opened = (files or OpenFiles()).get(archive, self.file)
            missing = [name for name in SCHEMA.names if name != "subject" and name not in opened.names]
            if missing:
                raise pa.ArrowInvalid(f"it has no column {', '.join(missing)}")
            for group in opened.groups(selection.limits):
                with opened.lock:
                    rows = _matching(opened, group, selection, encoded)
                if rows is not None and rows.num_rows:
                    yield _finished(rows, selection.subject, encoded)


def plan_archived(archive: Archive, manifest: ArchiveManifest, selection: HistorySelection) -> list[ArchivedPiece]:
    """The files that may have matching rows, by the manifest."""
    found = manifest.find(
        MESSAGES, subjects=[selection.subject], time_min=selection.time_min, time_max=selection.time_max
    )
    if (key := selection.key) is not None:
        found = [file for file in found if file.key_min is not None and file.key_min <= key <= (file.key_max or "")]
    return [ArchivedPiece(archive.address, file) for file in found]


def _matching(opened: OpenFile, group: int, selection: HistorySelection, encoded: bool) -> pa.Table | None:
    columns = [name for name in opened.names if name in SCHEMA.names or (encoded and name == header_columns.TYPES)]
    # A lookup of few rows already reads several files in threads.
    threads = not selection.few
    if not selection.columns:
        return opened.parquet.read_row_group(group, columns=columns, use_threads=threads)
    # Read the columns of the conditions first: most of these row groups have no matching row.
    rows = opened.parquet.read_row_group(group, columns=selection.columns, use_threads=threads)
    found = selection.matching(rows.append_column(_ROW, bare.integers(np.arange(rows.num_rows))))
    if not found.num_rows:
        return None
    rest = opened.parquet.read_row_group(group, columns=columns, use_threads=threads)
    return rest if found.num_rows == rest.num_rows else rest.take(found[_ROW])


def _finished(rows: pa.Table, subject: str, encoded: bool) -> pa.Table:
    subjects = bare.repeated(subject, rows.num_rows)
    finished = rows.append_column("subject", subjects).select(SCHEMA.names).cast(SCHEMA)
    if not encoded:
        return finished
    original = pa.nulls(rows.num_rows, pa.binary())
    if header_columns.TYPES in rows.column_names:
        original = header_columns.encoded_of(rows["headers"], rows[header_columns.TYPES])
    return finished.append_column(ENCODED, original)


# --- frames of a log or of a broker -------------------------------------------------------------


@dataclass(frozen=True)
class StoredPiece:
    """Frames that may have matching rows."""

    options: ReadOptions
    task: LogTask | BrokerTask
    size: int
    #: The least store time of its rows is not known.
    time_min: ClassVar[int] = 0

    def read(self, selection: HistorySelection, *, encoded: bool = False, files: object = None) -> Iterator[pa.Table]:
        """The matching rows. ``encoded`` adds a column with the headers as in the frames."""
        task = self.task
        try:
            frames = task.frames(self.options, wanted_of(selection))
            for rows in _matching_rows(frames, selection, task.group, encoded=encoded):
                if isinstance(task, BrokerTask):
                    sequences = rows["sequence"]
                    inside = pc.and_(pc.greater_equal(sequences, task.start), pc.less(sequences, task.end))
                    rows = rows.filter(inside)
                if rows.num_rows:
                    yield rows
        except FrameError as error:
            raise task.damage(self.options, str(error)) from error


Piece = ArchivedPiece | StoredPiece


@dataclass(frozen=True)
class LivePlan:
    """Pieces of a log, in log order."""

    pieces: list[StoredPiece]
    #: Whether the log has the subject.
    known: bool
    #: The log's first offset.
    start: int


def wanted_of(selection: HistorySelection) -> WantedRows:
    """The conditions that frame headers, key hashes and producer sequences can decide."""
    ids = None
    if selection.message_id is not None:
        producer, _, number = selection.message_id.partition("-")
        ids = frozenset([(int(producer, 16), int(number))])
    return WantedRows(
        frozenset([selection.subject]),
        time_min=selection.time_min,
        time_max=selection.time_max,
        keys=None if selection.key is None else frozenset([selection.key]),
        message_ids=ids,
    )


def plan_live(path: str, group: str, selection: HistorySelection, offset: int, end: int | None = None) -> LivePlan:
    """The pieces of a data directory's log with rows of a subject, from a log offset on, which is the start of a frame
    or the end of the log. With ``end``, up to the segment that begins there.
    """
    options = ReadOptions.parse({"path": path, "group": group, "subject": selection.subject})
    reader = open_log(path)
    if end is not None:
        reader.files = [(base, segment) for base, segment in reader.files if base < end]
    log_start = reader.files[0][0] if reader.files else 0
    # Each segment header has the names of all partitions, so earlier segments need not be read.
    reader.skip_before(offset)
    bases = {segment: base for base, segment in reader.files}
    try:
        # Include expired messages while their file exists, as archives do.
        planned = plan(reader, wanted_of(selection), expired=True)
    except SubjectNotFound:
        return LivePlan([], False, log_start)
    chunks = [replace(chunk, start=max(chunk.start, offset - bases[chunk.segment])) for chunk in planned.chunks]
    pieces = [StoredPiece(options, LogTask(chunk, group), chunk.size) for chunk in chunks if chunk.start < chunk.end]
    return LivePlan(pieces, True, log_start)


def plan_brokers(
    address: str, selection: HistorySelection, archived: Mapping[str, PartitionLife]
) -> list[StoredPiece] | None:
    """The rows that the brokers have and the archive does not, as of now; None: the cluster has no such subject."""
    options = ReadOptions.parse({"server": address, "subject": selection.subject})
    source = BrokerInput(options, wanted_of(selection))
    try:
        spans = source.spans([max(selection.time_min - CLOCK_MICROS, 0)])
        ranges = []
        for span in spans:
            life = archived.get(str(span.place))
            # The archived sequences of an earlier partition of this name are those of other rows.
            start = life.end if life is not None and life.number == span.number else span.start
            start = max(start, span.start, span.at[0])
            if start < span.end:
                ranges.append(span.range(start, span.end))
        return [StoredPiece(options, task, task.end - task.start) for task in source.tasks(ranges, spans, 1)]
    except SubjectNotFound:
        return None
    finally:
        source.close()


def _matching_rows(
    frames: Iterable[tuple[ChunkPartition, FrameView]],
    selection: HistorySelection,
    group: str,
    *,
    encoded: bool = False,
) -> Iterator[pa.Table]:
    """The matching rows of frames, in the order of the frames."""
    picker = Picker.of(wanted_of(selection))
    members: list[tuple[ChunkPartition, FrameView]] = []
    count = size = 0
    for partition, view in frames:
        picked = None if picker is None else picker.rows(view)
        if picked is not None and not picked.any():
            continue
        if view.has(Column.SELECTION):
            # A selection of rows that a broker made is not joined with other frames.
            yield from _rows(Frames([(partition, view)], group), selection, encoded)
            continue
        members.append((partition, view))
        count += view.count
        size += view.size + view.inflated_size
        if count >= BATCH_COUNT or size >= BATCH_SIZE:
            yield from _rows(Frames(members, group), selection, encoded)
            members, count, size = [], 0, 0
    if members:
        yield from _rows(Frames(members, group), selection, encoded)


def _rows(frames: Frames, selection: HistorySelection, encoded: bool) -> Iterator[pa.Table]:
    columns = {name: column.build(frames) for name, column in COLUMNS.items() if name != "headers"}
    rows = pa.table({**columns, ENCODED: frames.encoded_headers()})
    rows = selection._replace(headers=()).matching(rows)
    headers = header_columns.header_maps(rows[ENCODED].combine_chunks())
    rows = selection.matching(rows.append_column("headers", headers))
    if rows.num_rows:
        schema = ENCODED_SCHEMA if encoded else SCHEMA
        yield rows.select(schema.names).cast(schema)


# --- copied segments ----------------------------------------------------------------------------


def is_readable(archive: Archive) -> bool:
    """Whether its copied segments (``--raw``) can be read: as a log, which needs local files."""
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


def lost_ranges(name: str, source: ArchivedSource, log_start: int) -> list[str]:
    """Warnings about rows that are neither archived nor in the log, which begins at ``log_start``."""
    segments = message_segments(source)
    # Rows that were removed before the first run of an archiver do not count.
    begun = source.message_offset or (segments[0].start if segments else 0)
    return [
        f"{end - start} bytes of the log of {name} are lost: retention removed them before they were archived "
        f"(offsets {start} to {end}); archive more often, or increase the retention time"
        for start, end in _uncovered(segments, begun, log_start)
    ]


def _uncovered(segments: list[RawSegment], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of log offsets between ``start`` and ``end`` that no segment has."""
    for segment in segments:
        if start < min(segment.start, end):
            yield start, min(segment.start, end)
        start = max(start, segment.end)
    if start < end:
        yield start, end
