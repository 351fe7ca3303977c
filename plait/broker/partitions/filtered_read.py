"""Reads the rows of a partition that match a filter: a bounded part of the log in one call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from plait.broker.partitions.partition import Partition, ReadBatch
from plait.filter.message_filter import Filter
from plait.filter.scan_budget import ScanBudget
from plait.frame.slicing import slice_mask
from plait.storage.logs.log import Log


def reader_of(
    partition: Partition, log: Log, wanted: Filter | None, budget: ScanBudget
) -> Callable[[int, int, int], ReadBatch]:
    """Reads from a sequence at most a count and a size: all rows, or those that match."""
    if wanted is not None:
        return lambda start, count, size: read_filtered(partition, log, start, count, size, wanted, budget)
    return lambda start, count, size: partition.read(log, start, partition.visible, count, size)


def read_filtered(
    partition: Partition, log: Log, start: int, count: int, size: int, wanted: Filter, budget: ScanBudget
) -> ReadBatch:
    """Visible rows from ``start`` that match: at most ``count`` rows and ``size`` bytes, or one part of a frame.

    The batch ends where the search ended, and ``damaged`` has the ranges before it that are expired or cannot be read.
    It is ``full`` if there are more rows to examine: the budget has no room, or the batch has as many rows or bytes as
    it may.
    """
    batch = ReadBatch(start)
    for first, last, frame in partition.walk(log, start, partition.visible):
        if batch.count >= count or (batch.end > start and not budget.has_room()):
            batch.full = True
            return batch
        if first > batch.end:
            batch.damaged.append((batch.end, first))
        if frame is None:
            batch.damaged.append((first, last))
            batch.end = last
            continue
        room = count - batch.count
        examined = wanted.examine(frame, first - frame.base, last - frame.base, room, budget)
        rows, end = np.flatnonzero(examined.mask)[:room] + examined.first, examined.last
        found = len(rows)
        if found == room:
            # The next read continues after the last row that fits.
            end = int(rows[-1]) + 1
        if found:
            parts = [frame.buffer] if found == frame.count else slice_mask(frame, _mask_of(rows, frame.count)).parts
            piece = sum(map(len, parts))
            if batch.count and batch.size + batch.inflated + piece + frame.inflated_size > size:
                batch.full = True
                return batch
            batch.parts += parts
            batch.count += found
            batch.size += piece
            batch.inflated += frame.inflated_size
        batch.end = frame.base + end
        if batch.end < last:
            batch.full = True
            return batch
    # Rows that are expired need no search.
    if batch.end < partition.visible:
        batch.damaged.append((batch.end, partition.visible))
        batch.end = partition.visible
    return batch


def _mask_of(rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask
