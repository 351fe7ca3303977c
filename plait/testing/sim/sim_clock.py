"""The clocks of one simulated machine, made from virtual time.

Each machine's ``monotonic`` has its own start and runs a little fast or slow. So code that compares the clocks of two
machines fails, as it would in reality. ``now`` is wall time, which ``jump`` changes.
"""

from __future__ import annotations

from plait.testing.sim.timeline import Timeline

#: Wall time at the beginning of every simulation, in microseconds since the Unix epoch.
WALL_START = 1_700_000_000_000_000


class SimClock:
    """Satisfies ``plait.clock.Clock``."""

    def __init__(self, time: Timeline, *, booted: float = 1000.0, drift: float = 0.0) -> None:
        self._time = time
        self._booted = booted
        self._rate = 1.0 + drift
        self._jumped = 0

    def now(self) -> int:
        return WALL_START + self._jumped + int(self._time.now * self._rate * 1_000_000)

    def monotonic(self) -> float:
        return self._booted + self._time.now * self._rate

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator does; ``monotonic`` does not change."""
        self._jumped += round(seconds * 1_000_000)

    def virtual(self, monotonic: float) -> float:
        """The virtual time at which ``monotonic()`` has this value."""
        return (monotonic - self._booted) / self._rate
