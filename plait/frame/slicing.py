"""Slices of a stored frame, by row range or row mask, as buffers to write one after another.

Raw columns are cut, never re-encoded. A compressed column is sent whole, with the row selection in another column. The
source is verified first, because a slice gets its own checksum, which must not cover damaged bytes. Columns that this
version does not know are left out, because it cannot cut them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.builder import Buffer, Encoded, FrameParts, assemble, pack_stamp
from plait.frame.columns import COMPRESSIBLE, FIXED_TYPES, FIXED_WIDTHS, VARIABLE, Codec, Column, label
from plait.frame.header import U32
from plait.frame.header_block import HeaderBlock, is_block
from plait.frame.run_tables import runs_of_rows, select_rows, slice_runs
from plait.frame.view import FrameView

#: With more separate row ranges than this, the rows are copied: many tiny buffers cost more than one copy.
SPANS_MAX = 16

_RAW = Codec.RAW
_CONST = Codec.CONST

_Span = tuple[int, int]


def slice_rows(frame: FrameView, start: int, stop: int) -> FrameParts:
    """Rows [start, stop) of an original frame."""
    if not 0 <= start < stop <= frame.count:
        raise FrameError(f"rows {start}:{stop} are outside a frame of {frame.count}")
    frame.verify()
    if frame.has(Column.SELECTION):
        raise FrameError("the frame is a selection, whose rows are not consecutive; select rows by a mask")
    if frame.compressed:
        return _selected(frame, [(start, stop)], np.arange(start, stop))
    columns: list[Encoded] = []
    producer, first, previous = frame.producer, frame.first + start, frame.previous
    buffer, count, spans = frame.buffer, frame.count, [(start, stop)]
    for number, (codec, begin, end) in frame.places.items():
        if number in VARIABLE:
            if codec != _RAW:
                raise _unsliceable(number, codec)
            data = buffer[begin:end]
            if number == Column.HEADERS and is_block(data):
                block = HeaderBlock.parse(data, count).take(slice(start, stop))
                columns.append((number, _RAW, [block.tobytes()]))
            else:
                columns.append((number, _RAW, _cut_variable(data, count, start, stop, number)))
        elif number in FIXED_WIDTHS:
            columns.append(_cut_fixed(number, codec, buffer[begin:end], count, spans))
        elif number == Column.RUNS:
            table = slice_runs(frame.runs(), start, stop)
            if len(table) > 1:
                producer = first = previous = 0
                columns.append((number, _RAW, [table.tobytes()]))
            else:
                producer, first, _, _, previous = table[0].tolist()
    stamp = pack_stamp(frame.partition, frame.base + start, frame.store_time, frame.durable, frame.epoch)
    return assemble(
        columns,
        count=stop - start,
        producer=producer,
        first=first,
        previous=previous,
        flags=frame.flags,
        stamp=stamp,
    )


def slice_mask(frame: FrameView, mask: npt.NDArray[np.bool_]) -> FrameParts:
    """The rows of a frame where ``mask`` is true, with unchanged sequences."""
    frame.verify()
    return _selected(frame, *_spans(frame, mask))


def keep_mask(frame: FrameView, mask: npt.NDArray[np.bool_], note: bytes) -> FrameParts:
    """The rows of a frame where ``mask`` is true, as a frame to store: without data of the other rows.

    The run table identifies only the selected runs. A compressed column is inflated and cut, unless it is smaller
    compressed. ``note`` is stored in a column of its own, for ``read_note``.
    """
    frame.verify()
    return _selected(frame, *_spans(frame, mask), note=note)


def read_note(frame: FrameView) -> bytes:
    """The note that ``keep_mask`` stored."""
    return bytes(frame.stored(Column.NOTE))


def _spans(frame: FrameView, mask: npt.NDArray[np.bool_]) -> tuple[list[_Span], npt.NDArray[np.int64]]:
    if len(mask) != frame.count:
        raise FrameError(f"a mask of {len(mask)} rows does not fit a frame of {frame.count}")
    mask = np.asarray(mask, bool)
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    if mask[0]:
        edges.insert(0, 0)
    if mask[-1]:
        edges.append(len(mask))
    if not edges:
        raise FrameError("a selection needs at least one row")
    return list(zip(edges[::2], edges[1::2], strict=True)), np.flatnonzero(mask)


def _selected(
    frame: FrameView, spans: list[_Span], rows: npt.NDArray[np.int64], *, note: bytes | None = None
) -> FrameParts:
    """A frame with the selected rows, given as spans and as indexes, and a selection column."""
    selected = frame.selection()
    count, originals = (frame.count, rows) if selected is None else (selected.count, selected.rows[rows])
    columns: list[Encoded] = []
    if frame.has(Column.RUNS):
        runs = frame.runs() if note is None else runs_of_rows(frame.runs(), originals)
        columns.append((Column.RUNS, _RAW, [runs.tobytes()]))
    columns.append((Column.SELECTION, _RAW, [_selection(count, originals)]))
    for number, (codec, begin, end) in frame.places.items():
        data = frame.buffer[begin:end]
        if number in VARIABLE:
            if codec == _RAW or (note is not None and number in COMPRESSIBLE):
                gathered = _gather_variable(frame, number, spans, rows, stored=note is not None)
                if codec == _RAW or sum(map(len, gathered)) <= len(data):
                    columns.append((number, _RAW, gathered))
                else:
                    # The compressed column with all rows is smaller than these rows raw. A frame of zeros must not fill
                    # a disk.
                    columns.append((number, Codec(codec), [data]))
            elif number in COMPRESSIBLE and codec in (Codec.ZSTD, Codec.LZ4):
                columns.append((number, Codec(codec), [data]))
            else:
                raise _unsliceable(number, codec)
        elif number in FIXED_WIDTHS:
            columns.append(_cut_fixed(number, codec, data, frame.count, spans, rows))
    if note is not None:
        columns.append((Column.NOTE, _RAW, [note]))
    stamp = pack_stamp(frame.partition, frame.base, frame.store_time, frame.durable, frame.epoch)
    return assemble(
        columns,
        count=len(rows),
        producer=frame.producer,
        first=frame.first,
        previous=frame.previous,
        flags=frame.flags,
        stamp=stamp,
    )


def _selection(count: int, rows: npt.NDArray[np.int64]) -> bytes:
    """The selection column for ``rows`` of a frame with ``count`` rows."""
    first, last = int(rows[0]), int(rows[-1])
    head = U32.pack(count) + U32.pack(first)
    if last - first + 1 == len(rows):
        return head
    mask = np.zeros(count, bool)
    mask[rows] = True
    return head + np.packbits(mask, bitorder="little").tobytes()


def _cut_variable(data: memoryview, count: int, start: int, stop: int, number: int) -> list[Buffer]:
    """The part of a raw column that contains a row range, with unchanged offsets."""
    split = 4 * (count + 1)
    if len(data) >= split:
        offsets = data[:split].cast("i")
        origin = split - offsets[0]
        begin, end = origin + offsets[start], origin + offsets[stop]
        if split <= begin <= end <= len(data) == origin + offsets[count]:
            return [data[4 * start : 4 * (stop + 1)], data[begin:end]]
    raise FrameError(f"{label(number)} column has offsets that do not fit its {len(data)} bytes")


def _gather_variable(
    frame: FrameView, number: int, spans: list[_Span], rows: npt.NDArray[np.int64], *, stored: bool
) -> list[Buffer]:
    block = frame.header_block() if number == Column.HEADERS else None
    if block is not None:
        block = block.take(rows)
        # Rows that the retained log keeps are looked up one by one.
        if not stored:
            return [block.tobytes()]
        offsets, data = block.rows()
        return [offsets.tobytes(), data]
    offsets, data = frame.variable(number)
    if len(spans) > SPANS_MAX:
        offsets, data = select_rows(offsets, data, rows)
        return [offsets.tobytes(), data]
    packed = np.zeros(len(rows) + 1, "<i4")
    np.cumsum((offsets[1:] - offsets[:-1])[rows], out=packed[1:])
    return [packed.tobytes(), *(data[offsets[a] : offsets[b]] for a, b in spans)]


def _cut_fixed(
    number: int,
    codec: int,
    data: memoryview,
    count: int,
    spans: list[_Span],
    rows: npt.NDArray[np.int64] | None = None,
) -> Encoded:
    width = FIXED_WIDTHS[number]
    if codec == _CONST and len(data) == width:
        return number, _CONST, [data]
    if codec != _RAW or len(data) != width * count:
        raise _unsliceable(number, codec)
    if rows is not None and len(spans) > SPANS_MAX:
        return number, _RAW, [np.frombuffer(data, FIXED_TYPES[number])[rows].tobytes()]
    return number, _RAW, [data[width * a : width * b] for a, b in spans]


def _unsliceable(number: int, codec: int) -> FrameError:
    return FrameError(f"{label(number)} column has a wrong size or codec ({codec}); its rows cannot be found")
