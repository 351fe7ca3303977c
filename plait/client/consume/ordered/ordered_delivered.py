"""A frame delivered to an ordered consumer: the key, the logical partition and the state of each row.

``HandedOutRows`` has the frames whose rows the user holds, and the keys of those rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import numpy.typing as npt

from plait.client.consume.delivered import DeliveredFrame, Deliveries
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome
from plait.client.consume.ordered.lock_rights import LockRights
from plait.client.consume.row_runs import RowMask, RowSelection, Run, mask_runs
from plait.client.types import PartitionName
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes, lps_of

if TYPE_CHECKING:
    from plait.client.consume.ordered.ordered_buffer import OrderedBuffer

#: States of a row. It waits in the buffer;
WAITS: Final = 0
#: the user holds it as a single message;
ALONE: Final = 1
#: the user holds it as part of a batch;
BATCHED: Final = 2
#: it failed or is returned, and that is not collected yet (combined with ALONE or BATCHED if the user held it);
BROKEN: Final = 4
#: it has an outcome.
DONE: Final = 8

#: Keys are compared by the bits of their hash above those of the logical partition, which a producer may change.
KEY_SHIFT: Final = np.uint64(LOGICAL_PARTITIONS.bit_length() - 1)
NO_KEYS: Final[Hashes] = np.empty(0, np.uint64)


class OrderedDelivered(DeliveredFrame):
    """One frame, or part of one, whose rows have an order. ``tracker`` is the buffer of the consumer."""

    plain_acks: ClassVar = False

    __slots__ = (
        "back",
        "handed_at",
        "keyed",
        "keys",
        "lock_epochs",
        "lps",
        "number",
        "rights",
        "sequences",
        "states",
        "tracker",
        "waiting",
    )

    def __init__(
        self,
        frame: FrameView,
        subject: str,
        partition: PartitionName,
        deliveries: Deliveries | None,
        attempts: list[tuple[int, int, int]],
    ) -> None:
        super().__init__(frame, subject, partition, deliveries, attempts)
        self.sequences = frame.sequences()
        hashes = frame.key_hashes()
        self.lps = lps_of(self.sequences, hashes)
        #: Identifies the key of each row, where ``keyed`` is set; None: no row has a key.
        self.keys: Hashes | None = None
        self.keyed: RowMask | None = None
        if hashes is not None:
            self.keys = hashes >> KEY_SHIFT
            self.keyed = hashes != NO_KEY_HASH
        self.states: npt.NDArray[np.uint8] = np.zeros(self.count, np.uint8)
        #: The lock epoch under which each row was handed out, and the time.
        self.lock_epochs: npt.NDArray[np.int64] = np.zeros(self.count, np.int64)
        self.handed_at: npt.NDArray[np.float64] = np.zeros(self.count)
        #: Rows that were returned and that the broker has stored as such; None: none.
        self.back: RowMask | None = None
        #: The number of rows that wait in the buffer.
        self.waiting = 0
        #: The order of arrival.
        self.number = 0
        self.rights: LockRights
        self.tracker: OrderedBuffer

    def key(self, row: int) -> int | None:
        """Identifies the row's key; None: it has none."""
        if self.keys is None or self.keyed is None or not self.keyed[row]:
            return None
        return int(self.keys[row])

    def has_key(self, keys: Hashes) -> RowMask:
        """The rows whose key is one of these."""
        if self.keys is None or self.keyed is None:
            return np.zeros(self.count, bool)
        return np.isin(self.keys, keys) & self.keyed

    def key_list(self, start: int, stop: int) -> list[int | None]:
        """``key`` of the rows [start, stop)."""
        if self.keys is None or self.keyed is None:
            return [None] * (stop - start)
        keys: list[int | None] = self.keys[start:stop].tolist()
        for row in np.flatnonzero(~self.keyed[start:stop]).tolist():
            keys[row] = None
        return keys

    def epoch_of(self, row: int) -> int:
        return int(self.lock_epochs[row])

    def may_begin(self, rows: int | slice) -> bool:
        """True if the consumer still has the locks under which the rows were handed out."""
        lps, rights = self.lps[rows], self.rights
        return rights.valid() and bool(np.all(rights.open[lps] & (rights.epochs[lps] == self.lock_epochs[rows])))

    # --- outcomes -------------------------------------------------------------------------------

    def note(self, row: int | slice, failed: FailureOutcome | None) -> None:
        super().note(row, failed)
        if failed is None and isinstance(row, int):
            self.tracker.acked(self, row)

    def nack_rows(self, rows: RowSelection, failed: FailureOutcome = FAILED) -> None:
        super().nack_rows(rows, failed)
        # A later ack has no effect.
        self.states[rows] |= BROKEN

    def _closed(self, count: int) -> None:
        super()._closed(count)
        self.tracker.collected(self)

    def tagged(self, runs: list[Run]) -> list[EpochRange]:
        """Runs of rows as sequence ranges, each extended to the frame's next row: with the tag they are unambiguous."""
        sequences, last = self.sequences, self.count - 1
        return [
            (int(sequences[first]), int(sequences[end] if end <= last else sequences[last] + 1), self.epoch)
            for first, end in runs
        ]

    def mask_in(self, ranges: list[EpochRange]) -> RowMask:
        """The rows in disjoint sequence ranges."""
        starts, ends, _ = np.searchsorted(self.sequences, np.array(ranges).T)
        mask: RowMask = np.cumsum(_marked(starts, self.count) - _marked(ends, self.count))[:-1] > 0
        return mask

    def given_back(self, ranges: list[EpochRange]) -> None:
        """Record that the broker knows that these rows are returned: later ranges with this tag do not affect them."""
        mask = self.mask_in(ranges)
        self.back = mask if self.back is None else self.back | mask

    def widened(self, ranges: list[EpochRange]) -> list[EpochRange]:
        """The ranges, extended over returned rows, which they do not affect: fewer ranges describe the frame."""
        if self.back is None:
            return ranges
        mask = self.mask_in(ranges)
        counts = np.concatenate([[0], np.cumsum(mask)])
        return self.tagged([run for run in mask_runs(mask | self.back) if counts[run[1]] > counts[run[0]]])


