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
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, runs_of, runs_with
from plait.model.lp_numbers import ZEROS, LpNumbers

#: An epoch for each logical partition; 0: none.
Epochs = npt.NDArray[np.int64]
#: Logical partitions [first, end) and an epoch.
Grant = tuple[int, int, int]
#: The same, and the sequence up to which they are wanted; 0: all that there will be.
Want = tuple[int, int, int, int]


#: None of the logical partitions.
NONE: LpSet = np.zeros(LOGICAL_PARTITIONS, bool)
NONE.setflags(write=False)


class LockState(NamedTuple):
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

    __slots__ = ("_epoch", "_leaving", "_owner", "_standings", "_to_grant", "_top", "_top_by", "_wants", "unheard")

    def __init__(self) -> None:
        self._owner = ZEROS
        self._epoch = ZEROS
        self._wants: dict[int, LpNumbers] = {}
        #: Who had locks before a restart and was not heard from since: what is in their hands is not known.
        self.unheard: frozenset[int] = frozenset()
        #: The highest epoch that is wanted for each, and by whom.
        self._top = ZEROS
        self._top_by = ZEROS
        #: What was worked out and has not changed since: it is asked for again and again.
        self._leaving: LpSet | None = None
        self._to_grant: LpSet | None = None
        self._standings: dict[int, LockState] = {}

    def _changed(self) -> None:
        self._leaving = self._to_grant = None
        self._standings.clear()

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The consumer that has each; 0: nobody."""
        return self._owner.array()

    @property
    def epoch(self) -> Epochs:
        """The highest epoch under which each was ever had."""
        return self._epoch.array()

    @property
    def newest(self) -> int:
        """The highest epoch of all."""
        return int(self._epoch.values.max())

    def had_by(self, consumer: int) -> bool:
        """The consumer has any."""
        return bool((self._owner.values == consumer).any())

    def heard(self, consumer: int) -> None:
        """What is in its hands is known."""
        if consumer in self.unheard:
            self.unheard -= {consumer}
            self._changed()

    def keep(self, known: list[int]) -> None:
        """After a start: locks of all others are free, and these have not been heard from."""
        owner = self.owner
        owner[~np.isin(owner, known)] = 0
        self._owner = LpNumbers.of(owner)
        self.unheard = frozenset(self._owner.values.tolist()) - {0}
        self._changed()

    def wants(self, consumer: int, epochs: Epochs) -> bool:
        """All that a consumer wants from now on; whether that is anything new."""
        wanted = LpNumbers.of(epochs)
        known = self._wants.get(consumer)
        if known is not None and known.same(wanted):
            return False
        self._changed()
        if wanted.any():
            self._wants[consumer] = wanted
        else:
            self._wants.pop(consumer, None)
        top, top_by = self._top.array(), self._top_by.array()
        lost = (top_by == consumer) & (epochs < top)
        higher = epochs > top
        top[higher], top_by[higher] = epochs[higher], consumer
        if lost.any():
            self._look_again(lost, top, top_by)
        self._top, self._top_by = LpNumbers.of(top), LpNumbers.of(top_by)
        # Its own lock goes on under the new epoch.
        if self.had_by(consumer):
            epoch = self.epoch
            self._epoch = LpNumbers.of(np.where(self.owner == consumer, np.maximum(epochs, epoch), epoch))
        return True

    def _look_again(self, lps: LpSet, top: Epochs, top_by: npt.NDArray[np.int64]) -> None:
        top[lps] = top_by[lps] = 0
        for consumer, wanted in self._wants.items():
            epochs = wanted.array()
            higher = lps & (epochs > top)
            top[higher], top_by[higher] = epochs[higher], consumer

    def forget(self, consumer: int) -> None:
        """It wants nothing any more."""
        self.wants(consumer, np.zeros(LOGICAL_PARTITIONS, np.int64))

    @property
    def leaving(self) -> LpSet:
        """Those whose owner is to give them up: it does not want them, or somebody has a higher epoch."""
        if self._leaving is None:
            owner = self.owner
            owned = owner > 0
            if self.unheard:
                owned &= ~np.isin(owner, list(self.unheard))
            others = owned & (self._top_by.array() != owner)
            self._leaving = NONE
            if others.any():
                self._leaving = others & ((self._top.array() > self.epoch) | ~self._wanted_by_owner(owner))
        return self._leaving

    def _wanted_by_owner(self, owner: npt.NDArray[np.int64]) -> LpSet:
        wanted = np.zeros(LOGICAL_PARTITIONS, bool)
        for consumer, epochs in self._wants.items():
            wanted |= (owner == consumer) & (epochs.array() > 0)
        return wanted

    @property
    def wanted(self) -> Epochs:
        """The highest epoch that is wanted for each."""
        return self._top.array()

    @property
    def to_grant(self) -> LpSet:
        """Those that are free, and wanted by somebody who is not too late."""
        if self._to_grant is None:
            free = (self.owner == 0) & (self._top_by.array() > 0) & (self._top.array() >= self.epoch)
            self._to_grant = free if free.any() else NONE
        return self._to_grant

    def granted(self, lps: LpSet) -> list[tuple[int, int, int, int]]:
        """Give these, which are to be granted, to who wants them most: (first, end, consumer, epoch) of each run."""
        top, top_by = self._top.array(), self._top_by.array()
        runs = []
        for consumer in np.unique(top_by[lps]).tolist():
            mine = lps & (top_by == consumer)
            runs += [(first, end, consumer, epoch) for first, end, epoch in runs_with(top, mine)]
        self._set(runs)
        return runs

    def set(self, first: int, end: int, consumer: int, epoch: int) -> None:
        """As an event says it."""
        self._set([(first, end, consumer, epoch)])

    def give_up(self, runs: list[tuple[int, int]]) -> None:
        """These are nobody's any more."""
        self._set([(first, end, 0, 0) for first, end in runs])

    def _set(self, runs: list[tuple[int, int, int, int]]) -> None:
        self._changed()
        owner, epochs = self.owner, self.epoch
        for first, end, consumer, epoch in runs:
            owner[first:end] = consumer
            epochs[first:end] = np.maximum(epochs[first:end], epoch)
        self._owner, self._epoch = LpNumbers.of(owner), LpNumbers.of(epochs)

    def standing(self, consumer: int) -> LockState:
        """What it has."""
        standing = self._standings.get(consumer)
        if standing is None:
            standing = self._standings[consumer] = self._standing(consumer)
        return standing

    def _standing(self, consumer: int) -> LockState:
        owner, epoch = self.owner, self.epoch
        mine = owner == consumer
        leaving = mine & self.leaving
        wanted = self._wants.get(consumer)
        refused: list[Grant] = []
        if wanted is not None:
            epochs, top = wanted.array(), self._top.array()
            late = (epochs > 0) & ~mine & ((epochs < epoch) | (epochs < top))
            late |= (epochs > 0) & ~mine & (epochs == epoch) & (owner > 0)
            refused = runs_with(np.maximum(epoch, top), late)
        return LockState(runs_with(epoch, mine & ~leaving), runs_of(leaving), refused)

    def dump(self) -> list[tuple[int, int, int, int]]:
        """For a checkpoint: (first, end, owner, epoch) of those that were ever had."""
        owners, epochs = self.owner, self.epoch
        had = epochs > 0
        runs = []
        for owner in np.unique(owners[had]).tolist():
            mine = had & (owners == owner)
            runs += [(first, end, owner, epoch) for first, end, epoch in runs_with(epochs, mine)]
        return runs
