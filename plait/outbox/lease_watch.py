"""Decides when the lease of another relay has ended, without comparing clocks of different machines.

A leader increments ``renewals`` within its lease. A relay that has seen the same ``epoch`` and ``renewals`` for longer
than a lease, on its own monotonic clock, takes over by compare-and-set. The leader counts its lease from the moment
before it commits the increment, which no other relay sees earlier, and the watching relay waits a quarter longer (R14).
So a leader whose clock is at most that much slower stops before it is replaced.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: How much longer than the lease a watching relay waits.
MARGIN: Final = 1.25


class RelayLease(NamedTuple):
    """The row of the relay table."""

    owner: str | None
    epoch: int
    renewals: int
    producer: int
    next: int


class LeaseWatch:
    """What one relay has seen of the lease of another."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds * MARGIN
        self._seen: tuple[int, int] | None = None
        self._since = 0.0

    def may_take(self, lease: RelayLease, now: float) -> bool:
        """Whether the lease, read at this time, has ended."""
        if lease.owner is None:
            return True
        if (lease.epoch, lease.renewals) != self._seen:
            self._seen, self._since = (lease.epoch, lease.renewals), now
        return now - self._since >= self._seconds
