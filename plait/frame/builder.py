"""Builds frames. The result is a list of buffers to write one after another: large columns are never copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from plait.errors import InvalidArgument, TooLarge
from plait.frame.codec import codec_named, deflate
from plait.frame.columns import COMPRESSIBLE, ENTRY_SIZE_BITS, Codec, Column
from plait.frame.header import CLIENT, HEADER_SIZE, MAGIC, NO_STAMP, STAMP_OFFSET, U32, VERSION, pad
from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX

Buffer = bytes | bytearray | memoryview
#: Rows of a variable column: ready-made Arrow arrays are used as they are.
Rows = Sequence[bytes] | pa.Array

_PADDING = [b"\0" * n for n in range(8)]
#: Compressing less than this costs more than it saves.
COMPRESS_FROM = 512


class FrameParts:
    """A finished frame as buffers, and the header facts its sender needs."""

    __slots__ = ("count", "first", "flags", "parts", "previous", "producer", "size", "stamp", "tail_columns")

    def __init__(
        self,
        columns: int,
        tail: list[Buffer],
        count: int,
        producer: int,
        first: int,
        previous: int,
        flags: int,
    ) -> None:
        self.tail_columns = columns
        self.parts: list[Buffer] = [b"", *tail]
        self.size = HEADER_SIZE + sum(map(len, tail))
        self.count = count
        self.producer = producer
        self.first = first
        self.flags = flags
        self.stamp = NO_STAMP
        if self.size > FRAME_SIZE_MAX:
            raise TooLarge(
                f"frame of {self.size} bytes is over the limit of {FRAME_SIZE_MAX}; send fewer rows"
            )
        self.follow(previous)

    @property
    def last(self) -> int:
        """Producer sequence of the last row."""
        return self.first + self.count - 1

    def follow(self, previous: int) -> None:
        """(Re)sign the frame as the successor of ``previous``."""
        self.previous = previous
        client = CLIENT.pack(
            MAGIC,
            VERSION,
            self.flags,
            self.size,
            self.count,
            self.tail_columns,
            self.producer,
            self.first,
            previous,
        )
        crc = crc32c(client)
        for part in self.parts[1:]:
            crc = crc32c(part, crc)
        self.parts[0] = client + U32.pack(crc) + self.stamp

    def stamp_with(self, stamp: bytes) -> None:
        """Put the broker's part in; the client's signature does not cover it."""
        self.stamp = stamp
        head = self.parts[0]
        self.parts[0] = bytes(head[:STAMP_OFFSET]) + stamp

    def tobytes(self) -> bytes:
        """The frame as one piece."""
        return b"".join(self.parts)


def variable_parts(rows: Rows) -> tuple[Buffer, Buffer]:
    """Offsets and data of a variable column."""
    array = rows if isinstance(rows, pa.Array) else pa.array(rows, pa.binary())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        raise InvalidArgument("a column has null rows; give every row a value")
    if array.type not in (pa.binary(), pa.string()):
        try:
            array = array.cast(pa.binary())
        except pa.ArrowException as error:
            raise InvalidArgument(f"rows of type {array.type} are not bytes: {error}") from None
    _, offsets_buffer, data_buffer = array.buffers()
    start = array.offset
    offsets = memoryview(offsets_buffer).cast("B")[4 * start : 4 * (start + len(array) + 1)]
    first = U32.unpack_from(offsets)[0]
    last = U32.unpack_from(offsets, len(offsets) - 4)[0]
    data = memoryview(data_buffer).cast("B")[first:last] if last > first else b""
    return offsets, data


def build_frame(
    bodies: Rows,
    *,
    producer: int,
    first: int,
    previous: int = 0,
    send_time: int | npt.NDArray[np.int64] | None = None,
    keys: Rows | None = None,
    key_hashes: npt.NDArray[np.uint64] | None = None,
    tags: Rows | None = None,
    headers: Rows | None = None,
    flags: int = 0,
    compression: str | None = None,
) -> FrameParts:
    """A frame of the rows, signed and not yet stamped.

    ``keys``, ``tags`` and ``headers`` are encoded already (a row without one is empty); ``send_time`` is one
    time for all rows or one a row.
    """
    count = len(bodies)
    if not 0 < count <= FRAME_COUNT_MAX:
        raise InvalidArgument(f"a frame takes 1 to {FRAME_COUNT_MAX} rows, not {count}")
    codec = codec_named(compression) if compression else Codec.RAW
    columns: list[tuple[int, Codec, list[Buffer]]] = []
    if key_hashes is not None:
        columns.append((Column.KEY_HASH, Codec.RAW, [_fixed(key_hashes, count, "<u8")]))
    if send_time is not None:
        if isinstance(send_time, int):
            columns.append((Column.SEND_TIME, Codec.CONST, [send_time.to_bytes(8, "little", signed=True)]))
        else:
            columns.append((Column.SEND_TIME, Codec.RAW, [_fixed(send_time, count, "<i8")]))
    for column, rows in (
        (Column.KEY, keys),
        (Column.BODY, bodies),
        (Column.TAGS, tags),
        (Column.HEADERS, headers),
    ):
        if rows is None:
            continue
        if len(rows) != count:
            raise InvalidArgument(f"{column.name.lower()} has {len(rows)} rows, bodies have {count}")
        pieces: list[Buffer] = list(variable_parts(rows))
        if codec and column in COMPRESSIBLE and sum(map(len, pieces)) >= COMPRESS_FROM:
            raw = _rebased(pieces)
            packed = deflate(raw, codec)
            if len(packed) < len(raw):
                columns.append((column, codec, [packed]))
                continue
        columns.append((column, Codec.RAW, pieces))
    return assemble(columns, count=count, producer=producer, first=first, previous=previous, flags=flags)


def assemble(
    columns: list[tuple[int, Codec, list[Buffer]]],
    *,
    count: int,
    producer: int,
    first: int,
    previous: int,
    flags: int,
) -> FrameParts:
    """A frame of columns that are encoded already, in the order of their numbers."""
    bits = 0
    directory = bytearray()
    tail: list[Buffer] = [b""]
    for column, codec, pieces in columns:
        bits |= 1 << column
        size = sum(map(len, pieces))
        directory += U32.pack(size | codec << ENTRY_SIZE_BITS)
        tail.extend(pieces)
        if size & 7:
            tail.append(_PADDING[pad(size)])
    directory += _PADDING[pad(len(directory))]
    tail[0] = bytes(directory)
    return FrameParts(bits, tail, count, producer, first, previous, flags)


def _fixed(values: npt.NDArray[Any], count: int, dtype: str) -> memoryview:
    if len(values) != count:
        raise InvalidArgument(f"a column has {len(values)} rows, bodies have {count}")
    return memoryview(np.ascontiguousarray(values, dtype)).cast("B")


def _rebased(pieces: list[Buffer]) -> bytes:
    """Offsets that start at 0, so that a compressed column stands alone."""
    offsets = np.frombuffer(pieces[0], "<i4")
    return (offsets - offsets[0]).astype("<i4").tobytes() + bytes(pieces[1])
