"""Builds the Arrow record batches for Spark from frames: columns are wrapped or joined as a whole, never row by row.

Several small frames become one batch, since a batch costs Spark as much as a few thousand rows. Only headers are
decoded row by row, since they are encoded so, and only if a frame has them and the query reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.send.encoding import UNREADABLE, read_headers
from plait.errors import FrameError
from plait.frame import validation as check
from plait.frame.columns import FIXED_TYPES, TAG_SEPARATOR, Codec, Column, label
from plait.frame.run_tables import RUN, Runs, expand_runs
from plait.frame.view import FrameView
from plait.limits import KIB, LOGICAL_PARTITIONS, MIB
from plait.spark.archiving import header_types
from plait.spark.archiving.array_views import viewed, viewed_schema
from plait.spark.source.row_picker import Picker
from plait.storage.reading.log_chunks import ChunkPartition

#: Frames are joined until they have this many rows, or this many bytes.
BATCH_COUNT: Final = 8_192
BATCH_SIZE: Final = 4 * MIB
#: If at most this many columns are wanted, a frame of this many rows is a batch by itself: copying its bodies would
#: cost more than another batch does.
ALONE_COUNT: Final = 2_048
ALONE_COLUMNS_MAX: Final = 2
#: A larger batch is passed to Spark in parts, so that Spark's memory for it stays bounded.
BATCH_COUNT_MAX: Final = 65_536
#: Frames of this average size are not joined if their rows are sorted afterwards anyway.
VIEWED_SIZE_MIN: Final = 16 * KIB

_TEXT: Final = pa.string()
_TIME: Final = pa.timestamp("us", tz="UTC")
_TEXTS: Final = pa.list_(pa.field("element", _TEXT))
_MAP: Final = pa.map_(_TEXT, _TEXT)
_RAW: Final = int(Codec.RAW)
_CONST: Final = int(Codec.CONST)
#: Two hexadecimal digits for each byte value.
_HEX: Final = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), "<u2")
_Headers = dict[str, str | bool | int | float]
#: Headers that do not decode are ``UNREADABLE`` and their bytes.
_Row = _Headers | dict[str, bytes]

_Offsets = npt.NDArray[np.int32]


class Frames:
    """The frames of one batch, with the data that several columns are built from."""

    def __init__(self, members: Sequence[tuple[ChunkPartition, FrameView]], group: str) -> None:
        self.group = group
        self.partitions = [partition for partition, _ in members]
        self.views = [view for _, view in members]
        self.counts = np.array([view.count for view in self.views])
        self.count = int(self.counts.sum())
        self.column_bits = 0
        for view in self.views:
            self.column_bits |= view.column_bits
        #: A selection of rows that a broker made from a compressed frame. It is the only frame of its batch.
        self.selected = self.views[0] if self.has(Column.SELECTION) else None
        if self.selected is not None and len(members) > 1:
            raise FrameError("a batch has a selection of rows and other frames")
        self._keys: tuple[_Offsets, memoryview] | None = None
        self._headers: list[_Row | None] | None = None

    def has(self, column: int) -> bool:
        """Whether any frame has the column."""
        return bool(self.column_bits >> column & 1)

    def repeat(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """One value per frame, repeated for each of its rows."""
        return np.repeat(np.array(values, np.int64), self.counts)

    def keys(self) -> tuple[_Offsets, memoryview]:
        """Order keys; empty where a row has none."""
        if self._keys is None:
            self._keys = self.variable(Column.KEY)
            check.text(*self._keys, Column.KEY)
        return self._keys

    def headers(self) -> list[_Row | None] | None:
        """Headers, decoded once for all columns that use them; None: no row has headers."""
        if self._headers is None and self.has(Column.HEADERS):
            self._headers = _decoded(encoded_headers(self))
        return self._headers

    def variable(self, column: int) -> tuple[_Offsets, memoryview]:
        """Offsets and data of a variable column; rows of frames without it are empty."""
        if len(self.views) == 1 and self.views[0].has(column):
            return self.views[0].variable(column)
        offsets: list[Any] = []
        pieces: list[memoryview] = []
        for view in self.views:
            codec, start, end = view.places.get(column, (_RAW, 0, 0))
            if end == 0:
                offsets.append(bytes(4 * (view.count + 1)))
                pieces.append(memoryview(b""))
            elif codec == _RAW:
                split = start + 4 * (view.count + 1)
                offsets.append(view.buffer[start:split])
                pieces.append(view.buffer[split:end])
            else:
                own_offsets, data = view.variable(column)
                offsets.append(own_offsets)
                pieces.append(data)
        return self._joined(column, np.frombuffer(b"".join(offsets), "<i4"), pieces)

    def _joined(self, column: int, offsets: _Offsets, pieces: list[memoryview]) -> tuple[_Offsets, memoryview]:
        ends = np.cumsum(self.counts + 1)
        sizes = np.array([len(piece) for piece in pieces])
        lengths = np.delete(np.diff(offsets), ends[:-1] - 1)
        # The offsets of each frame must ascend and cover exactly its data.
        fits = len(offsets) == ends[-1] and np.array_equal(offsets[ends - 1] - offsets[ends - 1 - self.counts], sizes)
        if not fits or lengths.min() < 0:
            raise FrameError(f"{label(column)} column has offsets that do not fit its data")
        joined = np.zeros(self.count + 1, np.int32)
        np.cumsum(lengths, out=joined[1:])
        return joined, memoryview(b"".join(pieces))

    def fixed(self, column: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Values of a fixed column, and a mask of the rows that have one (None: all)."""
        if self.selected is not None:
            return np.ascontiguousarray(self.selected.fixed(column)), None
        dtype = FIXED_TYPES[column]
        pieces: list[memoryview | bytes] = []
        has = []
        for view in self.views:
            codec, start, end = view.places.get(column, (_CONST, 0, 0))
            data = view.buffer[start:end] if end else bytes(dtype.itemsize)
            has.append(end > 0)
            if codec == _CONST:
                data = bytes(data) * view.count
            if codec not in (_RAW, _CONST) or len(data) != view.count * dtype.itemsize:
                raise FrameError(f"{label(column)} column does not fit its {view.count} rows")
            pieces.append(data)
        values = np.frombuffer(b"".join(pieces) if len(pieces) > 1 else pieces[0], dtype)
        return values, None if all(has) else np.repeat(has, self.counts)

    def runs(self) -> Runs:
        """The runs of rows of one producer, in row order."""
        if not self.has(Column.RUNS):
            runs = array("Q")
            for view in self.views:
                runs.extend((view.producer, view.first, view.count, view.previous))
            return np.frombuffer(runs, RUN)
        return np.concatenate([view.runs() for view in self.views])


