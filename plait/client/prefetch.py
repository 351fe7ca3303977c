"""How much a consumer pulls ahead of need, and each partition's part of it.

The limits are of the consumer as a whole. With several partitions half of them is shared out evenly: that much each may
use whatever the others do, so that a busy one does not starve another. The other half is for whoever has more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from plait.limits import ClientLimits


class Puller(Protocol):
    """What a partition uses of it."""

    #: The last pull left rows at the broker.
    more: bool
    #: Rows that the pulls under way ask for.
    asked: int
    #: Bytes of frames with rows that are not settled.
    open_bytes: int

    def held(self) -> int:
        """Rows in the user's hands, and those that wait for it."""

    def span(self) -> int:
        """Rows pulled since the oldest one that is still open."""


class Prefetch:
    """The limits of one consumer."""

    def __init__(self, limits: ClientLimits, *, spans: bool = True) -> None:
        self._limits = limits
        #: One stuck row does not let the rest run away.
        self._spans = spans
        #: Rows.
        self.ahead = limits.prefetch_count

    @property
    def large(self) -> bool:
        """Large fetches made it more than what is usual."""
        return self.ahead > self._limits.prefetch_count

    def wanted(self, puller: Puller, pullers: Collection[Puller]) -> int:
        """How many rows the next pull of one partition asks for; 0: none now."""
        limits, count = self._limits, len(pullers)
        held = puller.held() + puller.asked
        if not held and count == 1:
            return self.ahead
        if self._spans and puller.span() >= max(limits.prefetch_span, 2 * self.ahead):
            return 0
        if count == 1:
            return 0 if puller.open_bytes >= limits.prefetch_bytes else self._whole(self.ahead - held, 1)
        size = limits.prefetch_bytes // (2 * count)
        others = sum(other.open_bytes for other in pullers)
        if puller.open_bytes >= size and others >= limits.prefetch_bytes - (count - 1) * size:
            return 0
        own = max(self.ahead // (2 * count), 1)
        if not puller.more:
            return self._whole(own - held, count)
        common = self.ahead - count * own
        common -= sum(max(other.held() + other.asked - own, 0) for other in pullers if other is not puller)
        return self._whole(own + max(common, 0) - held, count)

    def _whole(self, wanted: int, count: int) -> int:
        """The bytes of a large pull limit it, not a number that ends inside a frame."""
        if wanted <= 0:
            return 0
        return max(wanted, self.ahead // (2 * count)) if self.large else wanted

    @staticmethod
    def wanted_now(demand: int, puller: Puller, pullers: Collection[Puller]) -> int:
        """The same where nothing is pulled ahead of ``demand``: the partitions share it."""
        return -(-demand // len(pullers)) - puller.asked if demand > 0 else 0
