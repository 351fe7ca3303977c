"""Joining several small frames into one.

A broker that receives single messages from many producers in one loop turn stores them as one frame with a run table,
because reading a frame costs as much as reading fifty of its rows. The parts were validated before, and the result gets
its own checksum. Each part is only sliced; one join per column copies the bytes of all parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from plait.errors import InvalidArgument
from plait.frame.builder import Buffer, Encoded, FrameParts, assemble
from plait.frame.columns import FIXED_WIDTHS, VARIABLE, Codec, Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView

#: Frames larger than this are not joined, because the join would cost more than it saves.
COALESCE_SIZE_MAX: Final = 16 * 1024

#: Columns whose rows can be concatenated.
_JOINABLE_BITS: Final = sum(1 << column for column in (*VARIABLE, *FIXED_WIDTHS))
_HEADERS_BIT: Final = 1 << Column.HEADERS


def can_coalesce(frame: FrameView) -> bool:
    """True if the frame is small, uncompressed, has rows of one producer, and no header block."""
    if frame.size > COALESCE_SIZE_MAX or frame.column_bits & ~_JOINABLE_BITS or frame.compressed:
        return False
    return not (frame.column_bits & _HEADERS_BIT) or frame.header_block() is None


def coalesce(frames: Sequence[FrameView]) -> FrameParts:
    """A frame with all rows, in order. The frames must be valid and have the same columns and flags."""
    head = frames[0]
    bits, flags = head.column_bits, head.flags
    runs = array("Q")
    for frame in frames:
        if frame.column_bits != bits or frame.flags != flags:
            raise InvalidArgument("frames with different columns or flags cannot be joined")
        # ``run_tables.RUN``: row count and checksum share a word.
        runs.extend((frame.producer, frame.first, frame.count | frame.crc << 32, frame.previous))
    total = sum([frame.count for frame in frames])
    join_variable = _join_single if total == len(frames) else _join_variable
    columns: list[Encoded] = [(Column.RUNS, Codec.RAW, [runs.tobytes()])]
    for number in head.places:
        join = join_variable if number in VARIABLE else _join_fixed
        columns.append((number, Codec.RAW, join(frames, number)))
    # The run table names the producers, so the header names none.
    return assemble(columns, count=total, producer=0, first=0, previous=0, flags=flags & FLAG_UNSEQUENCED)


def _join_fixed(frames: Sequence[FrameView], number: int) -> list[Buffer]:
    pieces: list[Buffer] = []
    for frame in frames:
        codec, start, end = frame.places[number]
        data = frame.buffer[start:end]
        pieces.append(data if codec == Codec.RAW else bytes(data) * frame.count)
    return [b"".join(pieces)]


def _join_single(frames: Sequence[FrameView], number: int) -> list[Buffer]:
    """A column of frames with one row each: the bytes after its two offsets are the row."""
    pieces: list[Buffer] = []
    ends = array("i", (0,))
    size = 0
    for frame in frames:
        _, start, end = frame.places[number]
        pieces.append(frame.buffer[start + 8 : end])
        size += end - start - 8
        ends.append(size)
    return [ends.tobytes(), b"".join(pieces)]


def _join_variable(frames: Sequence[FrameView], number: int) -> list[Buffer]:
    pieces: list[Buffer] = []
    offsets: list[Buffer] = []
    seams: list[int] = []
    seam = -1
    for frame in frames:
        _, start, end = frame.places[number]
        split = start + 4 * (frame.count + 1)
        offsets.append(frame.buffer[start:split])
        pieces.append(frame.buffer[split:end])
        seam += frame.count + 1
        seams.append(seam)
    # The offsets of all frames are concatenated. The difference of two adjacent offsets is the length of a row, except
    # at a seam between two frames.
    lengths = np.diff(np.frombuffer(b"".join(offsets), "<i4"))
    rows = np.ones(len(lengths), bool)
    rows[seams[:-1]] = False
    joined = np.zeros(seam + 2 - len(frames), "<i4")
    np.cumsum(lengths[rows], out=joined[1:])
    return [joined.tobytes(), b"".join(pieces)]
