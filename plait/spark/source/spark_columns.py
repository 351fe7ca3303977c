"""Builds the Arrow record batches for Spark from frames: columns are wrapped or joined as a whole, never row by row.

Several small frames become one batch, since a batch costs Spark as much as a few thousand rows. Only the headers of
frames without a header block are decoded row by row, and only if the query reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.send.open_rows import hash_keys
from plait.frame.columns import TAG_SEPARATOR, Column, check_text, check_times
from plait.frame.header_block import HeaderBlock
from plait.frame.run_tables import expand_runs
from plait.frame.view import FrameView
from plait.limits import KIB, LOGICAL_PARTITIONS, MIB
from plait.model.logical_partitions import without_lps
from plait.spark.archiving.array_views import viewed, viewed_schema
from plait.spark.source import block_maps, header_columns
from plait.spark.source.arrow_scalars import repeated
from plait.spark.source.joined_frames import Frames, Offsets, nullable, validity
from plait.storage.reading.log_chunks import ChunkPartition, WantedRows

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
#: Two hexadecimal digits for each byte value.
_HEX: Final = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), "<u2")


# --- columns ------------------------------------------------------------------------------------


def _same_texts(text: str, count: int) -> pa.Array:
    if count > BATCH_COUNT_MAX:
        # For an archiver: the column is as large as a file and used once, so it is not cached.
        return repeated(text, count)
    # Rounded up, so that batches of all sizes share a few columns.
    return _shared_texts(text, 1 << (count - 1).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _shared_texts(text: str, count: int) -> pa.Array:
    return repeated(text, count)


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
    return nullable(_TEXT, *frames.keys())


def _tags(frames: Frames) -> pa.Array:
    if not frames.has(Column.TAGS):
        return pa.nulls(frames.count, _TEXTS)
    offsets, data = frames.variable(Column.TAGS)
    check_text(offsets, data, Column.TAGS)
    joined = pc.utf8_trim(nullable(_TEXT, offsets, data), characters=TAG_SEPARATOR)
    return pc.split_pattern(joined, TAG_SEPARATOR).cast(_TEXTS)


def _headers(frames: Frames) -> pa.Array:
    return _of_headers(frames, header_columns.MAP, block_maps.map_array, header_columns.maps_of)


def _header_types(frames: Frames) -> pa.Array:
    return _of_headers(frames, _TEXT, block_maps.letter_array, header_columns.letters_of)


def _of_headers(
    frames: Frames,
    kind: pa.DataType,
    of_block: Callable[[HeaderBlock], pa.Array],
    of_rows: Callable[[list[header_columns.Headers | None], int], pa.Array],
) -> pa.Array:
    """A column that is built from headers: by one function from blocks, by another from decoded rows."""
    if not frames.has(Column.HEADERS):
        return pa.nulls(frames.count, kind)
    pieces = frames.headers()
    built = [of_block(each) if isinstance(each, HeaderBlock) else of_rows(each, len(each)) for each in pieces]
    return pa.concat_arrays(built)


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
    check_times(times, Column.SEND_TIME)
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
    "headers": SparkColumn(header_columns.MAP, True, _headers),
    "body": SparkColumn(pa.binary(), False, _body),
    "send_time": SparkColumn(_TIME, True, _send_time),
    "store_time": SparkColumn(_TIME, False, _store_time),
    "logical_partition": SparkColumn(pa.int32(), True, _logical_partition),
}

#: The columns of archives: those of the source, the types of header values, so that a replay can send a message
#: unchanged, and the epoch, which distinguishes messages of a damaged log that got the same sequence.
STORED_COLUMNS: Final[dict[str, SparkColumn]] = {
    **COLUMNS,
    header_columns.TYPES: SparkColumn(_TEXT, True, _header_types),
    "epoch": SparkColumn(pa.int64(), False, _epoch),
}


# --- rows that filters select -------------------------------------------------------------------


class Picker:
    """Selects the rows of a frame that may match a filter on keys or message ids, before any column is built.

    Keys are found by their hashes, which every frame with keys has. Other keys with the same hash also pass: the filter
    is applied again to the rows. The bits of a hash that hold the logical partition are ignored: a send that moved to
    another partition has another logical partition there.
    """

    def __init__(self, wanted: WantedRows) -> None:
        self._hashes = None if wanted.keys is None else without_lps(hash_keys(wanted.keys, len(wanted.keys)))
        self._ids = wanted.message_ids

    @classmethod
    def of(cls, wanted: WantedRows) -> Picker | None:
        """None: all rows match."""
        return None if wanted.keys is None and wanted.message_ids is None else cls(wanted)

    def rows(self, view: FrameView) -> npt.NDArray[np.bool_] | None:
        """True for each row that may match; None: all rows may."""
        picked: npt.NDArray[np.bool_] | None = None
        if self._ids is not None:
            picked = self._rows_by_id(view, self._ids)
            if not picked.any():
                return picked
        if self._hashes is not None:
            keyed = self._rows_by_key(view, self._hashes)
            picked = keyed if picked is None else picked & keyed
        return None if picked is None or picked.all() else picked

    @staticmethod
    def _rows_by_key(view: FrameView, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        if not view.has(Column.KEY_HASH):
            return np.zeros(view.count, bool)
        values = without_lps(view.values(Column.KEY_HASH))
        found = values == hashes[0] if len(hashes) == 1 else np.isin(values, hashes)
        return found if len(found) == view.count else np.full(view.count, bool(found.any()))

    @staticmethod
    def _rows_by_id(view: FrameView, ids: frozenset[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        picked = np.zeros(view.count, bool)
        if view.has(Column.SELECTION):
            producers, numbers = view.message_ids()
        elif view.has(Column.RUNS):
            runs = view.runs()
            present = {int(producer) for producer in runs["producer"]}
            if not any(producer in present for producer, _ in ids):
                return picked
            producers, numbers = expand_runs(runs)
        else:
            for producer, number in ids:
                if producer == view.producer and view.first <= number < view.first + view.count:
                    picked[number - view.first] = True
            return picked
        for producer, number in ids:
            picked |= (producers == np.uint64(producer)) & (numbers == np.uint64(number))
        return picked


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


def _binary(offsets: Offsets, data: memoryview) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, 0)


def _fixed(kind: pa.DataType, values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    bits = None if valid is None else validity(valid)
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(values)])
