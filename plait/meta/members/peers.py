"""The meta servers of the cluster: each counts its heartbeats in the database and reads those of the others."""

from __future__ import annotations

from plait.meta.core import Core
from plait.meta.members.liveness import Liveness

_PREFIX = "m/"
_PREFIX_END = "m0"


class Peers:
    """The addresses of all meta servers that are alive."""

    def __init__(self, core: Core, address: str) -> None:
        self._core = core
        #: The address of this meta server; "" if it has none.
        self._address = address
        self._watch = Liveness(core.limits.broker_lost_seconds)

    def watch(self, seconds: float) -> None:
        """Called every tick: write the own heartbeat, read the others'."""
        core = self._core
        if core.store.alone:
            return
        with core.noted():
            if self._address:
                core.store.add_heartbeats([_PREFIX + self._address])
            found = core.store.heartbeats(_PREFIX, _PREFIX_END, core.limits.page)
            for name, count in found:
                self._watch.expect(name)
                self._watch.observe(name, count)
            self._watch.advance(seconds)
            lost = self._watch.lost(core.limits.page)
            core.store.forget_heartbeats(lost)
        for name in lost:
            self._watch.forget(name)

    def addresses(self) -> list[str]:
        """The address of this meta server first, then the others."""
        others = sorted(name.removeprefix(_PREFIX) for name in self._watch if name != _PREFIX + self._address)
        return [self._address, *others] if self._address else others
