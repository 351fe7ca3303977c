"""Builds the Arrow record batches for Spark from frames: columns are wrapped or joined as a whole, never row by row.

Several small frames become one batch, since a batch costs Spark as much as a few thousand rows. Only the headers of
frames without a header block are decoded row by row, and only if the query reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.frame.columns import TAG_SEPARATOR, Column, check_text, check_times
from plait.frame.header_block import HeaderBlock
from plait.frame.run_tables import expand_runs
from plait.frame.slicing import slice_mask
from plait.frame.view import FrameView
from plait.limits import KIB, LOGICAL_PARTITIONS, MIB
from plait.spark.archiving.array_views import viewed, viewed_schema
from plait.spark.source import block_maps, header_columns
from plait.spark.source.arrow_scalars import repeated
from plait.spark.source.joined_frames import Frames, Offsets, nullable, validity
from plait.spark.source.row_picker import Picker
from plait.spark.source.typed_headers import PREFIX, header_array
from plait.storage.reading.log_chunks import ChunkPartition

#: Frames are joined until they have this many rows, or this many bytes.
BATCH_COUNT: Final = 8_192
BATCH_SIZE: Final = 4 * MIB
#: If at most this many columns are wanted, a frame of this many rows is a batch by itself: copying its bodies would
#: cost more than another batch does.
ALONE_COUNT: Final = 2_048
ALONE_COLUMNS_MAX: Final = 2
#: If at most one in so many rows of a frame is picked, these rows are copied before columns are built.
SPARSE_SHARE: Final = 2
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


def _to_group(frames: Frames) -> pa.Array:
    if not frames.has(Column.TO_GROUP):
        return pa.nulls(frames.count, _TEXT)
    offsets, data = frames.variable(Column.TO_GROUP)
    check_text(offsets, data, Column.TO_GROUP)
    return nullable(_TEXT, offsets, data)


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
    "to_group": SparkColumn(_TEXT, True, _to_group),
}

#: The columns of archives: those of the source, the types of header values, so that a replay can send a message
#: unchanged, and the epoch, which distinguishes messages of a damaged log that got the same sequence.
STORED_COLUMNS: Final[dict[str, SparkColumn]] = {
    **COLUMNS,
    header_columns.TYPES: SparkColumn(_TEXT, True, _header_types),
    "epoch": SparkColumn(pa.int64(), False, _epoch),
}


# --- batches ------------------------------------------------------------------------------------


Builders = Mapping[str, Callable[[Frames], pa.Array]]


def source_builders(schema: pa.Schema) -> Builders:
    """The builders of columns of the source, and of headers as columns."""
    return {
        field.name: COLUMNS[field.name].build
        if field.name in COLUMNS
        else partial(header_array, name=field.name.removeprefix(PREFIX), kind=field.type)
        for field in schema
    }


def record_batches(
    frames: Iterable[tuple[ChunkPartition, FrameView]],
    schema: pa.Schema,
    group: str,
    picker: Picker | None = None,
    columns: Builders | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches with the columns of ``schema`` and the rows within the bounds of the partitions.

    The rows are in the order of the frames. A ``picker`` excludes rows that cannot match the filters.
    """
    known = columns or {name: column.build for name, column in STORED_COLUMNS.items()}
    builders = [known[name] for name in schema.names]
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
            if picked is not None and np.count_nonzero(picked) * SPARSE_SHARE <= len(picked):
                # Columns are built for the picked rows only.
                member, picked = (partition, FrameView(slice_mask(view, picked).tobytes())), None
                view = member[1]
        within = partition.start <= view.base and view.end <= partition.end
        if not within or picked is not None or view.has(Column.SELECTION):
            if members:
                yield from _batch(Frames(members, group), builders, schema)
                members, count, size = [], 0, 0
            yield from _rows_of(Frames([member], group), builders, schema, picked)
            continue
        members.append(member)
        count += view.count
        size += view.size + view.inflated_size
        if count >= BATCH_COUNT or size >= BATCH_SIZE or (len(members) == 1 and count >= alone_count):
            yield from _batch(Frames(members, group), builders, schema)
            members, count, size = [], 0, 0
    if members:
        yield from _batch(Frames(members, group), builders, schema)


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows with small batches joined: those that a filter leaves of frames."""
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        waiting.append(batch)
        count += batch.num_rows
        size += batch.nbytes
        if count >= ALONE_COUNT or size >= BATCH_SIZE:
            yield _one(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


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
