"""The meta servers themselves: each counts its own heartbeats in the database, and sees the others' there."""

from __future__ import annotations

from plait.meta.core import Core
from plait.meta.members.liveness import Liveness

_PREFIX = "m/"
_PREFIX_END = "m0"


class Peers:
    """The addresses of all meta servers that live."""

    def __init__(self, core: Core, address: str) -> None:
        self._core = core
        #: Where this one is reached; "": nowhere.
        self._address = address
        self._watch = Liveness(core.limits.broker_lost_seconds)

    def watch(self, seconds: float) -> None:
        """Time has passed."""
        core = self._core
        if core.store.alone:
            return
        with core.noted():
            if self._address:
                core.store.beat([_PREFIX + self._address])
            found = core.store.beats(_PREFIX, _PREFIX_END, core.limits.page)
            for who, count in found:
                self._watch.expect(who)
                self._watch.see(who, count)
            self._watch.advance(seconds)
            lost = self._watch.lost(core.limits.page)
            core.store.forget_beats(lost)
        for who in lost:
            self._watch.forget(who)

    def addresses(self) -> list[str]:
        """This one's first, then the others'."""
        others = sorted(who.removeprefix(_PREFIX) for who in self._watch if who != _PREFIX + self._address)
        return [self._address, *others] if self._address else others