class HandedOutRows:
    """The rows that the user of one consumer holds, and their keys."""

    def __init__(self) -> None:
        #: Frames with held rows.
        self.frames: dict[OrderedDelivered, None] = {}
        #: Keys of rows handed out as single messages, and the number of rows held of each.
        self._alone: dict[int, int] = {}
        #: Keys of rows handed out in batches, ascending; None: to be computed again.
        self.batched: Hashes | None = None

    def add(self, delivered: OrderedDelivered, rows: int | npt.NDArray[np.int64], how: int) -> None:
        """Record that the rows are handed out, ``ALONE`` or ``BATCHED``."""
        rights = delivered.rights
        delivered.states[rows] = how
        delivered.lock_epochs[rows] = rights.epochs[delivered.lps[rows]]
        delivered.handed_at[rows] = rights.now()
        self.frames[delivered] = None
        if how == BATCHED:
            self.batched = None

    def add_alone(self, delivered: OrderedDelivered, row: int, key: int | None) -> None:
        """Record that the row is handed out as a single message."""
        if key is not None:
            self._alone[key] = self._alone.get(key, 0) + 1
        self.add(delivered, row, ALONE)

    def release(self, key: int) -> bool:
        """Record that a single message of the key is closed; returns True if it was the last one."""
        left = self._alone.get(key, 0) - 1
        if left > 0:
            self._alone[key] = left
        else:
            self._alone.pop(key, None)
        return left <= 0

    def keys(self) -> Hashes:
        """The keys of all held rows."""
        if not self.frames:
            return NO_KEYS
        batched = self._batched_keys() if self.batched is None else self.batched
        if not self._alone:
            return batched
        return np.concatenate([batched, np.fromiter(self._alone, np.uint64, len(self._alone))])

    def has_key(self, key: int) -> bool:
        """True if the user holds a row of the key."""
        if key in self._alone:
            return True
        batched = self._batched_keys() if self.batched is None else self.batched
        at = int(np.searchsorted(batched, np.uint64(key))) if len(batched) else 0
        return at < len(batched) and int(batched[at]) == key

    def _batched_keys(self) -> Hashes:
        parts = [
            delivered.keys[(delivered.states & BATCHED > 0) & delivered.keyed]
            for delivered in self.frames
            if delivered.keys is not None and delivered.keyed is not None
        ]
        self.batched = np.unique(np.concatenate(parts)) if parts else NO_KEYS
        return self.batched

    def gather(self) -> None:
        """Collect the outcomes that were reported for held rows."""
        for deliveries in {delivered.deliveries for delivered in self.frames}:
            if deliveries is not None:
                deliveries.gather()

    def oldest(self) -> float | None:
        """The time at which the longest-held row was handed out; None: none is held. May be called from any thread."""
        times = [
            float(d.handed_at[held].min())
            for d in list(self.frames)
            if (held := d.states & (ALONE | BATCHED) > 0).any()
        ]
        return min(times, default=None)


def _marked(at: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    return np.bincount(at, minlength=count + 1)
