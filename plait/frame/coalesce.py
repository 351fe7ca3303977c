"""One frame out of several small ones.

A broker that receives single messages from many producers in one loop turn stores them as one frame with a run
table, because a frame costs a reader as much as fifty of its rows. Every part was verified before; the
result is signed anew. Work per part is slicing only: the rows are joined with array operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.frame.builder import Buffer, FrameParts, assemble
from plait.frame.columns import FIXED_WIDTHS, RUN_SIZE, VARIABLE, Codec, Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView

#: Frames larger than this are stored as they are: joining would cost more than it saves.
COALESCE_SIZE_MAX = 16 * 1024


def can_coalesce(frame: FrameView) -> bool:
    """Small, raw, and of one producer."""
    return (
        frame.size <= COALESCE_SIZE_MAX
        and not frame.compressed
        and not frame.has(Column.RUNS)
        and not frame.has(Column.SELECTION)
        and not any(n not in VARIABLE and n not in FIXED_WIDTHS for n, _ in frame.columns())
    )


def coalesce(frames: Sequence[FrameView]) -> FrameParts:
    """All rows in the order given; the frames have the same columns and flags."""
    head = frames[0]
    counts = np.array([frame.count for frame in frames], np.int64)
    total = int(counts.sum())
    runs = np.empty((len(frames), RUN_SIZE // 8), "<u8")
    runs[:, 0] = [frame.producer for frame in frames]
    runs[:, 1] = [frame.first for frame in frames]
    runs[:, 2] = counts
    runs[:, 3] = [frame.previous for frame in frames]
    columns: list[tuple[int, Codec, list[Buffer]]] = [(Column.RUNS, Codec.RAW, [runs.tobytes()])]
    for number, _ in head.columns():
        if number in FIXED_WIDTHS:
            values = np.concatenate([frame.fixed(number) for frame in frames])
            columns.append((number, Codec.RAW, [values.tobytes()]))
        else:
            columns.append((number, Codec.RAW, _join_variable(frames, number, counts)))
    return assemble(
        columns,
        count=total,
        producer=head.producer,
        first=head.first,
        previous=0,
        flags=head.flags & FLAG_UNSEQUENCED,
    )


def _join_variable(frames: Sequence[FrameView], number: int, counts: npt.NDArray[np.int64]) -> list[Buffer]:
    pieces: list[Buffer] = []
    all_offsets: list[Buffer] = []
    for frame in frames:
        data = frame.stored(number).data
        split = 4 * (frame.count + 1)
        all_offsets.append(data[:split])
        pieces.append(data[split:])
    offsets = np.frombuffer(b"".join(all_offsets), "<i4")
    # Offsets of neighbouring frames stand side by side: the difference across a seam is no row.
    lengths = np.diff(offsets)
    seams = np.cumsum(counts + 1)[:-1] - 1
    lengths = np.delete(lengths, seams)
    joined = np.empty(len(lengths) + 1, "<i4")
    joined[0] = 0
    np.cumsum(lengths, out=joined[1:])
    return [joined.tobytes(), b"".join(pieces)]
