"""``RateLimit``: limits what a client takes per second, such as bytes of a read or dead letters of a resend."""

from __future__ import annotations

import math


class RateLimit:
    """A token bucket of ``rate`` units per second. After a pause it has the units of ``burst_seconds`` at once.

    Times are loop times. ``start``: the bucket is empty at this time; by default it is full at the first use.
    """

    def __init__(self, rate: float, burst_seconds: float, *, start: float = -math.inf) -> None:
        self._rate = rate
        self._burst_seconds = burst_seconds
        #: The time at which everything taken so far is within the rate.
        self._paid = start

    def take(self, count: float, now: float) -> float:
        """Take ``count`` units; returns the seconds to wait first."""
        begin = max(self._paid, now - self._burst_seconds)
        self._paid = begin + count / self._rate
        return max(begin - now, 0.0)

    def room(self, now: float) -> float:
        """The units that can be taken now without a later wait."""
        return min(now - self._paid, self._burst_seconds) * self._rate
