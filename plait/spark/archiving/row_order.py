"""The orders that rows of an archive stand in, and bringing them there without losing, doubling or changing one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.errors import ArchiveError
from plait.spark.archiving.array_views import is_moved, moved

Order = npt.NDArray[np.int64]


def arranged(rows: pa.RecordBatch, order: Order) -> pa.RecordBatch:
    """Rows in another order. They are put back and compared with what they were: ``ArchiveError`` where they differ."""
    if np.array_equal(order, np.arange(rows.num_rows)):
        return rows
    result = moved(rows, order)
    if not is_moved(rows, order, result):
        raise ArchiveError(
            "sorted rows are not those that were read; nothing was committed. Check the memory of this machine, then "
            "run again"
        )
    return result


def lookup_order(rows: pa.RecordBatch) -> Order:
    """The places of rows that stand in log order, by key (those without one last), partition and sequence."""
    keys = rows.column("key")
    partitions = rows.column("partition").dictionary_encode()
    ranks = _ranks(partitions)
    if keys.null_count < len(keys):
        ranks = _ranks(keys.dictionary_encode()) * len(partitions.dictionary) + ranks
    # Stable: rows of one key and one partition stay in log order.
    return np.argsort(ranks, kind="stable")


def _ranks(encoded: pa.DictionaryArray) -> Any:
    """Each row's place among the different values in their order; nulls come last."""
    # Arrow sorts no views.
    order = pc.array_sort_indices(encoded.dictionary.cast(pa.string())).to_numpy()
    places = np.empty(len(order) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = len(order)
    codes = encoded.indices.fill_null(len(order)) if encoded.indices.null_count else encoded.indices
    return places[codes.to_numpy()]


def log_order(rows: pa.RecordBatch) -> Order:
    """The places of rows in the order of the log: for each partition by epoch and sequence."""
    sequence, epoch = (rows.column(column).to_numpy() for column in ("sequence", "epoch"))
    # A subject that was deleted and made again counts from 0 again: the later one comes later.
    return np.lexsort([rows.column("store_time").cast(pa.int64()).to_numpy(), sequence, epoch])
