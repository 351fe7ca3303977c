"""Building frames. The result is a list of buffers to write one after another, so large columns are not copied."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from plait.errors import InvalidArgument, TooLarge
from plait.frame import header_packing
from plait.frame.columns import (
    COMPRESSIBLE,
    ENTRY_SIZE,
    ENTRY_SIZE_BITS,
    FIXED_TYPES,
    ORIGINAL_SIZE_MAX,
    Codec,
    Column,
    label,
)
from plait.frame.compression import codec_named, deflate
from plait.frame.header import (
    CLIENT,
    HEADER_SIZE,
    MAGIC,
    SEQUENCE_MAX,
    STAMP,
    STAMP_OFFSET,
    TIME_MAX,
    U32,
    VERSION,
    pad,
)
from plait.limits import COLUMN_SIZE_MAX, FRAME_COUNT_MAX, FRAME_SIZE_MAX, KIB

Buffer = bytes | bytearray | memoryview
#: Rows of a variable column: bytes, or text that is stored as UTF-8. Arrow arrays are used in place if possible.
Rows: TypeAlias = "Sequence[bytes] | Sequence[str] | pa.Array | pa.ChunkedArray"
#: An encoded column: its number, its codec, and its bytes in pieces.
Encoded = tuple[int, Codec, list[Buffer]]

#: Compressing less than this costs more than it saves.
COMPRESS_FROM: Final = 512
#: Up to this many rows, a join is faster than an Arrow array.
SMALL_COUNT: Final = 64


def pack_stamp(partition: int, base: int, store_time: int, durable: int, epoch: int) -> bytes:
    """The broker's part of the header, including its checksum."""
    stamp = STAMP.pack(partition, base, store_time, durable, epoch)
    return stamp + U32.pack(crc32c(stamp))


NO_STAMP: Final = pack_stamp(0, 0, 0, 0, 0)
_PADDING: Final = [b"\0" * n for n in range(8)]
#: The columns of one row, up to the offsets of its first variable column: a send time and a body...
_ONE_ROW: Final = Struct("<IIqii")
_ONE_ROW_BITS: Final = 1 << Column.SEND_TIME | 1 << Column.BODY
#: ...and with a key hash and a key.
_ONE_KEYED: Final = Struct("<IIIIQqii")
_ONE_KEYED_BITS: Final = _ONE_ROW_BITS | 1 << Column.KEY_HASH | 1 << Column.KEY
_ONE_ROW_TIME: Final = 8 | Codec.CONST << ENTRY_SIZE_BITS
#: The largest body for ``build_one``: larger ones gain nothing from it.
ONE_ROW_SIZE_MAX: Final = 64 * KIB
_OFFSETS: Final = [Struct(f"<{count + 1}i") for count in range(SMALL_COUNT + 1)]
_DIRECTORIES: Final = [Struct(f"<{count}I{pad(ENTRY_SIZE * count)}x") for count in range(33)]
_ARRAYS: Final = (pa.Array, pa.ChunkedArray)
_BINARY: Final = pa.binary()
_STRING: Final = pa.string()


class FrameParts:
    """A frame as buffers, and the header fields that its sender needs."""

    __slots__ = ("count", "first", "flags", "parts", "previous", "producer", "size", "stamp", "tail_columns")

    def __init__(
        self,
        columns: int,
        parts: list[Buffer],
        size: int,
        count: int,
        producer: int,
        first: int,
        previous: int,
        flags: int,
        stamp: bytes = NO_STAMP,
    ) -> None:
        self.tail_columns = columns
        #: The header (set by ``follow``), the directory and the columns.
        self.parts = parts
        self.size = size
        self.count = count
        self.producer = producer
        self.first = first
        self.flags = flags
        self.stamp = stamp
        if self.size > FRAME_SIZE_MAX:
            raise TooLarge(f"frame of {self.size} bytes is over the limit of {FRAME_SIZE_MAX}; send fewer rows")
        if count > FRAME_COUNT_MAX:
            raise TooLarge(f"frame of {count} rows is over the limit of {FRAME_COUNT_MAX}; send fewer")
        if first + count > SEQUENCE_MAX:
            raise InvalidArgument(f"producer sequence {first} is over the limit of {SEQUENCE_MAX}")
        self.follow(previous)

    @property
    def last(self) -> int:
        """The producer sequence of the last row."""
        return self.first + self.count - 1

    def follow(self, previous: int) -> None:
        """Write the header and checksum for the frame as the successor of ``previous``."""
        self.previous = previous
        try:
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
        except struct.error as error:
            raise InvalidArgument(
                f"producer {self.producer}, sequence {self.first} after {previous}, flags {self.flags}: {error}"
            ) from None
        crc = crc32c(client)
        parts = self.parts
        for part in parts[1:]:
            crc = crc32c(part, crc)
        parts[0] = client + U32.pack(crc) + self.stamp

    def stamp_with(self, stamp: bytes) -> None:
        """Set the broker's part of the header, which the client's checksum does not cover."""
        self.stamp = stamp
        head = self.parts[0]
        self.parts[0] = bytes(head[:STAMP_OFFSET]) + stamp

    def tobytes(self) -> bytes:
        """The frame as one bytes object."""
        return b"".join(self.parts)


