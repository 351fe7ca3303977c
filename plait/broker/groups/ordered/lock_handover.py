"""Grants and releases the locks of an ordered group, and limits the sequence up to which each owner gets rows.

``Locks`` decides. This module records the decisions as events, and splits and joins cursors so that each owner has its
own cursors.
"""

from __future__ import annotations

import msgspec
import numpy as np

from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.ordered.cursor_set import CursorSet
from plait.broker.groups.ordered.in_flight import InFlightRows
from plait.broker.groups.ordered.locks import NONE, Locks, Want, epochs_of
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import ZEROS, LpNumbers, LpSet, lp_set, runs_of
from plait.storage.logs.action_events import Locked


class LockHandover(msgspec.Struct, eq=False):
    """Grants and releases the locks of one ordered group."""

    _group: Group
    _cursors: CursorSet
    _locks: Locks
    _in_flight: InFlightRows
    #: Consumer id → the sequence up to which it wants rows of each logical partition; 0: no limit.
    wanted_until: dict[int, LpNumbers] = {}
    #: On the monotonic clock. After a restart no new lock is granted before this time (R15).
    frozen_until: float = 0.0

    def lease(self, consumer: AttachedConsumer, wants: list[Want], now: float) -> None:
        """Set the locks that a consumer wants; grant and release locks accordingly."""
        self._locks.confirm(consumer.id)
        if self._locks.wants(consumer.id, epochs_of((first, end, epoch) for first, end, epoch, _ in wants)):
            self._split_leaving()
        self._set_wanted_until(consumer.id, [(first, end, until) for first, end, _, until in wants])
        self.transfer(now)
        self._in_flight.trim(self._cursors.holding(consumer.id))
        self._limit(consumer.id)

    def notify(self, owner: int) -> None:
        """End the suspended pulls of an owner whose locks changed, so that it asks for its locks."""
        for consumer in self._group.consumers.values():
            if consumer.id == owner:
                consumer.news += 1
                for waiter in [each for each in self._group.waiters if each.consumer is consumer]:
                    waiter.time_out()

    def drained(self, wants: list[Want]) -> LpSet:
        """The LPs that a consumer wants up to a sequence and that are finished up to it; parked keys do not count."""
        done = np.zeros(LOGICAL_PARTITIONS, bool)
        if not any(limit for _, _, _, limit in wants):
            return done
        until = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, _, limit in wants:
            until[first:end] = limit
        for cursor in self._cursors:
            if cursor.key is None:
                done |= cursor.lps & (until > 0) & (until <= cursor.floor)
        for cursor in self._cursors.by_key.values():
            if not cursor.parked:
                done &= ~cursor.lps | (until <= cursor.floor)
        return done

    def sealed_unfinished(self) -> LpSet:
        """Sealed LPs that still have unfinished rows. Consumers that know them as drained must consume them again.

        A drained LP has unfinished rows again when a dead letter is resent, or when a crash loses events.
        """
        found = np.zeros(LOGICAL_PARTITIONS, bool)
        fences = self._group.partition.fences
        if fences is not None:
            for cursor in self._cursors:
                if not cursor.parked:
                    found |= cursor.lps & (fences > cursor.floor)
        return found

    def _split_leaving(self) -> None:
        """Split off LPs that are to change their owner and find their held rows, so that each LP can move by itself."""
        leaving = self._locks.leaving
        owners = set(np.unique(self._locks.owner[leaving]).tolist())
        for cursor in list(self._cursors):
            if cursor.owner not in owners:
                continue
            lps = cursor.lps & leaving
            if lps.any() and not np.array_equal(lps, cursor.lps):
                self._cursors.split(cursor, lps)
        for cursor in self._cursors:
            cursor.leaving = cursor.owner in owners and bool((cursor.lps & leaving).any())
        self._in_flight.look_up_held()

    def transfer(self, now: float) -> None:
        """Release the locks of leaving LPs without held rows; grant free locks to the consumers that want them."""
        leaving = self._locks.leaving
        if leaving.any():
            busy = np.zeros(LOGICAL_PARTITIONS, bool)
            for cursor in self._cursors:
                busy |= cursor.busy
            self.release(runs_of(leaving & ~busy))
        grant = self._locks.to_grant
        if (
            grant is NONE
            or now < self.frozen_until
            or (floor := self._group.journal.floors.of(self._group.partition.row.subject, self._group.name)) is None
        ):
            return
        grant = grant & (self._locks.wanted >= floor.array())
        if grant.any():
            self._granted(self._locks.granted(grant))

    def release(self, runs: list[tuple[int, int]]) -> None:
        """Release the locks of these LPs."""
        if not runs:
            return
        lps = lp_set(runs)
        owners = np.unique(self._locks.owner[lps]).tolist()
        for first, end in runs:
            self._group.journal.event(self._group, Locked(0, first, end, lock_epoch=0))
        self._locks.set([(first, end, 0, 0) for first, end in runs])
        for cursor in self._cursors.take_out(lps):
            cursor.owner, cursor.leaving, cursor.limit = 0, False, 0
            cursor.drop()
        for owner in owners:
            self.notify(owner)

    def _granted(self, runs: list[tuple[int, int, int, int]]) -> None:
        for owner in {owner for _, _, owner, _ in runs}:
            mine = [(first, end, epoch) for first, end, each, epoch in runs if each == owner]
            for first, end, epoch in mine:
                self._group.journal.event(self._group, Locked(owner, first, end, epoch))
            for cursor in self._cursors.take_out(lp_set([(first, end) for first, end, _ in mine])):
                cursor.owner, cursor.leaving = owner, False
                self._in_flight.compact_returned(cursor)
            self._limit(owner)
            self._cursors.join_alike(self._cursors.of(owner))
            self.notify(owner)

    # --- limits of delivery ----------------------------------------------------------------------

    def _set_wanted_until(self, consumer: int, wants: list[tuple[int, int, int]]) -> None:
        """Record (first, end, until): the sequence up to which a consumer wants rows of logical partitions."""
        self.wanted_until[consumer] = ZEROS
        if any(until for _, _, until in wants):
            limits = np.zeros(LOGICAL_PARTITIONS, np.int64)
            for first, end, until in wants:
                limits[first:end] = until
            self.wanted_until[consumer] = LpNumbers.of(limits)

    def _limit(self, owner: int) -> None:
        """Set the limits of an owner's cursors to the sequences that it asked for."""
        wanted, mine = self.wanted_until.get(owner, ZEROS), self._cursors.of(owner)
        if not wanted.any() and not any(cursor.limit for cursor in mine):
            return
        limits = wanted.array()
        changed = np.zeros(LOGICAL_PARTITIONS, bool)
        for cursor in mine:
            changed |= cursor.lps & (limits != cursor.limit)
        for limit in np.unique(limits[changed]).tolist():
            for cursor in self._cursors.take_out(changed & (limits == limit)):
                cursor.limit = limit

    def reopened(self, lps: LpSet, sequence: int) -> None:
        """Record that the partition accepts rows of these logical partitions again, from ``sequence`` on.

        Owners that asked before have an older route. They get no rows from ``sequence`` on until they ask again.
        """
        if self._group.definition.affinity:
            return
        # 0 means no limit. -1 delivers nothing, which is right for a partition without rows.
        place = sequence or -1
        for owner, wanted in list(self.wanted_until.items()):
            limits = wanted.array()
            self.wanted_until[owner] = LpNumbers.of(
                np.where(lps & ((limits == 0) | (limits > sequence)), place, limits)
            )
            self._limit(owner)
