"""A frame of an ordered consumer: the key and the logical partition of each row, and in whose hands it is."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from plait.client.consume.delivered import DeliveredFrame, Owner, SharedDeliveredFrame, Which
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome, Nacks
from plait.client.consume.ordered.lock_rights import LockRights
from plait.client.types import ACKNOWLEDGED, Acknowledgement, PartitionName
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes, key_hashes, lps_of

#: What a row is: it waits in the buffer, or it is in the user's hands by itself...
WAITS: Final = 0
ALONE: Final = 1
#: ...or with others of its batch, or was; what failed stays in hands until that is noted.
BATCHED: Final = 2
BROKEN: Final = 4
DONE: Final = 8

#: A key is told apart by the bits of its hash above those that give its logical partition, which a producer may change.
KEY_SHIFT: Final = np.uint64(LOGICAL_PARTITIONS.bit_length() - 1)

RowMask = npt.NDArray[np.bool_]


class HeldRowTracker(Protocol):
    """Who knows what is in the user's hands: the consumer's buffer."""

    def acked(self, delivered: OrderedDelivered, row: int) -> None:
        """The row is done, so that the next one of its key may follow."""

    def settled(self, delivered: OrderedDelivered) -> None:
        """What was said of rows of the frame is noted."""


class OrderedDelivered(DeliveredFrame):
    """One frame, or part of one. ``collect`` tells of runs of rows, as (first, end, epoch)."""

    __slots__ = (
        "back",
        "handed_at",
        "hands",
        "keyed",
        "keys",
        "lock_epochs",
        "lps",
        "number",
        "rights",
        "sequences",
        "states",
        "tag",
        "waiting",
    )

    def __init__(
        self,
        frame: FrameView,
        subject: str,
        partition: PartitionName,
        owner: Owner | None,
        attempts: list[tuple[int, int, int]],
    ) -> None:
        super().__init__(frame, subject, partition, owner, attempts)
        self.sequences = frame.sequences()
        hashes = key_hashes(frame)
        self.lps = lps_of(self.sequences, hashes)
        #: Who is who; None: no row has a key.
        self.keys: Hashes | None = None
        self.keyed: RowMask | None = None
        if hashes is not None:
            self.keys = hashes >> KEY_SHIFT
            self.keyed = hashes != NO_KEY_HASH
        self.states: npt.NDArray[np.uint8] = np.zeros(self.count, np.uint8)
        #: The epoch of the lock under which a row was handed out, and when that was.
        self.lock_epochs: npt.NDArray[np.int64] = np.zeros(self.count, np.int64)
        self.handed_at: npt.NDArray[np.float64] = np.zeros(self.count)
        #: The broker's number for what it gave; 0: it was given in an earlier session.
        self.tag = 0
        #: Rows that the broker has back; None: none.
        self.back: RowMask | None = None
        #: Rows that wait in the buffer.
        self.waiting = 0
        #: The order of arrival.
        self.number = 0
        self.rights: LockRights
        self.hands: HeldRowTracker

    def key(self, row: int) -> int | None:
        """What tells the row's key apart; None: it has none."""
        if self.keys is None or self.keyed is None or not self.keyed[row]:
            return None
        return int(self.keys[row])

    def key_list(self, start: int, stop: int) -> list[int | None]:
        """The same of rows [start, stop)."""
        if self.keys is None or self.keyed is None:
            return [None] * (stop - start)
        keys: list[int | None] = self.keys[start:stop].tolist()
        for row in np.flatnonzero(~self.keyed[start:stop]).tolist():
            keys[row] = None
        return keys

    def epoch_of(self, row: int) -> int:
        return int(self.lock_epochs[row])

    def may_begin(self, rows: int | slice) -> bool:
        """The locks under which they were handed out are ours."""
        lps, rights = self.lps[rows], self.rights
        return rights.valid() and bool(np.all(rights.open[lps] & (rights.epochs[lps] == self.lock_epochs[rows])))

    # --- settling -------------------------------------------------------------------------------

    def ack_row(self, row: int) -> Acknowledgement:
        super().ack_row(row)
        self.hands.acked(self, row)
        return ACKNOWLEDGED

    def note(self, row: int, failed: FailureOutcome | None) -> None:
        super().note(row, failed)
        if failed is None:
            self.hands.acked(self, row)

    def nack_rows(self, rows: Which, failed: FailureOutcome = FAILED) -> None:
        super().nack_rows(rows, failed)
        # An ack that comes later counts no more.
        self.states[rows] |= BROKEN

    def collect(self) -> tuple[list[EpochRange], Nacks]:
        """(acks, nacks) as runs of rows that were open, which they no longer are. The first word counts."""
        said = super().collect()
        self.hands.settled(self)
        return said

    def close_rows(self, mask: RowMask) -> list[EpochRange]:
        """Rows are not ours any more; the runs of those that were."""
        if self.rows_done is None:
            self.rows_done = np.zeros(self.count, bool)
        runs = self._close(mask)
        self.hands.settled(self)
        return runs

    def runs(self, mask: RowMask) -> list[EpochRange]:
        """Rows as runs of them."""
        return self._ranges(mask)

    def _ranges(self, mask: RowMask | None) -> list[EpochRange]:
        if mask is None:
            return [(0, self.count, self.epoch)]
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        return [(first, end, self.epoch) for first, end in edges.reshape(-1, 2).tolist()]

    def _row_ranges(self, rows: npt.NDArray[np.int64]) -> list[EpochRange]:
        return self._ranges(mask_of(rows, self.count)) if len(rows) else []

    def open_ranges(self) -> list[EpochRange]:
        """The sequences of rows that are neither acked nor nacked, or whose ack has not been collected."""
        rows = np.arange(self.count) if self.rows_done is None else np.flatnonzero(~self.rows_done)
        return self.plain(rows)

    def plain(self, rows: npt.NDArray[np.int64]) -> list[EpochRange]:
        """The sequences of some rows, which ascend, as ranges of nothing else."""
        return super()._row_ranges(rows)

    def tagged(self, runs: list[EpochRange]) -> list[EpochRange]:
        """The sequences of runs of rows, each up to the frame's next row: what the tag makes plain."""
        sequences, last = self.sequences, self.count - 1
        return [
            (int(sequences[first]), int(sequences[end] if end <= last else sequences[last] + 1), epoch)
            for first, end, epoch in runs
        ]

    def mask_in(self, ranges: list[EpochRange]) -> RowMask:
        """The rows of ranges of sequences, which lie apart."""
        starts, ends, _ = np.searchsorted(self.sequences, np.array(ranges).T)
        mask: RowMask = np.cumsum(_marked(starts, self.count) - _marked(ends, self.count))[:-1] > 0
        return mask

    def given_back(self, ranges: list[EpochRange]) -> None:
        """The broker has these back: they are not in our hands under the frame's tag, whatever is said of it."""
        mask = self.mask_in(ranges)
        self.back = mask if self.back is None else self.back | mask

    def widened(self, ranges: list[EpochRange]) -> list[EpochRange]:
        """The same with those that the broker has back: what is left of a frame then takes few ranges."""
        if self.back is None:
            return ranges
        mask = self.mask_in(ranges)
        counts = np.concatenate([[0], np.cumsum(mask)])
        return self.tagged([run for run in self.runs(mask | self.back) if counts[run[1]] > counts[run[0]]])


class SharedOrderedDelivered(SharedDeliveredFrame, OrderedDelivered):
    """A frame whose messages are acked and nacked from any thread."""

    __slots__ = ()


def _marked(at: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    return np.bincount(at, minlength=count + 1)


def mask_of(rows: npt.NDArray[np.int64], count: int) -> RowMask:
    """Some of ``count`` rows."""
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def rows_of(runs: list[EpochRange]) -> npt.NDArray[np.int64]:
    """The rows of runs."""
    if not runs:
        return np.empty(0, np.int64)
    first, end, _ = np.array(runs).T
    before = np.cumsum(end - first) - (end - first)
    rows: npt.NDArray[np.int64] = np.repeat(first - before, end - first) + np.arange(before[-1] + end[-1] - first[-1])
    return rows
