"""The meta servers of the cluster: each counts its heartbeats in the database and reads those of the others."""

from __future__ import annotations

from plait.meta.core import Core
from plait.meta.members.liveness import Liveness


class Peers:
    """The addresses of all meta servers that are alive."""

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
