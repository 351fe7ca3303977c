"""Compression of single columns, with bounded inflation.

A compressed column declares its raw size. Nothing is allocated for a size over ``COLUMN_SIZE_MAX``, and data that
inflates to any other size than declared is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import pyarrow as pa

from plait.errors import FrameError, InvalidArgument
from plait.frame.columns import COMPRESSIBLE, Codec, Column
from plait.frame.header import U32
from plait.frame.header_block import is_block, row_form_size
from plait.limits import COLUMN_SIZE_MAX

#: Arrow's name of each codec; "lz4" is the LZ4 frame format, which marks its end.
_NAMES: Final = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}
_RAW: Final = int(Codec.RAW)
_CONST: Final = int(Codec.CONST)
_PACKED: Final = (int(Codec.ZSTD), int(Codec.LZ4))


@cache
def _codec(codec: Codec) -> pa.Codec:
    return pa.Codec(codec.name.lower())


def codec_named(name: str) -> Codec:
    """The codec with this name."""
    try:
        return _NAMES[name]
    except KeyError:
        raise InvalidArgument(f"compression {name!r} is not known; use 'zstd' or 'lz4'") from None


def deflate(raw: bytes | memoryview, codec: Codec) -> bytes:
    """The compressed bytes of a column, after its raw size."""
    packed: bytes = _codec(codec).compress(raw, asbytes=True)
    return U32.pack(len(raw)) + packed


def memory_size(buffer: memoryview, places: Mapping[int, tuple[int, int, int]], count: int) -> int:
    """The sizes that compressed columns declare, and the bytes that the row form of a header block takes in addition.

    A column that inflates to another size than declared is refused.
    """
    size = 0
    codec, start, end = places.get(Column.HEADERS, (_CONST, 0, 0))
    if codec == _RAW and is_block(buffer[start:end]):
        size = max(row_form_size(buffer[start:end], count) - (end - start), 0)
    for column in COMPRESSIBLE & places.keys():
        codec, start, end = places[column]
        if codec in _PACKED and end - start >= U32.size:
            size += U32.unpack_from(buffer, start)[0]
    return size


def inflate(stored: memoryview, codec: Codec) -> memoryview:
    """The raw bytes of a compressed column, or ``FrameError``. Never allocates more than the declared, allowed size."""
    if len(stored) < U32.size:
        raise FrameError(f"compressed column of {len(stored)} bytes has no room for its size")
    (size,) = U32.unpack_from(stored)
    if size > COLUMN_SIZE_MAX:
        raise FrameError(f"compressed column declares {size} bytes; the limit is {COLUMN_SIZE_MAX}")
    packed = pa.py_buffer(stored[U32.size :])
    try:
        if codec is Codec.ZSTD:
            raw = _codec(codec).decompress(packed, decompressed_size=size)
        else:
            raw = _inflate_lz4(packed, size)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise FrameError(f"compressed column does not inflate to the {size} bytes it declares: {error}") from None
    return memoryview(raw).cast("B")


def _inflate_lz4(packed: pa.Buffer, size: int) -> pa.Buffer:
    # Arrow's one-shot decompression of LZ4 does not report data that ends early: the rest of the result would be
    # uninitialised memory.
    with pa.CompressedInputStream(pa.BufferReader(packed), "lz4") as stream:
        raw = stream.read_buffer(size)
        if len(raw) != size:
            raise ValueError(f"the data ends after {len(raw)} bytes")
        if stream.read(1):
            raise ValueError("the data continues after that")
    return raw
