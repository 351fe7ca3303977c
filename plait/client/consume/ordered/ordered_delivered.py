"""A frame delivered to an ordered consumer, and the locks that give the right to handle its rows (R14).

The client counts a lease from the time it sent the request that renewed it, on a clock that also runs while the
machine sleeps. So the lease expires at the client before it expires at the broker, however slow the network is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from plait import chance
from plait.client.consume.delivered import DeliveredFrame, Deliveries, RangesByFrame
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome
from plait.client.consume.row_runs import RowMask, RowSelection, Run, mask_runs
from plait.client.types import PartitionName
from plait.clock import Clock
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes, LpSet, lp_set, lps_of, without_lps
from plait.wire import messages as m

if TYPE_CHECKING:
    from plait.client.consume.ordered.ordered_buffer import OrderedBuffer

#: One number per logical partition.
Numbers = npt.NDArray[np.int64]
#: The fraction of a lease after which it is renewed.
RENEW_AT = 1 / 3

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


class RenewedLease(NamedTuple):
    """A session whose lease is to be renewed."""

    addresses: tuple[str, ...]
    session: int
    token: int
    seconds: float


def no_lps() -> LpSet:
    return np.zeros(LOGICAL_PARTITIONS, bool)


def grants_of(runs: list[m.LpGrant]) -> tuple[LpSet, Numbers]:
    """The granted logical partitions, and the epoch of each."""
    chosen, epochs = no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, epoch in runs:
        chosen[first:end] = True
        epochs[first:end] = epoch
    return chosen, epochs


class LockRights:
    """The locks of one session. The loop changes them; ``renewed`` may be called from another thread."""

    def __init__(self, clock: Clock) -> None:
        #: The clock that leases are measured with.
        self.clock = clock
        self.session = 0
        #: The session token: resumes the session after a lost connection.
        self.token = chance.bits(63) | 1
        #: The duration of a lease.
        self.seconds = 0.0
        self._until = -math.inf
        #: Logical partitions whose rows may be handed out, and the epochs of their locks.
        self.open = no_lps()
        self.epochs: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: The sequence up to which each LP is drained here, for LPs that the route has moved on.
        self.done: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: Drained LPs that have rows again: resent dead letters, or rows whose acks were lost in a crash.
        self.again = no_lps()
        #: Hashes of the keys parked here; ``inherited`` are those parked only because an earlier partition parks them.
        self.parked: frozenset[int] = frozenset()
        self.inherited: frozenset[int] = frozenset()
        #: The number of the last lock change at the broker that this client has seen.
        self.news = 0

    def attached(self, attached: m.AttachReply) -> None:
        """Start a new session. The locks of the session before stay usable until their lease expires."""
        self.session, self.seconds = attached.session, attached.lease_seconds
        self.news = 0

    def valid(self) -> bool:
        return self.clock.monotonic() < self._until

    def renewed(self, session: int, sent: float) -> None:
        """Record that the lease was renewed. It runs from ``sent``, the time of the request."""
        if session == self.session:
            self._until = max(self._until, sent + self.seconds)

    def granted(self, answer: m.LeaseReply, sent: float, asked: LpSet, until: Numbers, wanted: LpSet) -> LpSet:
        """Apply the reply to a request for the locks ``asked`` up to ``until``; ``wanted`` are those wanted now.

        Returns the LPs whose locks were lost: their rows must not be handed out.
        """
        self.seconds = answer.seconds
        self.renewed(self.session, sent)
        self.news = answer.news
        owned, epochs = grants_of(answer.owned)
        # LPs that the consumer gave up after the request stay given up.
        owned &= wanted
        lost: LpSet = self.open & ~owned
        self.open = owned
        self.epochs = np.where(owned, epochs, self.epochs)
        parked = self._marks(self.parked, answer.parked, asked)
        resumed = self.parked - parked
        if resumed:
            # An LP that was drained except for a parked key has rows again when the key is resumed.
            self.done = self.done.copy()
            self.done[[key % LOGICAL_PARTITIONS for key in resumed]] = 0
        if answer.drained:
            drained = lp_set(answer.drained) & asked
            self.done = np.where(drained, np.maximum(self.done, until), self.done)
        if answer.again or self.again.any():
            self.again = lp_set(answer.again)
        self.parked = parked
        self.inherited = self._marks(self.inherited, answer.inherited, asked)
        return lost

    @staticmethod
    def _marks(before: frozenset[int], reported: list[int], asked: LpSet) -> frozenset[int]:
        """The reported keys, and the earlier ones of LPs that were not asked for: the reply does not cover those."""
        return frozenset(reported) | {key for key in before if not asked[key % LOGICAL_PARTITIONS]}

    def give_up(self, lps: LpSet) -> None:
        """Stop handing out rows of these LPs."""
        self.open = self.open & ~lps


class OrderedDelivered(DeliveredFrame):
    """One frame, or part of one, whose rows have an order. ``tracker`` is the buffer of the consumer."""

    plain_acks: ClassVar = False

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
            self.keys = without_lps(hashes)
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

    def note(self, row: int, failed: FailureOutcome | None) -> None:
        super().note(row, failed)
        if failed is None:
            self.tracker.acked(self, row)

    def nack_rows(self, rows: RowSelection, failed: FailureOutcome = FAILED) -> None:
        super().nack_rows(rows, failed)
        # A later ack has no effect.
        self.states[rows] |= BROKEN

    def _closed(self, count: int) -> None:
        super()._closed(count)
        self.tracker.collected(self)

    def put(self, runs: list[Run], into: RangesByFrame) -> None:
        if self.tag:
            into.setdefault(self, []).extend(self.tagged(runs))
        else:
            super().put(runs, into)

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
        # Extended over returned rows, which they do not affect: fewer ranges describe the frame.
        if self.back is None:
            return ranges
        mask = self.mask_in(ranges)
        counts = np.concatenate([[0], np.cumsum(mask)])
        return self.tagged([run for run in mask_runs(mask | self.back) if counts[run[1]] > counts[run[0]]])


def _marked(at: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    return np.bincount(at, minlength=count + 1)