# --- columns ------------------------------------------------------------------------------------


def _same_texts(text: str, count: int) -> pa.Array:
    if count > BATCH_COUNT_MAX:
        # For an archiver: the column is as large as a file and used once, so it is not cached.
        return _repeated(text, count)
    # Rounded up, so that batches of all sizes share a few columns.
    return _shared_texts(text, 1 << (count - 1).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _shared_texts(text: str, count: int) -> pa.Array:
    return _repeated(text, count)


def _repeated(text: str, count: int) -> pa.Array:
    data = text.encode()
    offsets = np.arange(0, (count + 1) * len(data), len(data), dtype=np.int32)
    return pa.Array.from_buffers(_TEXT, count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


def _texts(frames: Frames, texts: list[str]) -> pa.Array:
    """One text per frame, repeated for each of its rows."""
    if len(set(texts)) == 1:
        return _same_texts(texts[0], frames.count)
    return pa.array(texts, _TEXT).take(pa.array(np.repeat(np.arange(len(texts)), frames.counts)))


def _subject(frames: Frames) -> pa.Array:
    return _texts(frames, [partition.subject for partition in frames.partitions])


def _partition(frames: Frames) -> pa.Array:
    return _texts(frames, [f"{partition.name}@{frames.group}" for partition in frames.partitions])


def _sequence(frames: Frames) -> pa.Array:
    if frames.selected is not None:
        return pa.array(frames.selected.sequences())
    starts = np.cumsum(frames.counts) - frames.counts
    bases = np.array([view.base for view in frames.views])
    return pa.array(np.arange(frames.count) + np.repeat(bases - starts, frames.counts))


def _message_id(frames: Frames) -> pa.Array:
    """The printed form of ``MessageId``: the producer in 16 hexadecimal digits, and the producer sequence."""
    selected = frames.selected
    producers, sequences = expand_runs(frames.runs()) if selected is None else selected.message_ids()
    numbers = pc.cast(pa.array(sequences), _TEXT)
    if (producers == producers[0]).all():
        return pc.binary_join_element_wise(f"{int(producers[0]):016x}", numbers, "-")
    digits = _HEX[producers.astype(">u8").view(np.uint8)]
    offsets = np.arange(0, 16 * len(producers) + 1, 16, dtype=np.int32)
    texts = pa.Array.from_buffers(_TEXT, len(producers), [None, pa.py_buffer(offsets), pa.py_buffer(digits)])
    return pc.binary_join_element_wise(texts, numbers, "-")


def _key(frames: Frames) -> pa.Array:
    if not frames.has(Column.KEY):
        return pa.nulls(frames.count, _TEXT)
    return _nullable(_TEXT, *frames.keys())


def _tags(frames: Frames) -> pa.Array:
    if not frames.has(Column.TAGS):
        return pa.nulls(frames.count, _TEXTS)
    offsets, data = frames.variable(Column.TAGS)
    check.text(offsets, data, Column.TAGS)
    joined = pc.utf8_trim(_nullable(_TEXT, offsets, data), characters=TAG_SEPARATOR)
    return pc.split_pattern(joined, TAG_SEPARATOR).cast(_TEXTS)


def _headers(frames: Frames) -> pa.Array:
    rows = frames.headers()
    return pa.nulls(frames.count, _MAP) if rows is None else _maps(rows)


def _header_types(frames: Frames) -> pa.Array:
    rows = frames.headers()
    return pa.nulls(frames.count, _TEXT) if rows is None else header_types.letters_of(rows)


def encoded_headers(frames: Frames) -> pa.Array:
    """Headers as they were sent, one msgpack map per row; null: no headers."""
    if not frames.has(Column.HEADERS):
        return pa.nulls(frames.count, pa.binary())
    return _nullable(pa.binary(), *frames.variable(Column.HEADERS))


def header_maps(encoded: pa.Array) -> pa.Array:
    """Encoded headers as the source's column: names and the text of their values."""
    if encoded.null_count == len(encoded):
        return pa.nulls(len(encoded), _MAP)
    return _maps(_decoded(encoded))


def _decoded(encoded: pa.Array) -> list[_Row | None]:
    return [None if row is None else _decoded_row(row) for row in encoded.to_pylist()]


def _decoded_row(encoded: bytes) -> _Row:
    headers = read_headers(encoded)
    return {UNREADABLE: encoded} if headers is None else headers


def _maps(rows: list[_Row | None]) -> pa.Array:
    return pa.array([None if row is None else _header_texts(row) for row in rows], _MAP)


def _header_texts(headers: _Row) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in headers.items()]


def _text(value: str | float | bytes) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return str(value).lower() if isinstance(value, bool) else str(value)


def _body(frames: Frames) -> pa.Array:
    return _binary(*frames.variable(Column.BODY))


def _body_views(frames: Frames) -> pa.Array:
    """Views into the memory of the frames. Small frames are joined first, since Arrow tracks each buffer of views."""
    size = sum(view.size for view in frames.views)
    if size < VIEWED_SIZE_MIN * len(frames.views) or not all(view.has(Column.BODY) for view in frames.views):
        return viewed(_body(frames))
    return pa.concat_arrays([viewed(view.binary(Column.BODY)) for view in frames.views])


def _send_time(frames: Frames) -> pa.Array:
    if not frames.has(Column.SEND_TIME):
        return pa.nulls(frames.count, _TIME)
    times, valid = frames.fixed(Column.SEND_TIME)
    check.times(times, Column.SEND_TIME)
    return _fixed(_TIME, times, valid)


def _store_time(frames: Frames) -> pa.Array:
    return _fixed(_TIME, frames.repeat([view.store_time for view in frames.views]), None)


def _logical_partition(frames: Frames) -> pa.Array:
    """Null for a row without a key, which has no fixed logical partition."""
    if not frames.has(Column.KEY_HASH):
        return pa.nulls(frames.count, pa.int32())
    hashes, valid = frames.fixed(Column.KEY_HASH)
    if frames.has(Column.KEY):
        offsets, _ = frames.keys()
        keyed = offsets[1:] != offsets[:-1]
        valid = keyed if valid is None else keyed & valid
    slots = (hashes % np.uint64(LOGICAL_PARTITIONS)).astype(np.int32)
    return _fixed(pa.int32(), slots, valid)


def _epoch(frames: Frames) -> pa.Array:
    return _fixed(pa.int64(), frames.repeat([view.epoch for view in frames.views]), None)


class SparkColumn(NamedTuple):
    """A column of the source, and the function that builds it."""

    type: pa.DataType
    nullable: bool
    build: Callable[[Frames], pa.Array]


#: All columns, in the order of the source's schema.
COLUMNS: Final[dict[str, SparkColumn]] = {
    "subject": SparkColumn(_TEXT, False, _subject),
    "partition": SparkColumn(_TEXT, False, _partition),
    "sequence": SparkColumn(pa.int64(), False, _sequence),
    "message_id": SparkColumn(_TEXT, False, _message_id),
    "key": SparkColumn(_TEXT, True, _key),
    "tags": SparkColumn(_TEXTS, True, _tags),
    "headers": SparkColumn(_MAP, True, _headers),
    "body": SparkColumn(pa.binary(), False, _body),
    "send_time": SparkColumn(_TIME, True, _send_time),
    "store_time": SparkColumn(_TIME, False, _store_time),
    "logical_partition": SparkColumn(pa.int32(), True, _logical_partition),
}

#: The columns of archives: those of the source, the types of header values, so that a replay can send a message
#: unchanged, and the epoch, which distinguishes messages of a damaged log that got the same sequence.
STORED_COLUMNS: Final[dict[str, SparkColumn]] = {
    **COLUMNS,
    header_types.COLUMN: SparkColumn(_TEXT, True, _header_types),
    "epoch": SparkColumn(pa.int64(), False, _epoch),
}


# --- batches ------------------------------------------------------------------------------------


def record_batches(
    frames: Iterable[tuple[ChunkPartition, FrameView]], schema: pa.Schema, group: str, picker: Picker | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches with the columns of ``schema`` and the rows within the bounds of the partitions.

    The rows are in the order of the frames. A ``picker`` excludes rows that cannot match the filters.
    """
    builders = [(COLUMNS.get(name) or STORED_COLUMNS[name]).build for name in schema.names]
    alone_count = ALONE_COUNT if len(builders) <= ALONE_COLUMNS_MAX else BATCH_COUNT
    members: list[tuple[ChunkPartition, FrameView]] = []
    count = size = 0
    for member in frames:
        partition, view = member
        picked = None
        if picker is not None:
            picked = picker.rows(view)
            if picked is not None and not picked.any():
                continue
        within = partition.start <= view.base and view.base + view.count <= partition.end
        if not within or picked is not None or view.has(Column.SELECTION):
            if members:
                yield from _batch(Frames(members, group), builders, schema)
                members, count, size = [], 0, 0
            yield from _rows_of(Frames([member], group), builders, schema, picked)
            continue
        members.append(member)
        count += member[1].count
        size += view.size + view.inflated_size
        if count >= BATCH_COUNT or size >= BATCH_SIZE or (len(members) == 1 and count >= alone_count):
            yield from _batch(Frames(members, group), builders, schema)
            members, count, size = [], 0, 0
    if members:
        yield from _batch(Frames(members, group), builders, schema)


def one_batch(members: Sequence[tuple[ChunkPartition, FrameView]], schema: pa.Schema, group: str) -> pa.RecordBatch:
    """All rows of some frames, with text and binary columns as views. The rows must fit into one Arrow array."""
    frames = Frames(members, group)
    build = {name: column.build for name, column in STORED_COLUMNS.items()} | {"body": _body_views}
    columns = [viewed(build[name](frames)) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=viewed_schema(schema))


def _batch(frames: Frames, builders: list[Callable[[Frames], pa.Array]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    yield from _parts(pa.RecordBatch.from_arrays([build(frames) for build in builders], schema=schema))


def _rows_of(
    frames: Frames,
    builders: list[Callable[[Frames], pa.Array]],
    schema: pa.Schema,
    picked: npt.NDArray[np.bool_] | None,
) -> Iterator[pa.RecordBatch]:
    """The picked rows of one frame within the bounds of its partition."""
    (partition,), (view,) = frames.partitions, frames.views
    sequences = view.sequences()
    wanted = (sequences >= partition.start) & (sequences < partition.end)
    if picked is not None:
        wanted &= picked
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return
    batch = pa.RecordBatch.from_arrays([build(frames) for build in builders], schema=schema)
    first, last = int(rows[0]), int(rows[-1])
    batch = batch.slice(first, last - first + 1)
    if len(rows) < batch.num_rows:
        batch = batch.filter(pa.array(wanted[first : last + 1]))
    yield from _parts(batch)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= BATCH_COUNT_MAX:
        yield batch
        return
    for start in range(0, batch.num_rows, BATCH_COUNT_MAX):
        yield batch.slice(start, BATCH_COUNT_MAX)


def _binary(offsets: _Offsets, data: memoryview) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, 0)


def _nullable(kind: pa.DataType, offsets: _Offsets, data: memoryview) -> pa.Array:
    """An array in which empty values are null."""
    filled = offsets[1:] != offsets[:-1]
    buffers = [_validity(filled), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(filled), buffers)


def _fixed(kind: pa.DataType, values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    validity = None if valid is None else _validity(valid)
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(values)])


def _validity(valid: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
