"""The locks of an ordered consumer in one partition, and their lease (R14).

The client counts the lease from the time it sent the request that renewed it, on a clock that also runs while the
machine sleeps. So the lease expires at the client before it expires at the broker, however slow the network is.
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

#: One number per logical partition.
Numbers = npt.NDArray[np.int64]
LpEpochs = Numbers
#: The fraction of a lease after which it is renewed.
RENEW_AT = 1 / 3


class RenewedLease(NamedTuple):
    """A session whose lease is to be renewed."""

    addresses: tuple[str, ...]
    session: int
    token: int
    seconds: float


def no_lps() -> LpSet:
    """The empty set of logical partitions."""
    return np.zeros(LOGICAL_PARTITIONS, bool)


def grants_of(runs: list[m.LpGrant]) -> tuple[LpSet, LpEpochs]:
    """The granted logical partitions, and the epoch of each."""
    chosen, epochs = no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, epoch in runs:
        chosen[first:end] = True
        epochs[first:end] = epoch
    return chosen, epochs


class LockReport(NamedTuple):
    """The state of a group's LPs in one partition, as its broker reported it."""

    #: The sequence up to which each LP is drained.
    done: Numbers
    #: Hashes of the keys parked here; ``inherited`` are those parked only because an earlier partition parks them.
    parked: frozenset[int]
    inherited: frozenset[int]
    #: Sealed LPs that have unfinished rows, or have some again.
    again: LpSet

    @property
    def own(self) -> frozenset[int]:
        """Keys whose own dead letter is in this partition: they wait for ``resume`` or ``skip`` there."""
        return self.parked - self.inherited


def empty_report() -> LockReport:
    """The report of a partition that has not answered yet."""
    return LockReport(np.zeros(LOGICAL_PARTITIONS, np.int64), frozenset(), frozenset(), no_lps())


class LockRights:
    """The locks of one session. The loop changes them; ``renewed`` may be called from another thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.session = 0
        #: The session token: resumes the session after a lost connection.
        self.token = chance.bits(63) | 1
        #: The duration of a lease.
        self.seconds = 0.0
        self._until = -math.inf
        #: Logical partitions whose rows may be handed out, and the epochs of their locks.
        self.open = no_lps()
        self.epochs: LpEpochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
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
        """True if the lease has not expired."""
        return self._clock.monotonic() < self._until

    def now(self) -> float:
        """The time on the clock that leases are measured with."""
        return self._clock.monotonic()

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

    def report(self) -> LockReport:
        """The state of the LPs in this partition."""
        return LockReport(self.done, self.parked, self.inherited, self.again)

    def give_up(self, lps: LpSet) -> None:
        """Stop handing out rows of these LPs."""
        self.open = self.open & ~lps
