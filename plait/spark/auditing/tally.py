"""What blocks hand over: small facts that add up, as one table.

A fact is a count under a kind, the number of a group or partition, a name and a number. Only ``SHUFFLED`` facts are as
many as a block has keys or messages: they never come to the driver.
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
        # Of a group, or of a partition.
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        # Of ORDER facts: when a key's first and last acks of a block were.
        pa.field("earliest", pa.int64(), nullable=False),
        pa.field("latest", pa.int64(), nullable=False),
    ]
)

#: Of groups: rows by fate, broken promises and examples of them (number: the sequence), other counts...
FATE: Final = "fate"
BROKEN: Final = "broken"
EXAMPLE: Final = "example"
COUNT: Final = "count"
#: ...latencies by bin, rows stored and settled by moment.
LATENCY: Final = "latency"
STORED: Final = "stored"
SETTLED: Final = "settled"
#: number: the key's hash, as a signed number; count: the block's first sequence.
ORDER: Final = "order"
#: Of all groups of a name (id: the least number of one): the same for each key that may have moved between partitions;
#: count: where in the message log its rows of the block begin, name: the partition.
MOVED: Final = "moved"
#: Of subjects (id: the least number of a partition): which message ids a block has. number: the producer, count: the
#: window, earliest: its bits (``stored.Windows``).
IDS: Final = "ids"
#: Of partitions: number: key and producer, count: the block's first sequence, earliest and latest: the least and the
#: greatest number that the producer gave.
SENT: Final = "sent"
#: As many as a block has keys or messages: they never come to the driver, but for what they show.
SHUFFLED: Final = (ORDER, MOVED, IDS, SENT)
#: Of partitions: messages that were stored as they should not be, by promise, and examples (number: the sequence).
FLAW: Final = "flaw"
FLAW_EXAMPLE: Final = "flaw_example"
#: Of partitions: rows, rows of the keys that have most, rows by logical partition.
ROWS: Final = "rows"
KEY: Final = "key"
SLOT: Final = "slot"

#: What kept a part from being judged; name: code, message and details as JSON.
ERROR: Final = "error"

#: Latencies are told apart to a sixteenth of a doubling, about 4 %.
BINS_A_DOUBLING: Final = 16


class Tally:
    """Facts of one block."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []

    def add(self, kind: str, number: int, name: str, count: int) -> None:
        """One count; nothing where it is none."""
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
        """Counts under numbers, or under a name each."""
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
        """How often each value is there."""
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
    """The bin of each; what clocks that differ make negative is in the lowest."""
    bins: npt.NDArray[np.int64] = np.floor(np.log2(np.maximum(micros, 1)) * BINS_A_DOUBLING).astype(np.int64)
    return bins


def latency_of(bin_: int) -> float:
    """Seconds in the middle of a bin."""
    return float(2.0 ** ((bin_ + 0.5) / BINS_A_DOUBLING)) / 1_000_000


def percentile(bins: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], share: float) -> float:
    """Seconds within which ``share`` of all were."""
    order = np.argsort(bins)
    total = np.cumsum(counts[order])
    at = int(np.searchsorted(total, share * int(total[-1]), "left"))
    return latency_of(int(bins[order[min(at, len(order) - 1)]]))
