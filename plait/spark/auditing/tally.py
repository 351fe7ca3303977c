"""The output of a block: facts in one table, which can be added up.

A fact is a count with a kind, the id of a group or partition, a name and a number. Only ``SHUFFLED`` facts can be as
many as the keys or messages of a block: they are not collected by the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA: Final = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        # The id of a group, partition or subject.
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        # Of ORDER facts: the first and the last ack of a key in a block. For other SHUFFLED kinds see below.
        pa.field("earliest", pa.int64(), nullable=False),
        pa.field("latest", pa.int64(), nullable=False),
    ]
)

#: Of groups: rows by fate, broken promises, their examples (number: the sequence), and other counts.
FATE: Final = "fate"
BROKEN: Final = "broken"
EXAMPLE: Final = "example"
COUNT: Final = "count"
#: Of groups: latencies by bin, and rows by the moment at which they were stored or got their outcome.
LATENCY: Final = "latency"
STORED: Final = "stored"
SETTLED: Final = "settled"
#: Of groups: the ack times of a key. number: the key's hash as a signed number, count: the block's first sequence.
ORDER: Final = "order"
#: Of all groups of a name (id: the lowest number of one): the ack times of a key that may have moved to another
#: partition. number: the key's hash, count: the place in the message log of its first row in the block, name: the
#: partition.
MOVED: Final = "moved"
#: Of subjects (id: the lowest number of a partition): the message ids of a block. number: the producer, count: the
#: window, earliest: its bits (``stored_order.Windows``).
IDS: Final = "ids"
#: Of partitions: the producer sequences of a key. number: the hash of key and producer, count: the block's first
#: sequence, earliest and latest: the lowest and the highest producer sequence.
SENT: Final = "sent"
#: Compared between blocks by a shuffle. The driver collects only the result.
SHUFFLED: Final = (ORDER, MOVED, IDS, SENT)
#: Of partitions: messages whose storing broke a promise, by promise, and examples (number: the sequence).
FLAW: Final = "flaw"
FLAW_EXAMPLE: Final = "flaw_example"
#: Of partitions: rows, rows of the most frequent keys, rows by LP.
ROWS: Final = "rows"
KEY: Final = "key"
SLOT: Final = "slot"

#: The error that prevented a part from being judged. name: code and message as JSON.
ERROR: Final = "error"

#: Latency bins per doubling: a bin is about 4 % wide.
BINS_A_DOUBLING: Final = 16


class Tally:
    """Facts of one block."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []

    def add(self, kind: str, number: int, name: str, count: int) -> None:
        """Add one count, unless it is 0."""
        if count:
            self.add_many(kind, number, name, [0], [count])

    def add_many(
        self,
        kind: str,
        id_: int,
        name: str | Sequence[str],
        numbers: Sequence[int] | npt.NDArray[np.int64],
        counts: Sequence[int] | npt.NDArray[np.int64],
        times: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
    ) -> None:
        """Add a count for each number, with one name for all or a name each."""
        size = len(counts)
        if not size:
            return
        names = (
            pa.array([name], pa.string()).take(pa.array(np.zeros(size, np.int32))) if isinstance(name, str) else name
        )
        earliest, latest = times or (np.zeros(size, np.int64), np.zeros(size, np.int64))
        columns = [
            pa.array([kind], pa.string()).take(pa.array(np.zeros(size, np.int32))),
            pa.array(np.full(size, id_, np.int64)),
            pa.array(names, pa.string()),
            pa.array(np.asarray(numbers, np.int64)),
            pa.array(np.asarray(counts, np.int64)),
            pa.array(earliest),
            pa.array(latest),
        ]
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))

    def histogram(self, kind: str, id_: int, values: npt.NDArray[np.int64]) -> None:
        """Add how often each value occurs."""
        numbers, counts = np.unique(values, return_counts=True)
        self.add_many(kind, id_, "", numbers, counts)

    def table(self) -> pa.Table:
        """All facts."""
        return pa.Table.from_batches(self._batches, SCHEMA).combine_chunks()


def added_up(table: pa.Table) -> pa.Table:
    """One fact for each kind, id, name and number."""
    keys = ["kind", "id", "name", "number"]
    return table.filter(~pc.field("kind").isin(SHUFFLED)).group_by(keys).aggregate([("count", "sum")])


def latency_bins(micros: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The bin of each latency. Latencies that are negative because clocks differ fall into the lowest bin."""
    bins: npt.NDArray[np.int64] = np.floor(np.log2(np.maximum(micros, 1)) * BINS_A_DOUBLING).astype(np.int64)
    return bins


def percentile(bins: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], share: float) -> float:
    """The latency in seconds that ``share`` of all do not exceed."""
    order = np.argsort(bins)
    total = np.cumsum(counts[order])
    at = int(np.searchsorted(total, share * int(total[-1]), "left"))
    # The middle of the bin.
    middle = bins[order[min(at, len(order) - 1)]] + 0.5
    return float(2.0 ** (middle / BINS_A_DOUBLING)) / 1_000_000
