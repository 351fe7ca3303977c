"""Recently dropped partitions: a late order of a meta server must not create one of them again."""

from __future__ import annotations

from plait.errors import StaleRoute

#: No order is later than this: meta servers give up on an order, and compute it again, long before. Orders arrive over
#: a connection, so none outlives the broker's process.
LATE_SECONDS = 600.0


class Dropped:
    """Recently dropped partitions, with the route version of each drop."""

    def __init__(self) -> None:
        #: Name → (route version, until when it is kept); the oldest first.
        self._of: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def note(self, name: str, version: int, now: float) -> None:
        """Record the drop of a partition."""
        self._of.pop(name, None)
        self._of[name] = (version, now + LATE_SECONDS)
        while (oldest := next(iter(self._of))) and self._of[oldest][1] <= now:
            del self._of[oldest]

    def refuse_late(self, name: str, version: int, now: float) -> None:
        """``StaleRoute`` if the order is older than the drop: it would create a partition that no route has."""
        dropped, until = self._of.get(name, (-1, 0.0))
        if version <= dropped and now < until:
            raise StaleRoute(
                f"partition {name!r} was dropped by route version {dropped}, the order has version {version}"
            )
