"""The part of a subject's history that is in a message log, from a log offset on.

Frames that cannot have matching rows are skipped: by their headers, then by key hashes and producer sequences, whole
columns at a time. Message headers are decoded only for rows that match all other conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from plait.errors import FrameError, SubjectNotFound
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.spark.history.selection import HistorySelection
from plait.spark.source.header_columns import header_maps
from plait.spark.source.joined_frames import Frames
from plait.spark.source.row_picker import Picker
from plait.spark.source.spark_columns import BATCH_COUNT, BATCH_SIZE, COLUMNS
from plait.storage.disk import RealDisk
from plait.storage.reading.log_chunks import ChunkPartition, LogChunk, WantedRows, plan, read_chunk
from plait.storage.reading.log_reader import damage_error, open_log

#: The columns of history rows: those of the source, and optionally the headers as they were sent.
SCHEMA: Final = pa.schema([pa.field(name, column.type, column.nullable) for name, column in COLUMNS.items()])
ENCODED: Final = "headers_encoded"
ENCODED_SCHEMA: Final = SCHEMA.append(pa.field(ENCODED, pa.binary()))


@dataclass(frozen=True)
class LivePiece:
    """A part of a log that one task reads; pickled to the task."""

    path: str
    chunk: LogChunk
    group: str

    @property
    def size(self) -> int:
        return self.chunk.size

    def read(self, selection: HistorySelection, *, encoded: bool = False, files: object = None) -> Iterator[pa.Table]:
        """The matching rows. ``encoded`` adds a column with the headers as in the frames."""
        wanted = wanted_of(selection)
        frames = read_chunk(RealDisk(self.path, read_only=True), self.path, self.chunk, wanted)
        try:
            yield from matching_rows(frames, selection, self.group, encoded=encoded)
        except FrameError as error:
            chunk = self.chunk
            raise damage_error(self.path, chunk.segment, chunk.start, chunk.end - chunk.start, str(error)) from error


@dataclass(frozen=True)
class LivePlan:
    """Pieces of a log, in log order."""

    pieces: list[LivePiece]
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
    reader = open_log(path)
    if end is not None:
        reader.files = [(base, segment) for base, segment in reader.files if base < end]
    bases = [base for base, _ in reader.files]
    # Each segment header has the names of all partitions, so earlier segments need not be read.
    reader.skip_before(offset)
    segments = {segment: base for base, segment in reader.files}
    try:
        # Include expired messages while their file exists, as archives do.
        planned = plan(reader, wanted_of(selection), expired=True)
    except SubjectNotFound:
        return LivePlan([], False, bases[0] if bases else 0)
    pieces = []
    for chunk in planned.chunks:
        start = max(chunk.start, offset - segments[chunk.segment])
        if start < chunk.end:
            pieces.append(LivePiece(path, replace(chunk, start=start), group))
    return LivePlan(pieces, True, bases[0] if bases else 0)


def matching_rows(
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
    headers = header_maps(rows[ENCODED].combine_chunks())
    rows = selection.matching(rows.append_column("headers", headers))
    if rows.num_rows:
        schema = ENCODED_SCHEMA if encoded else SCHEMA
        yield rows.select(schema.names).cast(schema)
