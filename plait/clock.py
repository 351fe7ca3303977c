"""Clocks, passed as arguments.

Storage and broker never read the system clock: they take a ``Clock``, and tests pass a ``ManualClock``. ``now`` is wall
time in integer microseconds (for stored times), ``monotonic`` is seconds that never jump (for durations).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """Wall time for stored times, monotonic time for durations."""

    def now(self) -> int:
        """Microseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, and that include the time while the machine is suspended, where the system
        supports it."""
        ...


#: Address of a server in this process that runs on virtual time → its clock, which its clients use as well.
_virtual: dict[str, Clock] = {}


def set_virtual(address: str, clock: Clock | None) -> None:
    """Record that the server at ``address`` runs on ``clock``; None removes the record."""
    if clock is None:
        _virtual.pop(address, None)
    else:
        _virtual[address] = clock


def virtual_clock(addresses: Iterable[str]) -> Clock | None:
    """The virtual clock of a server of this process at one of the addresses; None when there is none."""
    return next((_virtual[address] for address in addresses if address in _virtual), None)


class SystemClock:
    """The machine's clocks. CLOCK_BOOTTIME, where available, makes leases expire while the machine is suspended."""

    #: Both are C callables instead of Python methods, because each request calls them several times.
    monotonic = staticmethod(partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))
    #: ``time.time_ns() // 1000``: each item of the endless iterator is the time at which it is taken.
    now = staticmethod(map((1000).__rfloordiv__, iter(time.time_ns, None)).__next__)


class ManualClock:
    """A clock that moves only when ``advance`` or ``jump`` is called."""

    def __init__(self, now: int = 1_700_000_000_000_000) -> None:
        self._now = now
        self._monotonic = 1000.0

    def now(self) -> int:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._monotonic += seconds
        self._now += round(seconds * 1_000_000)

    def jump(self, seconds: float) -> None:
        """Move only the wall clock, forward or back, as an administrator does by setting it."""
        self._now += round(seconds * 1_000_000)
