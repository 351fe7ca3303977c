"""Who may handle which logical partitions of an ordered group on this partition (R14-R16).

A lock is one consumer's, under the epoch that the meta server's allocation gave it; lower epochs are fenced out. While
it has an owner, somebody with a higher epoch only makes it *leave*: the owner is told, gets nothing new of it, and when
nothing of it is in its hands any more, or its lease is over, it passes on.

Decisions only: what is granted and given up becomes events where these are asked for (``OrderedGroup``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import InvalidArgument
from plait.frame.lp import LpSet, runs_of, runs_with
from plait.limits import LOGICAL_PARTITIONS

#: An epoch for each logical partition; 0: none.
Epochs = npt.NDArray[np.int64]
#: Logical partitions [first, end) and an epoch.
Grant = tuple[int, int, int]
#: The same, and the sequence up to which they are wanted; 0: all that there will be.
Want = tuple[int, int, int, int]


NO_EPOCHS: Epochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
NO_EPOCHS.setflags(write=False)


class Standing(NamedTuple):
    """What a consumer has of what it wants."""

    owned: list[Grant]
    leaving: list[tuple[int, int]]
    #: Somebody has been there with this epoch or a higher one.
    refused: list[Grant]


def epochs_of(grants: Iterable[Grant]) -> Epochs:
    """The epoch of each logical partition that is asked for, by somebody who may say anything."""
    epochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, epoch in grants:
        if not (0 <= first < end <= LOGICAL_PARTITIONS and 0 < epoch < 2**62):
            raise InvalidArgument(f"[{first}, {end}) under epoch {epoch} is not a run of logical partitions")
        epochs[first:end] = epoch
    return epochs


class Locks:
    """The locks of one group on one partition."""

    def __init__(self) -> None:
        #: The consumer that has each; 0: nobody.
        self.owner = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: The highest epoch under which each was ever had.
        self.epoch: Epochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
        self._wants: dict[int, Epochs] = {}
        #: Who had locks before a restart and was not heard from since: what is in their hands is not known.
        self.unheard: set[int] = set()
        #: The highest epoch that is wanted for each, and by whom.
        self._top = np.zeros(LOGICAL_PARTITIONS, np.int64)
        self._top_by = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: What was worked out and has not changed since: it is asked for again and again.
        self._leaving: LpSet | None = None
        self._standings: dict[int, Standing] = {}

    def _changed(self) -> None:
        self._leaving = None
        self._standings.clear()

    @property
    def newest(self) -> int:
        """The highest epoch of all."""
        return int(self.epoch.max())

    def had_by(self, consumer: int) -> bool:
        """The consumer has any."""
        return bool((self.owner == consumer).any())

    def heard(self, consumer: int) -> None:
        """What is in its hands is known."""
        if consumer in self.unheard:
            self.unheard.discard(consumer)
            self._changed()

    def keep(self, known: list[int]) -> None:
        """After a start: locks of all others are free, and these have not been heard from."""
        self.owner[~np.isin(self.owner, known)] = 0
        self.unheard = set(np.unique(self.owner).tolist()) - {0}
        self._changed()

    def wants(self, consumer: int, epochs: Epochs) -> bool:
        """All that a consumer wants from now on; whether that is anything new."""
        known = self._wants.get(consumer)
        if known is not None and np.array_equal(known, epochs):
            return False
        self._changed()
        if epochs.any():
            self._wants[consumer] = epochs
        else:
            self._wants.pop(consumer, None)
        lost = (self._top_by == consumer) & (epochs < self._top)
        higher = epochs > self._top
        self._top[higher], self._top_by[higher] = epochs[higher], consumer
        if lost.any():
            self._look_again(lost)
        # Its own lock goes on under the new epoch.
        mine = (self.owner == consumer) & (epochs > self.epoch)
        self.epoch[mine] = epochs[mine]
        return True

    def _look_again(self, lps: LpSet) -> None:
        self._top[lps] = self._top_by[lps] = 0
        for consumer, epochs in self._wants.items():
            higher = lps & (epochs > self._top)
            self._top[higher], self._top_by[higher] = epochs[higher], consumer

    def forget(self, consumer: int) -> None:
        """It wants nothing any more."""
        self.wants(consumer, np.zeros(LOGICAL_PARTITIONS, np.int64))

    @property
    def leaving(self) -> LpSet:
        """Those whose owner is to give them up: it does not want them, or somebody has a higher epoch."""
        if self._leaving is None:
            owned = self.owner > 0
            if self.unheard:
                owned &= ~np.isin(self.owner, list(self.unheard))
            others = owned & (self._top_by != self.owner)
            self._leaving = others & ((self._top > self.epoch) | ~self._wanted_by_owner()) if others.any() else others
        return self._leaving

    def _wanted_by_owner(self) -> LpSet:
        wanted = np.zeros(LOGICAL_PARTITIONS, bool)
        for consumer, epochs in self._wants.items():
            wanted |= (self.owner == consumer) & (epochs > 0)
        return wanted

    @property
    def wanted(self) -> Epochs:
        """The highest epoch that is wanted for each."""
        return self._top

    @property
    def to_grant(self) -> LpSet:
        """Those that are free, and wanted by somebody who is not too late."""
        free: LpSet = (self.owner == 0) & (self._top_by > 0) & (self._top >= self.epoch)
        return free

    def granted(self, lps: LpSet) -> list[tuple[int, int, int, int]]:
        """Give these, which are to be granted, to who wants them most: (first, end, consumer, epoch) of each run."""
        runs = []
        for consumer in np.unique(self._top_by[lps]).tolist():
            mine = lps & (self._top_by == consumer)
            runs += [(first, end, consumer, epoch) for first, end, epoch in runs_with(self._top, mine)]
        for first, end, consumer, epoch in runs:
            self.set(first, end, consumer, epoch)
        return runs

    def set(self, first: int, end: int, consumer: int, epoch: int) -> None:
        """As an event says it."""
        self._changed()
        self.owner[first:end] = consumer
        self.epoch[first:end] = np.maximum(self.epoch[first:end], epoch)

    def standing(self, consumer: int) -> Standing:
        """What it has."""
        standing = self._standings.get(consumer)
        if standing is None:
            standing = self._standings[consumer] = self._standing(consumer)
        return standing

    def _standing(self, consumer: int) -> Standing:
        mine = self.owner == consumer
        leaving = mine & self.leaving
        epochs = self._wants.get(consumer)
        refused: list[Grant] = []
        if epochs is not None:
            late = (epochs > 0) & ~mine & ((epochs < self.epoch) | (epochs < self._top))
            late |= (epochs > 0) & ~mine & (epochs == self.epoch) & (self.owner > 0)
            refused = runs_with(np.maximum(self.epoch, self._top), late)
        return Standing(runs_with(self.epoch, mine & ~leaving), runs_of(leaving), refused)

    def dump(self) -> list[tuple[int, int, int, int]]:
        """For a checkpoint: (first, end, owner, epoch) of those that were ever had."""
        had = self.epoch > 0
        runs = []
        for owner in np.unique(self.owner[had]).tolist():
            mine = had & (self.owner == owner)
            runs += [(first, end, owner, epoch) for first, end, epoch in runs_with(self.epoch, mine)]
        return runs
