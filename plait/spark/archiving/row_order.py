"""The row orders of archived files, and sorting rows into them without losing, duplicating or changing a row."""

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
    """Rows in another order. The result is sorted back and compared: ``ArchiveError`` where it differs."""
    if np.array_equal(order, np.arange(rows.num_rows)):
        return rows
    result = moved(rows, order)
    if not is_moved(rows, order, result):
        raise ArchiveError(
            "sorted rows differ from the rows that were read; nothing was committed. Check the memory of this machine, "
            "then run again"
        )
    return result


def lookup_order(rows: pa.RecordBatch) -> Order:
    """Sorts rows in log order by key (rows without a key last), partition and sequence; returns row indices."""
    keys = rows.column("key")
    partitions = rows.column("partition").dictionary_encode()
    ranks = _ranks(partitions)
    if keys.null_count < len(keys):
        ranks = _ranks(keys.dictionary_encode()) * len(partitions.dictionary) + ranks
    # Stable: rows of one key and one partition stay in log order.
    return np.argsort(ranks, kind="stable")


def _ranks(encoded: pa.DictionaryArray) -> Any:
    """The rank of each row's value among the sorted distinct values; nulls rank last."""
    # Arrow cannot sort views.
    order = pc.array_sort_indices(encoded.dictionary.cast(pa.string())).to_numpy()
    ranks = np.empty(len(order) + 1, np.int64)
    ranks[order] = np.arange(len(order))
    ranks[-1] = len(order)
    codes = encoded.indices.fill_null(len(order)) if encoded.indices.null_count else encoded.indices
    return ranks[codes.to_numpy()]


def log_order(rows: pa.RecordBatch) -> Order:
    """Sorts rows into log order, for each partition by epoch and sequence; returns row indices."""
    sequence, epoch = (rows.column(column).to_numpy() for column in ("sequence", "epoch"))
    # The sequences of a subject that was deleted and created again restart at 0: its later rows come later.
    return np.lexsort([rows.column("store_time").cast(pa.int64()).to_numpy(), sequence, epoch])
