"""The clocks of one simulated machine, made from virtual time.

``monotonic`` counts from a start of its own, as after a boot nobody else saw, and may run a little fast or slow; so a
comparison of two machines' clocks goes wrong here as it would there. ``now`` is wall time, which jumps when told to.
"""

from __future__ import annotations

from typing import Protocol

#: Wall time at the beginning of every simulation, in microseconds since the Unix epoch.
WALL_START = 1_700_000_000_000_000


class VirtualTime(Protocol):
    """Whatever knows how many seconds have passed."""

    @property
    def now(self) -> float: ...


class SimClock:
    """Satisfies ``plait.clock.Clock``."""

    def __init__(self, time: VirtualTime, *, booted: float = 1000.0, drift: float = 0.0) -> None:
        self._time = time
        self._booted = booted
        self._rate = 1.0 + drift
        self._jumped = 0

    def now(self) -> int:
        return WALL_START + self._jumped + int(self._time.now * self._rate * 1_000_000)

    def monotonic(self) -> float:
        return self._booted + self._time.now * self._rate

    def jump(self, seconds: float) -> None:
        """Only the wall clock moves, either way, as when an administrator sets it."""
        self._jumped += round(seconds * 1_000_000)

    def virtual(self, monotonic: float) -> float:
        """The virtual time at which ``monotonic()`` will be that."""
        return (monotonic - self._booted) / self._rate
