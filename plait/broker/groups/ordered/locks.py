"""The locks of an ordered group on one partition: which consumer owns which logical partitions (R14-R16).

A consumer owns a lock under the epoch of the meta server's allocation, and lower epochs are fenced out. A request with
a higher epoch does not take the lock from its owner: the lock is *leaving*. The broker notifies the owner and delivers
no new rows of the LP to it. When the owner holds no more rows of the LP, or its lease ends, the lock is released.

This module only decides. ``LockHandover`` records grants and releases as events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import ZEROS, LpNumbers, LpSet, runs_of, runs_with

#: An epoch for each logical partition; 0: none.
Epochs = npt.NDArray[np.int64]
#: Logical partitions [first, end) and an epoch.
Grant = tuple[int, int, int]
#: Logical partitions [first, end), an epoch, and the sequence up to which rows are wanted; 0: no limit.
Want = tuple[int, int, int, int]


#: None of the logical partitions.
NONE: LpSet = np.zeros(LOGICAL_PARTITIONS, bool)
NONE.setflags(write=False)


class LockState(NamedTuple):
    """The locks of one consumer."""

    owned: list[Grant]
    leaving: list[tuple[int, int]]
    #: Locks that it wants under too low an epoch, with the highest known epoch of each.
    refused: list[Grant]


def epochs_of(grants: Iterable[Grant]) -> Epochs:
    """The epoch of each requested logical partition. The request is not trusted."""
    epochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, epoch in grants:
        if not (0 <= first < end <= LOGICAL_PARTITIONS and 0 < epoch < 2**62):
            raise InvalidArgument(
                f"[{first}, {end}) under epoch {epoch} is not a run of logical partitions; use 0 <= first < end <= "
                f"{LOGICAL_PARTITIONS} and an epoch above 0"
            )
        epochs[first:end] = epoch
    return epochs


class Locks:
    """The locks of one group on one partition."""

    __slots__ = ("_epoch", "_leaving", "_owner", "_states", "_to_grant", "_top", "_top_by", "_wants", "unconfirmed")

    def __init__(self) -> None:
        self._owner = ZEROS
        self._epoch = ZEROS
        self._wants: dict[int, LpNumbers] = {}
        #: Owners from before a restart that have made no contact since: which rows they hold is not known.
        self.unconfirmed: frozenset[int] = frozenset()
        #: The highest epoch that is wanted for each LP, and the consumer that wants it.
        self._top = ZEROS
        self._top_by = ZEROS
        #: Cached results, cleared by every change.
        self._leaving: LpSet | None = None
        self._to_grant: LpSet | None = None
        self._states: dict[int, LockState] = {}

    def _changed(self) -> None:
        self._leaving = self._to_grant = None
        self._states.clear()

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The owner of each LP; 0: none."""
        return self._owner.array()

    @property
    def epoch(self) -> Epochs:
        """The highest epoch under which each LP was ever owned."""
        return self._epoch.array()

    @property
    def newest(self) -> int:
        """The highest epoch of all LPs."""
        return int(self._epoch.values.max())

    def had_by(self, consumer: int) -> bool:
        """Whether the consumer owns any lock."""
        return bool((self._owner.values == consumer).any())

    def confirm(self, consumer: int) -> None:
        """Record that the consumer made contact after a restart, so that the rows that it holds are known."""
        if consumer in self.unconfirmed:
            self.unconfirmed -= {consumer}
            self._changed()

    def keep(self, known: list[int]) -> None:
        """Release the locks of all but the known consumers, which have not made contact since the restart."""
        owner = self.owner
        owner[~np.isin(owner, known)] = 0
        self._owner = LpNumbers.of(owner)
        self.unconfirmed = frozenset(self._owner.values.tolist()) - {0}
        self._changed()

    def wants(self, consumer: int, epochs: Epochs) -> bool:
        """Replace the locks that a consumer wants. Returns whether that changes anything."""
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
        # Locks that it already owns continue under the new epoch.
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
        """Record that the consumer wants no locks."""
        self.wants(consumer, np.zeros(LOGICAL_PARTITIONS, np.int64))

    @property
    def leaving(self) -> LpSet:
        """The LPs whose owner is to release them: it does not want them, or another consumer wants a higher epoch."""
        if self._leaving is None:
            owner = self.owner
            owned = owner > 0
            if self.unconfirmed:
                owned &= ~np.isin(owner, list(self.unconfirmed))
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
        """The highest epoch that is wanted for each LP."""
        return self._top.array()

    @property
    def to_grant(self) -> LpSet:
        """The LPs that are free and wanted under an epoch that is not fenced out."""
        if self._to_grant is None:
            free = (self.owner == 0) & (self._top_by.array() > 0) & (self._top.array() >= self.epoch)
            self._to_grant = free if free.any() else NONE
        return self._to_grant

    def granted(self, lps: LpSet) -> list[tuple[int, int, int, int]]:
        """Grant these LPs to the consumer with the highest epoch; returns (first, end, consumer, epoch) runs."""
        top, top_by = self._top.array(), self._top_by.array()
        runs = []
        for consumer in np.unique(top_by[lps]).tolist():
            mine = lps & (top_by == consumer)
            runs += [(first, end, consumer, epoch) for first, end, epoch in runs_with(top, mine)]
        self.set(runs)
        return runs

    def set(self, runs: list[tuple[int, int, int, int]]) -> None:
        """Set the owners of (first, end, owner, epoch) runs; owner 0 releases the locks."""
        self._changed()
        owner, epochs = self.owner, self.epoch
        for first, end, consumer, epoch in runs:
            owner[first:end] = consumer
            epochs[first:end] = np.maximum(epochs[first:end], epoch)
        self._owner, self._epoch = LpNumbers.of(owner), LpNumbers.of(epochs)

    def state(self, consumer: int) -> LockState:
        """The locks of a consumer."""
        state = self._states.get(consumer)
        if state is None:
            state = self._states[consumer] = self._state_of(consumer)
        return state

    def _state_of(self, consumer: int) -> LockState:
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
        """For a checkpoint: (first, end, owner, epoch) of the LPs that were ever owned."""
        owners, epochs = self.owner, self.epoch
        had = epochs > 0
        runs = []
        for owner in np.unique(owners[had]).tolist():
            mine = had & (owners == owner)
            runs += [(first, end, owner, epoch) for first, end, epoch in runs_with(epochs, mine)]
        return runs


class LockFloors:
    """The lowest epochs under which a broker grants locks, by group (R15)."""

    def __init__(self) -> None:
        #: True once the meta server has sent the epochs of earlier grants. No lock is granted before that.
        self.awaited = False
        self._floors: dict[tuple[str, str], LpNumbers] = {}

    def of(self, subject: str, group: str) -> LpNumbers | None:
        """The lowest epochs of a group's locks; None: no lock is granted yet."""
        return None if self.awaited else self._floors.get((subject, group), ZEROS)

    def raise_to(self, floors: Mapping[tuple[str, str], Iterable[Grant]]) -> None:
        """Raise the floors of (subject, group) pairs to the epochs that the meta server sent."""
        for group, grants in floors.items():
            epochs = epochs_of(each for each in grants if each[2] > 0)
            self._floors[group] = LpNumbers.of(np.maximum(self._floors.get(group, ZEROS).array(), epochs))
        self.awaited = False
