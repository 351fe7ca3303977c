"""Liveness of brokers, clients and meta servers, measured on the watcher's own clock.

Clocks of two machines are never compared. A name is alive if the watcher received a heartbeat of it, or saw its
heartbeat counter change, within the last lease; otherwise it is lost. Only time in which the watcher could see
heartbeats is counted, so no name is lost while the watcher is stopped or cannot reach its database.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from plait.meta.core import Core
from plait.meta.database.store import StoreChange


class Liveness:
    """Watched names of one kind and the time of the last sign of life of each.

    The heartbeats that this watcher receives are counted in the database for the watchers of other meta servers.
    """

    def __init__(self, core: Core, kind: str, lost_seconds: float) -> None:
        self._core = core
        #: The prefix of the names in the database, and the end of such names.
        self._prefix, self._end = f"{kind}/", f"{kind}0"
        self._lost_seconds = lost_seconds
        #: Seconds in which the watcher could see heartbeats.
        self._now = 0.0
        #: Name → time of its last sign of life, the longest silent first.
        self._noticed: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        #: How often the watcher itself raised a counter since it last read it.
        self._raised: dict[str, int] = {}
        self._certain: set[str] = set()
        #: Names with heartbeats that are not yet written to the database.
        self._unwritten: dict[str, None] = {}
        #: Counters of the names after this one are still to be read in this round.
        self._reading = ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._noticed)

    def __contains__(self, name: str) -> bool:
        return name in self._noticed

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def expect(self, name: str) -> None:
        """Watch a name that should be alive: it has a whole lease to show a sign of life."""
        if name not in self._noticed:
            self._noticed[name] = self._now

    def notice(self, name: str, ago: float = 0.0) -> None:
        """Record a heartbeat, ``ago`` seconds old.

        Heartbeats come in order of time, and none is older than the last ``advance``.
        """
        self._see(name, ago)
        self._unwritten[name] = None

    def _see(self, name: str, ago: float = 0.0) -> None:
        self._noticed.pop(name, None)
        self._noticed[name] = self._now - ago
        self._certain.add(name)

    def exchange(self, *, expect: bool = False) -> bool:
        """Write one page of counters and read one, with other meta servers. Returns True if there are more.

        A counter that changed otherwise than by this watcher is a sign of life. ``expect``: watch every name read.
        """
        store, page = self._core.store, self._core.limits.page
        unwritten = list(self._unwritten)[:page]
        with self._core.noted():
            store.add_heartbeats([self._prefix + name for name in unwritten])
            for name in unwritten:
                self._raised[name] = self._raised.get(name, 0) + 1
            found = store.heartbeats(self._prefix + self._reading, self._end, page)
        for name in unwritten:
            del self._unwritten[name]
        names = [key.removeprefix(self._prefix) for key, _ in found]
        for name, (_, count) in zip(names, found, strict=True):
            if expect:
                self.expect(name)
            if name in self._noticed:
                before = self._count(name)
                self._counts[name] = count
                self._raised.pop(name, None)
                if before is not None and before != count:
                    self._see(name)
        if len(found) == page:
            self._reading = names[-1]
        elif not self._unwritten:
            self._reading = ""
            return False
        return True

    def revived(self, change: StoreChange, names: Sequence[str]) -> set[str]:
        """Those of the names whose counter another meta server has raised, as ``change`` reads it."""
        counts = change.heartbeats([self._prefix + name for name in names])
        found = {name for name in names if counts.get(self._prefix + name) != self._count(name)}
        for name in found:
            self._see(name)
        return found

    def _count(self, name: str) -> int | None:
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
        silent = takewhile(lambda entry: self._now - entry[1] >= self._lost_seconds, self._noticed.items())
        return [name for name, _ in islice(silent, limit)]

    @property
    def next_loss(self) -> float:
        """Seconds of further silence until the next name is lost."""
        for noticed in self._noticed.values():
            return max(noticed + self._lost_seconds - self._now, 0.0)
        return math.inf

    def forget(self, names: Sequence[str]) -> None:
        """Stop watching names and delete their counters."""
        for name in names:
            self._noticed.pop(name, None)
            self._counts.pop(name, None)
            self._raised.pop(name, None)
            self._unwritten.pop(name, None)
            self._certain.discard(name)
        if not self._core.store.alone:
            with self._core.noted():
                self._core.store.forget_heartbeats([self._prefix + name for name in names])


class Peers:
    """The addresses of all meta servers that are alive. Each counts its own heartbeats in the database."""

    def __init__(self, core: Core, address: str) -> None:
        self._core = core
        #: The address of this meta server; "" if it has none.
        self._address = address
        self._watch = Liveness(core, "m", core.limits.broker_lost_seconds)

    def watch(self, seconds: float) -> None:
        """Called every tick: write the own heartbeat, read the others'."""
        core = self._core
        if core.store.alone:
            return
        if self._address:
            self._watch.notice(self._address)
        while self._watch.exchange(expect=True):
            pass
        self._watch.advance(seconds)
        self._watch.forget(self._watch.lost(core.limits.page))

    def addresses(self) -> list[str]:
        """The address of this meta server first, then the others."""
        others = sorted(name for name in self._watch if name != self._address)
        return [self._address, *others] if self._address else others
