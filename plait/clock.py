"""Time, passed in.

Nothing below the servers reads a clock of its own: storage and broker take a ``Clock``, tests give a
``ManualClock``. ``now`` is wall time in integer microseconds (what is stored), ``monotonic`` is seconds that
never jump (what durations are measured with).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is stored, monotonic time for what is measured."""

    def now(self) -> int:
        """Microseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that only go forward, also while the machine is suspended."""
        ...


#: Address of a server of this process that runs on virtual time → its clock; clients of it go by it.
_virtual: dict[str, Clock] = {}


def set_virtual(address: str, clock: Clock | None) -> None:
    """The server at ``address`` runs on ``clock``; None: it is gone."""
    if clock is None:
        _virtual.pop(address, None)
    else:
        _virtual[address] = clock


def virtual_clock(addresses: Iterable[str]) -> Clock | None:
    """The clock of a server at one of the addresses that runs on virtual time in this process."""
    return next((_virtual[address] for address in addresses if address in _virtual), None)


class SystemClock:
    """The machine's clocks; CLOCK_BOOTTIME where there is one, so that leases end during a suspend."""

    def __init__(self) -> None:
        self._clock_id: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def now(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.clock_gettime(self._clock_id)


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, now: int = 1_700_000_000_000_000) -> None:
        self._now = now
        self._monotonic = 1000.0

    def now(self) -> int:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Both clocks go forward."""
        self._monotonic += seconds
        self._now += round(seconds * 1_000_000)

    def jump(self, seconds: float) -> None:
        """Only the wall clock moves, either way, as when an administrator sets it."""
        self._now += round(seconds * 1_000_000)
