"""Liveness of brokers, clients and meta servers, measured on the watcher's own clock.

Clocks of two machines are never compared. A name is alive if the watcher received a heartbeat of it, or saw its
heartbeat counter change, within the last lease; otherwise it is lost. Only time in which the watcher could see
heartbeats is counted, so no name is lost while the watcher is stopped or cannot reach its database.
"""

from __future__ import annotations

import math
from collections.abc import Iterator


class Liveness:
    """Watched names and the time of the last sign of life of each."""

    def __init__(self, lost_seconds: float) -> None:
        self._lost_seconds = lost_seconds
        #: Seconds in which the watcher could see heartbeats.
        self._now = 0.0
        #: Name → time of its last sign of life, the longest silent first.
        self._noticed: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        #: How often the watcher itself raised a counter since it last read it.
        self._raised: dict[str, int] = {}
        self._certain: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._noticed)

    def __contains__(self, name: str) -> bool:
        return name in self._noticed

    def advance(self, seconds: float) -> None:
        """Count seconds in which the watcher could see heartbeats."""
        self._now += seconds

    def expect(self, name: str) -> None:
        """Watch a name that should be alive: it has a whole lease to show a sign of life."""
        if name not in self._noticed:
            self._noticed[name] = self._now

    def notice(self, name: str, ago: float = 0.0) -> None:
        """Record a heartbeat, ``ago`` seconds old.

        Heartbeats come in order of time, and none is older than the last ``advance``.
        """
        self._noticed.pop(name, None)
        self._noticed[name] = self._now - ago
        self._certain.add(name)

    def raised(self, name: str) -> None:
        """Record that the watcher raised the counter for other watchers; for itself that is no sign of life."""
        self._raised[name] = self._raised.get(name, 0) + 1

    def observe(self, name: str, count: int) -> None:
        """Record a counter value. A value that the watcher does not expect is a sign of life."""
        before = self.count(name)
        self._counts[name] = count
        self._raised.pop(name, None)
        if before is not None and before != count and name in self._noticed:
            self.notice(name)

    def count(self, name: str) -> int | None:
        """The expected counter value: the last one read plus what the watcher added since."""
        count = self._counts.get(name)
        return None if count is None else count + self._raised.get(name, 0)

    def lives(self, name: str) -> bool:
        """True unless the name is lost. An expected name counts as alive for its first lease."""
        noticed = self._noticed.get(name)
        return noticed is not None and self._now - noticed < self._lost_seconds

    def is_certain(self, name: str) -> bool:
        """True if the name is alive and the watcher has seen a sign of life itself."""
        return name in self._certain and self.lives(name)

    def lost(self, limit: int) -> list[str]:
        """Lost names, at most ``limit``."""
        found: list[str] = []
        for name, noticed in self._noticed.items():
            if self._now - noticed < self._lost_seconds or len(found) == limit:
                break
            found.append(name)
        return found

    @property
    def next_loss(self) -> float:
        """Seconds of further silence until the next name is lost."""
        for noticed in self._noticed.values():
            return max(noticed + self._lost_seconds - self._now, 0.0)
        return math.inf

    def forget(self, name: str) -> None:
        """Stop watching a name."""
        self._noticed.pop(name, None)
        self._counts.pop(name, None)
        self._raised.pop(name, None)
        self._certain.discard(name)
