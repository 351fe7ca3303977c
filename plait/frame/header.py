"""The fixed header of a frame: 80 bytes, little-endian.

The client writes the first 40 bytes; ``crc`` covers them and everything after the header. The broker writes the stamp,
which has its own checksum, so that stamping a frame does not change what the client's checksum covers. Sequences are
limited by ``SEQUENCE_MAX`` and times by ``TIME_MAX``: a reader refuses larger ones.

====== ==== ======================== ==========================================================
offset type field                    meaning
====== ==== ======================== ==========================================================
0      2s   magic                    ``PL``
2      u8   version                  1
3      u8   flags                    low four bits mandatory, high four ignorable
4      u32  size                     whole frame, header and padding included; a multiple of 8
8      u32  count                    rows
12     u32  columns                  bit set: low 16 mandatory, high 16 skippable
16     u64  producer                 producer id (with a run table this and the next two are 0, unless forwarded)
24     u64  first                    producer sequence of row 0; the rows count up from it
32     u64  previous                 the producer's last sequence in this partition before this frame
40     u32  crc                      CRC-32C of bytes 0-39 and 80-size
44     u32  partition                stamp: partition id
48     u64  base                     stamp: sequence of row 0
56     i64  store_time               stamp: microseconds since 1970
64     u64  durable                  stamp: message-log offset known durable at append
72     u32  epoch                    stamp: broker epoch
76     u32  stamp_crc                CRC-32C of bytes 44-75
====== ==== ======================== ==========================================================
"""

from __future__ import annotations

import struct
import sys
from typing import Final

from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX

if sys.byteorder != "little":
    # Columns are used in place, so the machine must have the byte order of the format.
    raise ImportError("plait needs a little-endian machine: frames are little-endian and are read in place")

MAGIC: Final = b"PL"
VERSION: Final = 1
#: The first bytes of every frame of this version; recovery searches for them after damage.
PREFIX: Final = MAGIC + bytes([VERSION])

HEADER_SIZE: Final = 80
HEADER: Final = struct.Struct("<2sBBIIIQQQIIQqQII")
CLIENT: Final = struct.Struct("<2sBBIIIQQQ")
STAMP: Final = struct.Struct("<IQqQI")
U32: Final = struct.Struct("<I")
U64: Final = struct.Struct("<Q")

SIZE_OFFSET: Final = 4
PREVIOUS_OFFSET: Final = 32
CRC_OFFSET: Final = 40
STAMP_OFFSET: Final = 44
STAMP_CRC_OFFSET: Final = 76

assert HEADER.size == HEADER_SIZE
assert CLIENT.size == CRC_OFFSET
assert STAMP_OFFSET + STAMP.size == STAMP_CRC_OFFSET

#: The rows are not idempotent: ``previous`` has no meaning, and no producer state is stored (oneway sends).
FLAG_UNSEQUENCED: Final = 1
#: A broker forwarded the rows to another partition. The header names that broker as the producer, so that a resend of
#: the frame is stored once. The run table has the message ids of the rows.
FLAG_FORWARDED: Final = 2
FLAGS_KNOWN: Final = FLAG_UNSEQUENCED | FLAG_FORWARDED
FLAGS_MANDATORY: Final = 0x0F
FLAGS_REFUSED: Final = FLAGS_MANDATORY & ~FLAGS_KNOWN

#: Sequences are below this: they fit a signed column, and adding the row count of a frame cannot overflow.
SEQUENCE_MAX: Final = 1 << 62
#: The last microsecond of the year 9999. Times before 1970 are invalid too.
TIME_MAX: Final = 253_402_300_799_999_999


class FrameHeader:
    """The fields of a frame header; ``column_bits`` is the field ``columns``."""

    __slots__ = (
        "base",
        "column_bits",
        "count",
        "crc",
        "durable",
        "epoch",
        "first",
        "flags",
        "partition",
        "previous",
        "producer",
        "size",
        "stamp_crc",
        "store_time",
        "version",
    )

    version: int
    flags: int
    size: int
    count: int
    column_bits: int
    producer: int
    first: int
    previous: int
    crc: int
    partition: int
    base: int
    store_time: int
    durable: int
    epoch: int
    stamp_crc: int


def defect_of(buffer: memoryview | bytes | bytearray, offset: int, refused_columns: int) -> str:
    """The first defect of a header that a reader refuses."""
    magic, version, flags, size, count, bits, _, first, _, _, _, base, store_time, *_ = HEADER.unpack_from(
        buffer, offset
    )
    if magic != MAGIC:
        return f"no frame here: magic is {magic!r}"
    if version != VERSION:
        return f"frame version {version} is not {VERSION}; a newer Plait wrote it"
    if not HEADER_SIZE < size <= FRAME_SIZE_MAX or size & 7:
        return f"frame size {size} is impossible (limit {FRAME_SIZE_MAX})"
    if size > len(buffer) - offset:
        return f"frame of {size} bytes is cut off after {len(buffer) - offset}"
    if not 0 < count <= FRAME_COUNT_MAX:
        return f"frame count {count} is impossible (limit {FRAME_COUNT_MAX})"
    if flags & FLAGS_REFUSED:
        return f"frame flags {flags:#x} are not known; a newer Plait wrote it"
    if bits & refused_columns:
        return f"frame columns {bits:#x} are not known; a newer Plait wrote it"
    if first + count > SEQUENCE_MAX or base + count > SEQUENCE_MAX:
        return f"frame sequences {first} and {base} are over the limit of {SEQUENCE_MAX}"
    return f"frame store time {store_time} is not a date"


def pad(size: int) -> int:
    """The number of zero bytes that pad ``size`` to the alignment."""
    return -size & 7
