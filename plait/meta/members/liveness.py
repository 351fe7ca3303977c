"""Who lives: told by counters that grow, on the watcher's own clock.

No two machines' clocks are compared. Who is heard, or whose counter has another value than before, lives; who was not
for as long as a lease is lost. Only time in which the watcher could have noticed counts: while it stands still, or
cannot reach its database, nobody is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator


class Liveness:
    """Names, and when each was noticed last."""

    def __init__(self, lost_seconds: float) -> None:
        self._lost_seconds = lost_seconds
        #: Time in which somebody could have been noticed.
        self._now = 0.0
        #: Name → when, the longest silent first.
        self._noticed: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        #: How often the watcher itself raised a counter since it was seen.
        self._raised: dict[str, int] = {}
        self._certain: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._noticed)

    def __contains__(self, name: str) -> bool:
        return name in self._noticed

    def advance(self, seconds: float) -> None:
        """So much time has passed under the watcher's eyes."""
        self._now += seconds

    def expect(self, name: str) -> None:
        """It is said to live: it has a whole lease to show that."""
        if name not in self._noticed:
            self._noticed[name] = self._now

    def hear(self, name: str, ago: float = 0.0) -> None:
        """It spoke to the watcher, so many seconds ago: since time passed last, and after others that were heard."""
        self._noticed.pop(name, None)
        self._noticed[name] = self._now - ago
        self._certain.add(name)

    def raised(self, name: str) -> None:
        """The watcher raised its counter by one, for others to see: to itself that is no sign of life."""
        self._raised[name] = self._raised.get(name, 0) + 1

    def see(self, name: str, count: int) -> None:
        """Its counter has this value."""
        before = self.count(name)
        self._counts[name] = count
        self._raised.pop(name, None)
        if before is not None and before != count and name in self._noticed:
            self.hear(name)

    def count(self, name: str) -> int | None:
        """The counter's value that was seen last, and what the watcher has added since."""
        count = self._counts.get(name)
        return None if count is None else count + self._raised.get(name, 0)

    def lives(self, name: str) -> bool:
        """It is not lost; a name that was only expected counts as alive for the first lease."""
        noticed = self._noticed.get(name)
        return noticed is not None and self._now - noticed < self._lost_seconds

    def is_certain(self, name: str) -> bool:
        """It lives, and the watcher has noticed it by itself."""
        return name in self._certain and self.lives(name)

    def lost(self, limit: int) -> list[str]:
        """Those that are lost, at most so many."""
        found: list[str] = []
        for name, noticed in self._noticed.items():
            if self._now - noticed < self._lost_seconds or len(found) == limit:
                break
            found.append(name)
        return found

    @property
    def next_loss(self) -> float:
        """After so many seconds of silence the first is lost."""
        for noticed in self._noticed.values():
            return max(noticed + self._lost_seconds - self._now, 0.0)
        return math.inf

    def forget(self, name: str) -> None:
        """It is of no interest any more."""
        self._noticed.pop(name, None)
        self._counts.pop(name, None)
        self._raised.pop(name, None)
        self._certain.discard(name)
