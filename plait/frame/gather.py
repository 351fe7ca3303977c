"""Builds new frames from rows of many frames, in any order. The rows keep their message ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.frame.builder import Buffer, Encoded, FrameParts, assemble
from plait.frame.columns import COMPRESSIBLE, RUN_SIZE, VARIABLE, Codec, Column
from plait.frame.compression import deflate
from plait.frame.header import FLAG_FORWARDED, FLAG_UNSEQUENCED
from plait.frame.places import Int64s, RowPicks, rows_as_runs, take_spans
from plait.frame.run_tables import RUN, Runs, UInt64s
from plait.model.logical_partitions import NO_KEY_HASH

#: Columns that are absent if a row has no value; in other columns the row is empty then.
_KIND_BITS: Final = 1 << Column.SEND_TIME | 1 << Column.PRIORITY
#: Smaller columns are not compressed again, because that would save little.
PACKED_SIZE_MIN: Final = 4096


class Gathered:
    """The rows of several ``RowPicks``, reordered, by column."""

    def __init__(self, sets: Sequence[RowPicks], order: Int64s | None = None) -> None:
        """``order``: the index of each row, counted over all sets; None: the order of the sets."""
        self.count = sum(map(len, sets)) if order is None else len(order)
        #: True if some rows were compressed in their frames; they may be many times larger now.
        self._packed = any(each.packed for each in sets)
        bits = _joined([each.bits for each in sets], order)
        self._kinds = bits & np.uint32(_KIND_BITS)
        self._bits = int(np.bitwise_or.reduce(bits)) if len(bits) else 0
        ids = [each.ids() for each in sets]
        self.producers: UInt64s = _joined([producers for producers, _ in ids], order)
        self.numbers: UInt64s = _joined([numbers for _, numbers in ids], order)
        self._fixed: dict[int, npt.NDArray[Any]] = {}
        for column in (Column.KEY_HASH, Column.SEND_TIME, Column.PRIORITY):
            if self._bits >> column & 1:
                absent = int(NO_KEY_HASH) if column is Column.KEY_HASH else 0
                self._fixed[column] = _joined([each.fixed(column, absent) for each in sets], order)
        #: Column → the ends of all rows, and their bytes.
        self._variable: dict[int, tuple[Int64s, bytes]] = {}
        for number in sorted(VARIABLE):
            if self._bits >> number & 1:
                self._variable[number] = _variable(sets, number, order)
        self._ends = np.cumsum(self._sizes())

    def _sizes(self) -> Int64s:
        width = 8 * (2 + len(self._fixed)) + RUN_SIZE + 4 * len(self._variable)
        sizes = np.full(self.count, width, np.int64)
        for ends, _ in self._variable.values():
            sizes += np.diff(ends, prepend=0)
        return sizes

    def cuts(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut [start, stop) into pieces for frames of about ``size`` bytes, each of rows with the same columns."""
        stop = self.count if stop is None else stop
        changes = np.flatnonzero(self._kinds[1:] != self._kinds[:-1]) + 1
        while start < stop:
            before = int(self._ends[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(self._ends, before + size, "right")))
            change = int(np.searchsorted(changes, start, "right"))
            if change < len(changes):
                end = min(end, int(changes[change]))
            end = min(end, stop)
            yield start, end
            start = end

    @property
    def key_hashes(self) -> UInt64s | None:
        """The key hash of each row; None: no row has a key."""
        return self._fixed.get(Column.KEY_HASH)

    def frame(
        self,
        start: int,
        stop: int,
        deliver_at: Int64s,
        schedule: UInt64s,
        *,
        row_by_row: bool,
        forwarded: tuple[int, int] | None = None,
    ) -> FrameParts:
        """A frame of rows [start, stop), a piece of ``cuts``. ``deliver_at`` and ``schedule`` have values for all rows.

        ``row_by_row``: the run table has an entry per row, so that rows can be found by arithmetic. ``forwarded``: the
        producer that forwards the rows, and the number of rows that it has forwarded before.
        """
        runs = self._runs(start, stop) if not row_by_row else None
        producer = first = previous = 0
        flags = FLAG_UNSEQUENCED
        columns: list[Encoded] = []
        if runs is None:
            table = rows_as_runs(self.producers[start:stop], self.numbers[start:stop])
            columns.append((Column.RUNS, Codec.RAW, [table]))
        elif len(runs) > 1 or forwarded is not None:
            columns.append((Column.RUNS, Codec.RAW, [runs.tobytes()]))
        else:
            producer, first = int(runs["producer"][0]), int(runs["first"][0])
        if forwarded is not None:
            producer, previous = forwarded
            first, flags = previous + 1, FLAG_FORWARDED
        kinds = int(self._kinds[start])
        for column, values in self._fixed.items():
            if column == Column.KEY_HASH or kinds >> column & 1:
                columns.append((column, Codec.RAW, [values[start:stop].tobytes()]))
        columns.append((Column.DELIVER_AT, Codec.RAW, [deliver_at[start:stop].astype("<i8").tobytes()]))
        columns.append((Column.SCHEDULE, Codec.RAW, [schedule[start:stop].astype("<u8").tobytes()]))
        for column, (ends, data) in self._variable.items():
            begin = int(ends[start - 1]) if start else 0
            offsets = np.zeros(stop - start + 1, "<i4")
            offsets[1:] = ends[start:stop] - begin
            columns.append(self._encoded(column, [offsets.tobytes(), memoryview(data)[begin : int(ends[stop - 1])]]))
        columns.sort(key=lambda encoded: encoded[0])
        return assemble(columns, count=stop - start, producer=producer, first=first, previous=previous, flags=flags)

    def _encoded(self, column: int, raw: list[Buffer]) -> Encoded:
        """A variable column, compressed if its rows were, so that a small compressed frame does not fill the disk."""
        if self._packed and column in COMPRESSIBLE and (size := sum(map(len, raw))) >= PACKED_SIZE_MIN:
            packed = deflate(b"".join(raw), Codec.ZSTD)
            if 2 * len(packed) <= size:
                return column, Codec.ZSTD, [packed]
        return column, Codec.RAW, raw

    def _runs(self, start: int, stop: int) -> Runs:
        """The run table of rows [start, stop): consecutive rows of one producer are one run."""
        producers, numbers = self.producers[start:stop], self.numbers[start:stop]
        breaks = (producers[1:] != producers[:-1]) | (numbers[1:] != numbers[:-1] + np.uint64(1))
        firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        table = np.zeros(len(firsts), RUN)
        table["producer"] = producers[firsts]
        table["first"] = numbers[firsts]
        table["rows"] = np.diff(firsts, append=stop - start)
        return table


def _joined(arrays: Sequence[npt.NDArray[Any]], order: Int64s | None) -> npt.NDArray[Any]:
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return values if order is None else values[order]


def _variable(sets: Sequence[RowPicks], column: int, order: Int64s | None) -> tuple[Int64s, bytes]:
    if len(sets) == 1:
        starts, lengths = sets[0].spans(column)
        if order is not None:
            starts, lengths = starts[order], lengths[order]
        return np.cumsum(lengths), sets[0].data(starts, lengths)
    spans = [each.spans(column) for each in sets]
    data = b"".join([each.data(*span) for each, span in zip(sets, spans, strict=True)])
    lengths = np.concatenate([lengths for _, lengths in spans])
    ends = np.cumsum(lengths)
    if order is None:
        return ends, data
    starts, lengths = (ends - lengths)[order], lengths[order]
    return np.cumsum(lengths), take_spans(np.frombuffer(data, np.uint8), starts, lengths)
