"""What an ordered consumer may handle of one partition: locks of logical partitions, for the time of a lease (R14).

The lease is counted from the sending of the request that renewed it, on a clock that goes on while the machine sleeps.
So it ends here before it ends at the broker, whatever the network does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait import chance
from plait.clock import Clock
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, lp_set
from plait.wire import messages as m

#: A number for each logical partition.
Numbers = npt.NDArray[np.int64]
LpEpochs = Numbers


def no_lps() -> LpSet:
    """None of the logical partitions."""
    return np.zeros(LOGICAL_PARTITIONS, bool)


def grants_of(runs: list[m.LpGrant]) -> tuple[LpSet, LpEpochs]:
    """Which logical partitions, and the epoch of each."""
    chosen, epochs = no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, epoch in runs:
        chosen[first:end] = True
        epochs[first:end] = epoch
    return chosen, epochs


class LockReport(NamedTuple):
    """What a partition has said."""

    #: Up to where each logical partition is done there.
    done: Numbers
    #: Hashes of keys that are parked there, and of those that are so only because they were told to be.
    parked: frozenset[int]
    inherited: frozenset[int]
    #: What ends there and has rows left, or has some again.
    again: LpSet

    @property
    def own(self) -> frozenset[int]:
        """Keys that wait there for somebody's decision."""
        return self.parked - self.inherited


def nothing_said() -> LockReport:
    """Of a partition that has not been asked yet."""
    return LockReport(np.zeros(LOGICAL_PARTITIONS, np.int64), frozenset(), frozenset(), no_lps())


class LockRights:
    """The locks that one session has. The loop changes them; ``renewed`` may come from another thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.session = 0
        #: A secret of this consumer and the broker: with it the session is resumed after a lost connection.
        self.token = chance.bits(63) | 1
        #: How long a lease is.
        self.seconds = 0.0
        self._until = -math.inf
        #: Logical partitions whose rows may be handed out, and the epochs of their locks.
        self.open = no_lps()
        self.epochs: LpEpochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: Up to which sequence each is done here, as far as the route led on from there.
        self.done: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: Those of them that have rows all the same: dead letters that were sent once more, or what a crash took back.
        self.again = no_lps()
        #: Hashes of keys that are parked here, and of those that are so only because they are where they were before.
        self.parked: frozenset[int] = frozenset()
        self.inherited: frozenset[int] = frozenset()
        #: The number of the last news that was looked at.
        self.news = 0

    def attached(self, attached: m.AttachReply) -> None:
        """A new session; what was granted to the one before counts as long as its lease."""
        self.session, self.seconds = attached.session, attached.lease_seconds
        self.news = 0

    def valid(self) -> bool:
        """The lease has not ended."""
        return self._clock.monotonic() < self._until

    def now(self) -> float:
        """What leases are measured with."""
        return self._clock.monotonic()

    def renewed(self, session: int, sent: float) -> None:
        """The lease goes on from when the request was sent."""
        if session == self.session:
            self._until = max(self._until, sent + self.seconds)

    def granted(self, answer: m.LeaseReply, sent: float, asked: LpSet, until: Numbers, wanted: LpSet) -> LpSet:
        """What the broker says to a request for the locks ``asked``; those whose rows must not be handed out any more.

        They were asked for up to ``until``; ``wanted`` is what is wanted by now.
        """
        self.seconds = answer.seconds
        self.renewed(self.session, sent)
        self.news = answer.news
        owned, epochs = grants_of(answer.owned)
        # What was given up meanwhile is not taken back.
        owned &= wanted
        lost: LpSet = self.open & ~owned
        self.open = owned
        self.epochs = np.where(owned, epochs, self.epochs)
        parked = self._marks(self.parked, answer.parked, asked)
        resumed = self.parked - parked
        if resumed:
            # What was done but for a parked key is so no longer when that goes on.
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
    def _marks(before: frozenset[int], told: list[int], asked: LpSet) -> frozenset[int]:
        """Nothing is said of what was not asked for."""
        return frozenset(told) | {key for key in before if not asked[key % LOGICAL_PARTITIONS]}

    def report(self) -> LockReport:
        """What the partition has said."""
        return LockReport(self.done, self.parked, self.inherited, self.again)

    def give_up(self, lps: LpSet) -> None:
        """Rows of these are not handed out any more."""
        self.open = self.open & ~lps