def variable_parts(rows: Rows) -> tuple[Buffer, Buffer]:
    """Offsets and data of a variable column."""
    if isinstance(rows, _ARRAYS):
        array = rows
    elif len(rows) <= SMALL_COUNT and (joined := _join(rows)) is not None:
        return joined
    else:
        try:
            array = pa.array(rows, _BINARY)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(f"rows are not all bytes: {error}") from None
    if isinstance(array, pa.ChunkedArray):
        if array.nbytes > 2 * COLUMN_SIZE_MAX:
            raise TooLarge(f"a column of {array.nbytes} bytes is over any frame's limit; send fewer rows")
        array = array.combine_chunks()
    if array.null_count:
        raise InvalidArgument("a column has null rows; give every row a value")
    if array.type not in (_BINARY, _STRING):
        try:
            array = array.cast(_BINARY)
        except pa.ArrowException as error:
            raise InvalidArgument(f"rows of type {array.type} are not bytes: {error}") from None
    _, offsets_buffer, data_buffer = array.buffers()
    start = array.offset
    offsets = memoryview(offsets_buffer).cast("B")[4 * start : 4 * (start + len(array) + 1)]
    first = U32.unpack_from(offsets)[0]
    last = U32.unpack_from(offsets, len(offsets) - 4)[0]
    data = memoryview(data_buffer).cast("B")[first:last] if last > first else b""
    return offsets, data


def _join(rows: Sequence[bytes] | Sequence[str]) -> tuple[Buffer, Buffer] | None:
    """The offsets and data of a few rows; None if the rows are not plain bytes or text."""
    try:
        encoded: Any = [row.encode() for row in rows] if type(rows[0]) is str else rows  # type: ignore[union-attr]
        ends = list(accumulate(map(len, encoded), initial=0))
        if ends[-1] > COLUMN_SIZE_MAX:
            raise TooLarge(f"a column of {ends[-1]} bytes is over any frame's limit; send fewer rows")
        data = b"".join(encoded)
    except (AttributeError, TypeError, UnicodeEncodeError):
        return None
    # A memoryview's length counts items, not bytes.
    return (_OFFSETS[len(rows)].pack(*ends), data) if len(data) == ends[-1] else None


#: The variable columns of a frame that ``build_frame`` builds.
_VARIABLE = (Column.KEY, Column.BODY, Column.TO_GROUP, Column.TAGS, Column.HEADERS)


def build_frame(
    bodies: Rows,
    *,
    producer: int,
    first: int,
    previous: int = 0,
    send_time: int | npt.NDArray[np.int64] | None = None,
    deliver_at: int | npt.NDArray[np.int64] | None = None,
    keys: Rows | None = None,
    key_hashes: npt.NDArray[np.uint64] | None = None,
    groups: Rows | None = None,
    tags: Rows | None = None,
    headers: Rows | None = None,
    priority: int | npt.NDArray[np.uint8] | None = None,
    flags: int = 0,
    compression: str | None = None,
    note: bytes = b"",
) -> FrameParts:
    """A frame of the rows, with the client's checksum and without a stamp.

    ``keys``, ``groups``, ``tags`` and ``headers`` are encoded (a row without one is empty). ``send_time`` and
    ``deliver_at`` are one time for all rows, or one per row; so is ``priority``. ``note`` is the producer group of half
    messages.
    """
    count = len(bodies)
    if not 0 < count <= FRAME_COUNT_MAX:
        raise InvalidArgument(f"a frame takes 1 to {FRAME_COUNT_MAX} rows, not {count}")
    codec = codec_named(compression) if compression else None
    columns: list[Encoded] = []
    if key_hashes is not None:
        columns.append((Column.KEY_HASH, Codec.RAW, [_fixed(key_hashes, count, Column.KEY_HASH)]))
    if send_time is not None:
        columns.append(_times(send_time, count, Column.SEND_TIME))
    if deliver_at is not None:
        columns.append(_times(deliver_at, count, Column.DELIVER_AT))
    for column, rows in zip(_VARIABLE, (keys, bodies, groups, tags, headers), strict=True):
        if rows is None:
            continue
        if len(rows) != count:
            raise InvalidArgument(f"{label(column)} has {len(rows)} rows, bodies have {count}")
        offsets, data = variable_parts(rows)
        if column is Column.HEADERS and codec is None and deliver_at is None:
            block = header_packing.pack(offsets, data)
            offsets, data = (offsets, data) if block is None else (b"", block)
        if codec is not None and column in COMPRESSIBLE:
            columns.append(_variable(column, offsets, data, codec))
        else:
            columns.append((column, Codec.RAW, [offsets, data]))
    if priority is not None:
        columns.append(_priorities(priority, count))
        columns.sort(key=itemgetter(0))
    if note:
        columns.append((Column.NOTE, Codec.RAW, [note]))
    frame = assemble(columns, count=count, producer=producer, first=first, previous=previous, flags=flags)
    if frame.size > ORIGINAL_SIZE_MAX:
        raise TooLarge(f"frame of {frame.size} bytes is over the limit of {ORIGINAL_SIZE_MAX}; send fewer rows")
    return frame


