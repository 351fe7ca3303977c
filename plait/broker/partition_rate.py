"""Whether a partition may store, or a group deliver, more rows now: two token buckets, one of messages, one of bytes.

Tokens come at the rate of the limit, times the share that the partition has of the subject, and at most those of
``RATE_BURST_SECONDS`` are kept. While there are tokens the limit is *open*, and one frame or delivery may take more
than there are. The limit is then *closed* until the debt is paid and ``RATE_STEP_SECONDS`` have passed, so that rows
come in batches. Over time neither bucket gives more than its rate. A new limit is closed and has no tokens: neither a
restart nor a change of a limit gives a burst.
"""

from __future__ import annotations

from typing import Any, Protocol

from plait.errors import RateLimited
from plait.limits import RATE_BURST_SECONDS, RATE_STEP_SECONDS
from plait.model.rate import Rate


class TokenBucket:
    """Tokens that come at a rate."""

    __slots__ = ("level", "rate")

    def __init__(self, rate: float) -> None:
        #: Tokens a second for the whole subject or group.
        self.rate = rate
        #: The tokens; below 0: a debt.
        self.level = 0.0

    def fill(self, seconds: float, share: float) -> None:
        """Add the tokens of this time."""
        rate = self.rate * share
        self.level = min(self.level + seconds * rate, rate * RATE_BURST_SECONDS)

    @property
    def room(self) -> int:
        """How many units one delivery may take: at least one."""
        # A millionth is an error of rounding.
        return max(int(self.level + 1e-6), 1)


class PartitionRate:
    """The state of one limit in one partition. ``now`` is always the monotonic clock."""

    __slots__ = ("_buckets", "_closed", "_filled", "messages", "rate", "share", "size", "wakes_at")

    def __init__(self, rate: Rate, share: float) -> None:
        #: The limit of the whole subject or group.
        self.rate = rate
        #: The share of the limit that the partition enforces.
        self.share = share
        self.messages = None if rate.messages_per_second is None else TokenBucket(rate.messages_per_second)
        self.size = None if rate.bytes_per_second is None else TokenBucket(rate.bytes_per_second)
        self._buckets = [bucket for bucket in (self.messages, self.size) if bucket is not None]
        #: When the buckets were last filled; None: never.
        self._filled: float | None = None
        self._closed = True
        #: When the suspended pulls of the limited group are served next; 0.0: no timer is set.
        self.wakes_at = 0.0

    def pause(self, now: float) -> float:
        """Seconds until the limit opens; 0.0: it is open."""
        seconds = 0.0 if self._filled is None else now - self._filled
        self._filled = now
        for bucket in self._buckets:
            bucket.fill(seconds, self.share)
        if not self._closed:
            return 0.0
        wait = max(RATE_STEP_SECONDS - bucket.level / (bucket.rate * self.share) for bucket in self._buckets)
        # Less than a microsecond is an error of rounding.
        self._closed = wait > 1e-6
        return wait if self._closed else 0.0

    def refusal(self, subject: str, now: float) -> RateLimited | None:
        """The error of a send to the subject; None: the limit is open."""
        seconds = self.pause(now)
        if not seconds:
            return None
        part = "" if self.share == 1 else f", of which this partition has {self.share:.3g}"
        return RateLimited(
            f"subject {subject!r} is at its limit of {self.rate}{part}; nothing was stored, send again after "
            f"{seconds:.3g} s",
            subject=subject,
            seconds=seconds,
        )

    def spend(self, messages: int, size: int) -> None:
        """Take the tokens of rows that are stored or delivered now, while the limit is open."""
        if self.messages is not None:
            self.messages.level -= messages
        if self.size is not None:
            self.size.level -= size
        self._closed = any(bucket.level <= 0 for bucket in self._buckets)

    @property
    def closed(self) -> bool:
        """True if the last rows took the last tokens."""
        return self._closed


class RateTimers(Protocol):
    """Serves groups again when their limits open."""

    def expect(self, group: Any, due: float) -> None: ...


def partition_rate(wanted: Rate, known: PartitionRate | None, share: float) -> PartitionRate:
    """The state of a limit: the known one, unless the limit has changed."""
    if known is None or known.rate != wanted:
        return PartitionRate(wanted, share)
    known.share = share
    return known
