"""Rows of a frame as runs, as masks and as row numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.client.arguments import shown
from plait.client.consume.failure import EpochRange
from plait.errors import InvalidArgument

RowMask = npt.NDArray[np.bool_]
#: Rows [first, end) of a frame.
Run = tuple[int, int]
#: One row, a slice of rows, or a mask over all rows.
RowSelection = int | slice | RowMask

#: Greater than any index of ``_first_indexes``.
NEVER = np.iinfo(np.int64).max


def runs_in(numbers: npt.NDArray[np.int64]) -> list[Run]:
    """Ascending numbers as runs [first, end)."""
    if not len(numbers):
        return []
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first < len(numbers):
        return [(first, last + 1)]
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts = numbers[np.append(0, breaks + 1)]
    ends = numbers[np.append(breaks, len(numbers) - 1)] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def mask_runs(mask: RowMask) -> list[Run]:
    return runs_in(np.flatnonzero(mask))


def runs_by_number(numbers: npt.NDArray[np.int64], mask: RowMask) -> dict[int, list[Run]]:
    """The rows of a mask by the number that each has, in one pass: each row may have its own."""
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(numbers[rows], kind="stable")]
    parts = np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1) if len(rows) else []
    return {int(numbers[part[0]]): runs_in(part) for part in parts}


def rows_of(runs: list[Run]) -> npt.NDArray[np.int64]:
    if not runs:
        return np.empty(0, np.int64)
    first, end = np.array(runs).T
    before = np.cumsum(end - first) - (end - first)
    rows: npt.NDArray[np.int64] = np.repeat(first - before, end - first) + np.arange(before[-1] + end[-1] - first[-1])
    return rows


def mask_of(rows: npt.NDArray[np.int64], count: int) -> RowMask:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def attempts_of(ranges: Sequence[tuple[int, int, int]], sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The attempt of each sequence, by ascending ranges (start, end, attempt); 1 outside of them."""
    starts, ends, numbers = np.array(ranges).T
    at = np.maximum(np.searchsorted(starts, sequences, "right") - 1, 0)
    within = (starts[at] <= sequences) & (sequences < ends[at])
    return np.where(within, numbers[at], 1)


def first_outcomes(
    acking: Sequence[RowSelection], nacking: Sequence[tuple[int, RowSelection, object]], count: int
) -> tuple[RowMask, npt.NDArray[np.int64]]:
    """The rows among ``count`` that were acked first, and for each row the first entry of ``nacking`` that has it.

    Each nack begins with the number of entries of ``acking`` before it. Rows without a nack have the index after the
    last one.
    """
    nacked_by = np.minimum(_first_indexes([rows for _, rows, _ in nacking], count), len(nacking))
    before = np.array([*(acked for acked, _, _ in nacking), NEVER])[nacked_by]
    return _first_indexes(acking, count) < before, nacked_by


def _first_indexes(items: Sequence[RowSelection], count: int) -> npt.NDArray[np.int64]:
    """For each of ``count`` rows the index of the first item that contains it; ``NEVER``: none does."""
    first = np.full(count, NEVER)
    # Reversed: the earlier index overwrites the later one.
    rows = [(item, number) for number, item in enumerate(items) if isinstance(item, int)][::-1]
    if rows:
        at, numbers = np.array(rows).T
        first[at] = numbers
    for number, item in enumerate(items):
        if not isinstance(item, int):
            first[item] = np.minimum(first[item], number)
    return first


def row_mask(rows: Any, count: int) -> npt.NDArray[np.bool_]:
    """``rows`` as a mask over ``count`` rows. ``InvalidArgument`` if any row is out of range."""
    if isinstance(rows, pa.Array | pa.ChunkedArray):
        values = np.asarray(rows.to_numpy(zero_copy_only=False))
    elif isinstance(rows, np.ndarray):
        values = rows
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        try:
            values = np.array(list(rows))
        except ValueError:
            raise _no_rows(rows) from None
    else:
        raise _no_rows(rows)
    if values.ndim == 1 and not len(values):
        return np.zeros(count, bool)
    if values.ndim != 1 or values.dtype.kind not in "biu":
        raise _no_rows(rows)
    if values.dtype.kind == "b":
        if len(values) != count:
            raise InvalidArgument(f"the row mask has {len(values)} values, the batch has {count} rows; use one per row")
        return values
    outside = values[(values < 0) | (values >= count)]
    if len(outside):
        raise InvalidArgument(f"row {outside[0]} is out of range for a batch of {count} rows")
    mask = np.zeros(count, bool)
    mask[values] = True
    return mask


def _no_rows(rows: Any) -> InvalidArgument:
    return InvalidArgument(f"rows {shown(rows)} are not valid; use row numbers (int), or a mask over all rows (bool)")


def merged(ranges: list[EpochRange]) -> list[EpochRange]:
    """The ranges sorted, with overlapping and adjacent ranges of one epoch joined."""
    joined: list[EpochRange] = []
    for start, end, epoch in sorted(ranges):
        if joined and start <= joined[-1][1] and epoch == joined[-1][2]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]), epoch)
        else:
            joined.append((start, end, epoch))
    return joined