def body_column(rows: list[bytes], compression: str | None = None) -> Encoded:
    """The body column for ``assemble``. Built without Arrow, which imports pandas for long lists."""
    data = b"".join(rows)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32).tobytes()
    return _variable(Column.BODY, offsets, data, codec_named(compression) if compression else None)


def _variable(column: Column, offsets: Buffer, data: Buffer, codec: Codec | None) -> Encoded:
    """A variable column; compressed if a codec is given and it saves space."""
    size = len(offsets) + len(data)
    # No reader could inflate a column over the limit. Raw, it exceeds the limit of a frame and is refused.
    if codec is not None and COMPRESS_FROM <= size <= COLUMN_SIZE_MAX:
        packed = deflate(b"".join((offsets, data)), codec)
        if len(packed) < size:
            return column, codec, [packed]
    return column, Codec.RAW, [offsets, data]


def build_one(
    body: bytes,
    key: bytes | None = None,
    key_hash: int = 0,
    *,
    producer: int,
    first: int,
    previous: int,
    send_time: int,
    flags: int = 0,
) -> FrameParts:
    """The frame that ``build_frame`` makes of one short body, built faster: a message sent alone waits for it."""
    size, bits = len(body), _ONE_ROW_BITS
    if key is None:
        rest = _ONE_ROW.pack(_ONE_ROW_TIME, size + 8, send_time, 0, size) + body + _PADDING[-size & 7]
    else:
        length, bits = len(key), _ONE_KEYED_BITS
        columns = _ONE_KEYED.pack(8, _ONE_ROW_TIME, length + 8, size + 8, key_hash, send_time, 0, length)
        rest = b"".join((columns, key, _PADDING[-length & 7], _OFFSETS[1].pack(0, size), body, _PADDING[-size & 7]))
    return FrameParts(bits, [b"", rest], HEADER_SIZE + len(rest), 1, producer, first, previous, flags)


def build_bodies(rows: list[bytes], *, producer: int, first: int, stamp: bytes) -> FrameParts:
    """A frame of bodies alone, with the broker's stamp."""
    count = len(rows)
    if count <= SMALL_COUNT:
        offsets = _OFFSETS[count].pack(*accumulate(map(len, rows), initial=0))
    else:
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32).tobytes()
    data = b"".join((offsets, *rows))
    size = len(data)
    # One buffer, because each one costs a checksum and an entry of the write.
    rest = b"".join((_DIRECTORIES[1].pack(size), data, _PADDING[-size & 7]))
    return FrameParts(1 << Column.BODY, [b"", rest], HEADER_SIZE + len(rest), count, producer, first, 0, 0, stamp)


def assemble(
    columns: list[Encoded],
    *,
    count: int,
    producer: int,
    first: int,
    previous: int,
    flags: int,
    stamp: bytes = NO_STAMP,
) -> FrameParts:
    """A frame of encoded columns, which must be in the order of their numbers."""
    bits = 0
    entries: list[int] = []
    parts: list[Buffer] = [b"", b""]
    total = HEADER_SIZE
    for column, codec, pieces in columns:
        bits |= 1 << column
        size = 0
        for piece in pieces:
            size += len(piece)
        if size > FRAME_SIZE_MAX:
            raise TooLarge(f"a column of {size} bytes is over a frame's limit of {FRAME_SIZE_MAX}; send fewer rows")
        entries.append(size | codec << ENTRY_SIZE_BITS)
        parts += pieces
        total += size
        if size & 7:
            parts.append(_PADDING[-size & 7])
            total += -size & 7
    directory = parts[1] = _DIRECTORIES[len(entries)].pack(*entries)
    return FrameParts(bits, parts, total + len(directory), count, producer, first, previous, flags, stamp)


def _times(times: int | npt.NDArray[np.int64], count: int, column: Column) -> Encoded:
    """A column with one time for all rows, or one per row."""
    if not isinstance(times, int):
        return column, Codec.RAW, [_fixed(times, count, column)]
    if not 0 <= times <= TIME_MAX:
        raise InvalidArgument(f"{label(column)} {times} is not a date: use microseconds since 1970")
    return column, Codec.CONST, [times.to_bytes(8, "little")]


def _priorities(priority: int | npt.NDArray[np.uint8], count: int) -> Encoded:
    """A column with one priority for all rows, or one per row."""
    if isinstance(priority, int):
        return Column.PRIORITY, Codec.CONST, [bytes((priority,))]
    return Column.PRIORITY, Codec.RAW, [_fixed(priority, count, Column.PRIORITY)]


def _fixed(values: npt.NDArray[Any], count: int, column: int) -> memoryview:
    if len(values) != count:
        raise InvalidArgument(f"{label(column)} has {len(values)} rows, bodies have {count}")
    array: Any = np.ascontiguousarray(values, FIXED_TYPES[column])
    return memoryview(array).cast("B")
