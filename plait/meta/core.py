"""What all parts of the meta server share: the store, the mirror of it, the clock, and how a change is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

from plait.clock import Clock
from plait.errors import MetaBusy, MetaUnavailable
from plait.limits import MetaLimits
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.mirror import GroupKey, Mirror, Packed
from plait.meta.database.store import Store, StoreChange

_T = TypeVar("_T")

_NOTHING: Final[Mapping[GroupKey, Packed]] = {}


class Core:
    """One meta server's view of the database."""

    def __init__(self, store: Store, clock: Clock, limits: MetaLimits) -> None:
        self.store = store
        self.clock = clock
        self.limits = limits
        self.mirror = Mirror()
        #: The database did not answer; None: it did, when asked last.
        self.down: MetaUnavailable | None = None

    def noticeable(self, passed: float) -> float:
        """How much of that time somebody could have been noticed in.

        Longer than usual: this server stood still, or the database was down.
        """
        return min(max(passed, 0.0), self.limits.gap_seconds)

    def refresh(self, packed: Mapping[GroupKey, Packed] = _NOTHING) -> None:
        """Take in what others have changed."""
        with self.noted():
            news = self.store.news(self.mirror.seen)
            if news.number < self.mirror.seen:
                # The database is an older copy: what was given out since is not given out again.
                self.store.advance(self.mirror.seen)
                news = self.store.news(-1)
            self.mirror.take(news, packed)

    @contextmanager
    def change(self) -> Iterator[StoreChange]:
        """Write rows; the mirror has them afterwards. ``ConcurrentChange``: look again."""
        with self.noted(), self.store.change() as change:
            yield change
        self.take_in(change)

    def take_in(self, change: StoreChange, packed: Mapping[GroupKey, Packed] = _NOTHING) -> None:
        """It is in the database; the mirror has it afterwards, and what was packed for heartbeats before."""
        if self.mirror.follows(change):
            self.mirror.take_own(change, packed)
        else:
            self.refresh(packed)

    def decide(self, decision: Callable[[], _T]) -> _T:
        """Look, decide, and write; all over again when others were faster."""
        for _ in range(self.limits.attempts):
            self.refresh()
            try:
                return decision()
            except ConcurrentChange:
                continue
        raise MetaBusy(f"others changed the same thing {self.limits.attempts} times; ask again")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember whether the database answered."""
        try:
            yield
        except MetaUnavailable as error:
            self.down = error
            raise
        self.down = None
