"""Row ranges and row masks of a stored frame, as buffers to write one after another.

Raw columns are cut, never re-encoded. A frame with a compressed column sends that column whole, with the row
selection beside it. The source is verified first: a slice gets a checksum of its own, and must not vouch for
bytes that rotted on disk.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.builder import Buffer, FrameParts, assemble
from plait.frame.columns import FIXED_WIDTHS, VARIABLE, Codec, Column
from plait.frame.header import pack_stamp
from plait.frame.view import FrameView

_Columns = list[tuple[int, Codec, list[Buffer]]]


def slice_rows(frame: FrameView, start: int, stop: int) -> FrameParts:
    """Rows [start, stop) of an original frame."""
    if not 0 <= start < stop <= frame.count:
        raise FrameError(f"rows {start}:{stop} are outside a frame of {frame.count}")
    frame.verify()
    if frame.has(Column.SELECTION) or frame.compressed:
        mask = np.zeros(frame.count, bool)
        mask[start:stop] = True
        return _selected(frame, mask, start)
    columns: _Columns = []
    first, producer = frame.first, frame.producer
    for number, (codec, data) in frame.columns():
        if number == Column.RUNS:
            table = _slice_runs(frame.runs(), start, stop)
            producer, first = int(table[0, 0]), int(table[0, 1])
            if len(table) > 1:
                columns.append((number, Codec.RAW, [table.tobytes()]))
        elif codec == Codec.CONST:
            columns.append((number, Codec.CONST, [data]))
        elif number in FIXED_WIDTHS:
            width = FIXED_WIDTHS[number]
            columns.append((number, Codec.RAW, [data[width * start : width * stop]]))
        elif number in VARIABLE:
            columns.append((number, Codec.RAW, _variable_rows(data, frame.count, start, stop)))
    if not frame.has(Column.RUNS):
        first += start
    return _stamped(frame, columns, stop - start, producer, first, frame.base + start)


def slice_mask(frame: FrameView, mask: npt.NDArray[np.bool_]) -> FrameParts:
    """The rows of an original frame where ``mask`` is true; their sequences stay what they were."""
    if len(mask) != frame.count:
        raise FrameError(f"a mask of {len(mask)} rows does not fit a frame of {frame.count}")
    frame.verify()
    return _selected(frame, mask, 0)


def _selected(frame: FrameView, mask: npt.NDArray[np.bool_], start: int) -> FrameParts:
    if frame.has(Column.SELECTION):
        raise FrameError("a selection of rows cannot be sliced again")
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    if not len(edges):
        raise FrameError("a selection needs at least one row")
    spans = edges.reshape(-1, 2)
    selection: list[Buffer] = [np.array([frame.count, spans[0, 0]], "<u4").tobytes()]
    if len(spans) > 1:
        selection.append(np.packbits(mask, bitorder="little").tobytes())
    columns: _Columns = []
    for number, (codec, data) in frame.columns():
        if number > Column.SELECTION and not any(c == Column.SELECTION for c, _, _ in columns):
            columns.append((Column.SELECTION, Codec.RAW, selection))
        if number == Column.RUNS or codec != Codec.RAW:
            columns.append((number, Codec(codec), [data]))
        elif number in FIXED_WIDTHS:
            width = FIXED_WIDTHS[number]
            columns.append((number, Codec.RAW, [data[width * a : width * b] for a, b in spans.tolist()]))
        elif number in VARIABLE:
            offsets = np.frombuffer(data[: 4 * (frame.count + 1)], "<i4")
            lengths = np.diff(offsets)[mask]
            packed = np.concatenate([[0], np.cumsum(lengths)]).astype("<i4")
            body = data[4 * (frame.count + 1) :]
            cuts = (offsets[spans] - offsets[0]).tolist()
            columns.append((number, Codec.RAW, [packed.tobytes(), *(body[a:b] for a, b in cuts)]))
    count = int(mask.sum())
    return _stamped(frame, columns, count, frame.producer, frame.first, frame.base)


def _variable_rows(data: memoryview, count: int, start: int, stop: int) -> list[Buffer]:
    split = 4 * (count + 1)
    offsets = data[:split].cast("i")
    origin = offsets[0]
    return [
        data[4 * start : 4 * (stop + 1)],
        data[split + offsets[start] - origin : split + offsets[stop] - origin],
    ]


def _slice_runs(table: npt.NDArray[np.uint64], start: int, stop: int) -> npt.NDArray[np.uint64]:
    ends = np.cumsum(table[:, 2].astype(np.int64))
    begins = ends - table[:, 2].astype(np.int64)
    keep = (ends > start) & (begins < stop)
    kept = table[keep].copy()
    skipped = np.maximum(start - begins[keep], 0)
    dropped = np.maximum(ends[keep] - stop, 0)
    kept[:, 1] += skipped.astype(np.uint64)
    kept[:, 2] -= (skipped + dropped).astype(np.uint64)
    return kept


def _stamped(
    frame: FrameView, columns: _Columns, count: int, producer: int, first: int, base: int
) -> FrameParts:
    sliced = assemble(
        columns, count=count, producer=producer, first=first, previous=frame.previous, flags=frame.flags
    )
    sliced.stamp_with(pack_stamp(frame.partition, base, frame.store_time, frame.durable, frame.epoch))
    return sliced
