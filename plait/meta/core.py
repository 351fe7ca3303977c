"""Shared by all parts of the meta server: the store, its mirror, the clock, and how a change is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from plait.clock import Clock
from plait.errors import MetaBusy, MetaUnavailable
from plait.limits import MetaLimits
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.mirror import GroupKey, Mirror, Packed
from plait.meta.database.store import Store, StoreChange

log = logging.getLogger("plait.meta")

_T = TypeVar("_T")
_P = ParamSpec("_P")
_S = TypeVar("_S", bound="_HasCore")

_NOTHING: Final[Mapping[GroupKey, Packed]] = {}


class _HasCore(Protocol):
    _core: Core


def decided(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """A method that is a decision: it runs with a refreshed mirror, and again after a conflict (``Core.decide``)."""

    @wraps(method)
    def decide(self: _S, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        return self._core.decide(lambda: method(self, *arguments, **named))

    return decide


class Core:
    """One meta server's view of the database."""

    def __init__(self, store: Store, clock: Clock, limits: MetaLimits) -> None:
        self.store = store
        self.clock = clock
        self.limits = limits
        self.mirror = Mirror()
        #: The error of the last database call; None if it succeeded.
        self.down: MetaUnavailable | None = None

    def noticeable(self, passed: float) -> float:
        """The part of a period that counts as silence of brokers and clients: at most ``gap_seconds``.

        During a longer period this server was stopped or the database was down, and heartbeats could not be seen.
        """
        return min(max(passed, 0.0), self.limits.gap_seconds)

    def refresh(self, packed: Mapping[GroupKey, Packed] = _NOTHING) -> None:
        """Apply the changes of other meta servers to the mirror."""
        with self.noted():
            news = self.store.news(self.mirror.seen)
            if news.number < self.mirror.seen:
                # The database was restored from an older copy: numbers issued since then must not be issued again.
                self.store.advance(self.mirror.seen)
                news = self.store.news(-1)
            self.mirror.take(news, packed)

    def refresh_if_up(self) -> None:
        if self.down is None:
            try:
                self.refresh()
            except MetaUnavailable as error:
                log.warning("the meta database is down, replies have the last known routes: %s", error)

    @contextmanager
    def change(self) -> Iterator[StoreChange]:
        """Write rows and apply them to the mirror. Raises ``ConcurrentChange`` on a conflict."""
        with self.noted(), self.store.change() as change:
            yield change
        self.take_in(change)

    def take_in(self, change: StoreChange, packed: Mapping[GroupKey, Packed] = _NOTHING) -> None:
        """Apply a committed change, and shares packed for it, to the mirror."""
        if self.mirror.follows(change):
            self.mirror.take_own(change, packed)
        else:
            self.refresh(packed)

    def decide(self, decision: Callable[[], _T]) -> _T:
        """Refresh the mirror and run ``decision``; repeat both after a conflict, up to ``attempts`` times."""
        for _ in range(self.limits.attempts):
            self.refresh()
            try:
                return decision()
            except ConcurrentChange:
                continue
        raise MetaBusy(f"{self.limits.attempts} attempts conflicted with changes of other meta servers; try again")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record in ``down`` whether the database is available."""
        try:
            yield
        except MetaUnavailable as error:
            self.down = error
            raise
        self.down = None
