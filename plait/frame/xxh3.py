"""xxh3_64 of all values of an Arrow array at once: the hash of order keys, which must never change.

A library call per key takes five times as long as the hashing itself, mostly to create objects. Keys of 4 to 64 bytes,
which are nearly all keys, are hashed in a few passes over whole columns; the algorithm has a variant for each range of
lengths. Other keys are hashed by the library one by one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

_U64s = npt.NDArray[np.uint64]
_Int64s = npt.NDArray[np.int64]

#: The first part of the algorithm's default secret, as 64-bit words.
_SECRET: Final = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    ),
    "<u8",
)
_8: Final = _SECRET[1] ^ _SECRET[2]
_16_LOW: Final = _SECRET[3] ^ _SECRET[4]
_16_HIGH: Final = _SECRET[5] ^ _SECRET[6]
_PRIME: Final = np.uint64(0x9E37_79B1_85EB_CA87)
_MIX: Final = np.uint64(0x9FB2_1C65_1E98_DF25)
_AVALANCHE: Final = np.uint64(0x1656_6791_9E37_79F9)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_24, _28, _32, _35, _37, _49 = (np.uint64(bits) for bits in (24, 28, 32, 35, 37, 49))
_15, _40 = np.uint64(15), np.uint64(40)


class _HashRows:
    """Rows from which words are read, at a position from the start (0 or more) or from the end (negative)."""

    def __init__(self, data: pa.Buffer, starts: _Int64s, lengths: _Int64s) -> None:
        self._data = data
        self._starts = starts
        self._lengths = lengths
        self.lengths = lengths.astype(np.uint64)
        length = int(lengths[0])
        #: All rows are contiguous and have the same length, so a strided slice reads them.
        self._even = bool((starts == starts[0] + length * np.arange(len(starts))).all() and (lengths == length).all())

    def word(self, position: int, kind: type[np.uint32] | type[np.uint64] = np.uint64) -> _U64s:
        width = np.dtype(kind)
        size = len(self._data) - width.itemsize + 1
        words: npt.NDArray[Any] = np.ndarray((size,), width.newbyteorder("<"), self._data, 0, (1,))
        if self._even:
            length = int(self._lengths[0])
            first = int(self._starts[0]) + position + (length if position < 0 else 0)
            found = words[first : first + length * (len(self._starts) - 1) + 1 : length]
        else:
            found = words[self._starts + position + (self._lengths if position < 0 else 0)]
        return found.astype(np.uint64)


def hash_rows(rows: pa.Array) -> _U64s:
    """xxh3_64 of the bytes of each row of a binary or text array; a null row counts as empty."""
    count = len(rows)
    hashes = np.empty(count, np.uint64)
    if not count:
        return hashes
    _, offsets, data = rows.buffers()
    ends = np.frombuffer(offsets, np.int32)[rows.offset : rows.offset + count + 1].astype(np.int64)
    starts, lengths = ends[:-1], np.diff(ends)
    left = np.ones(count, bool)
    for shortest, longest, variant in ((4, 8, _up_to_8), (9, 16, _up_to_16), (17, 32, _up_to_32), (33, 64, _up_to_64)):
        chosen = (lengths >= shortest) & (lengths <= longest)
        if chosen.all():
            return variant(_HashRows(data, starts, lengths))
        if chosen.any():
            hashes[chosen] = variant(_HashRows(data, starts[chosen], lengths[chosen]))
            left &= ~chosen
    some = rows.filter(pa.array(left)).cast(pa.binary()).fill_null(b"").to_pylist()
    hashes[left] = np.fromiter(map(xxh3_64_intdigest, some), np.uint64, len(some))
    return hashes


def _up_to_8(rows: _HashRows) -> _U64s:
    value: _U64s = (rows.word(-4, np.uint32) + (rows.word(0, np.uint32) << _32)) ^ _8
    value ^= (value << _49 | value >> _15) ^ (value << _24 | value >> _40)
    value *= _MIX
    value ^= (value >> _35) + rows.lengths
    value *= _MIX
    value ^= value >> _28
    return value


def _up_to_16(rows: _HashRows) -> _U64s:
    low, high = rows.word(0) ^ _16_LOW, rows.word(-8) ^ _16_HIGH
    return _avalanche(rows.lengths + low.byteswap() + high + _fold(low, high))


def _up_to_32(rows: _HashRows) -> _U64s:
    return _avalanche(rows.lengths * _PRIME + _ends(rows, 0))


def _up_to_64(rows: _HashRows) -> _U64s:
    return _avalanche(rows.lengths * _PRIME + _ends(rows, 0) + _ends(rows, 1))


def _ends(rows: _HashRows, depth: int) -> _U64s:
    """Mix the 16 bytes at each end, ``depth`` times 16 bytes further in."""
    secret, front, back = _SECRET[4 * depth :], 16 * depth, -16 * (depth + 1)
    return _fold(rows.word(front) ^ secret[0], rows.word(front + 8) ^ secret[1]) + _fold(
        rows.word(back) ^ secret[2], rows.word(back + 8) ^ secret[3]
    )


def _fold(a: _U64s, b: _U64s) -> _U64s:
    """The XOR of both halves of the 128-bit products."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _32, b & _LOW, b >> _32
    across = a_low * b_high
    middle = (a_low * b_low >> _32) + (across & _LOW) + a_high * b_low
    folded: _U64s = (a * b) ^ (a_high * b_high + (across >> _32) + (middle >> _32))
    return folded


def _avalanche(value: _U64s) -> _U64s:
    value ^= value >> _37
    value *= _AVALANCHE
    value ^= value >> _32
    return value
