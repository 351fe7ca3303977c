"""Ways to get ordered messages wrong, each put back into the shipped classes: the simulated cluster must notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from plait.broker.groups.lease_grants import LeaseGrants
from plait.broker.groups.locks import Locks
from plait.broker.groups.ordered_group import OrderedGroup
from plait.broker.groups.shared_group import AttachedConsumer
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.forwards import Forwards
from plait.client.consume.ordered import ordered_consumer
from plait.client.consume.ordered.lock_rights import LockRights, no_lps
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.client.consume.ordered.wanted_locks import WantedLocks
from plait.client.send.partition_queue import PartitionQueue
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members import allocation
from plait.meta.members import allocator as allocating
from plait.model.logical_partitions import lp_set
from plait.model.lp_numbers import LpNumbers
from plait.storage.cursor import Cursor, CursorState
from plait.storage.ranges import Ranges

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]

# --- routes -------------------------------------------------------------------------------------


def take_rows_behind_the_fence(patch: Patch) -> None:
    """R5: a sealed logical partition still takes rows of producers with an old route."""
    patch.setattr(Partition, "takes", lambda self, frame: True)


def deliver_behind_the_fence(patch: Patch) -> None:
    """R25: a delayed row enters the partition that it waited at, whether that still takes its key or not."""
    patch.setattr(Forwards, "ways", lambda self, target, hashes, numbers: [(target, np.arange(len(numbers)))])


def ask_brokers_that_hold_nothing(patch: Patch) -> None:
    """R26: what a group has finished is known to the broker alone, which may be switched off."""
    patch.setattr(ordered_consumer, "with_passed", lambda route, group, reports: list(reports))


def report_drained_too_early(patch: Patch) -> None:
    """R4: a span counts as done before it is."""

    def naive(self: OrderedGroup, wants: list[tuple[int, int, int, int]]) -> Any:
        return lp_set([(first, end) for first, end, _, until in wants if until])

    patch.setattr(OrderedGroup, "drained", naive)


def ask_the_newest_span_first(patch: Patch) -> None:
    """R4: consumers go where the rows are sent now, whatever is left where they were before."""

    def naive(route: Any, mine: Any, _: Any) -> list[WantedLocks]:
        chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
        for first, end, spans in route.histories:
            chosen[spans[-1].partition].lps[first:end] |= mine[first:end]
        return chosen

    patch.setattr(ordered_consumer, "wanted", naive)


def ask_all_spans_at_once(patch: Patch) -> None:
    """R4: all that a logical partition has is pulled at once, from wherever it is."""

    def naive(route: Any, mine: Any, _: Any) -> list[WantedLocks]:
        chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
        for first, end, spans in route.histories:
            for span in spans:
                chosen[span.partition].lps[first:end] |= mine[first:end]
        return chosen

    patch.setattr(ordered_consumer, "wanted", naive)


def overtake_rows_that_are_sent_again(patch: Patch) -> None:
    """R8: what a changed route takes back is sent again in any order."""
    take_back = PartitionQueue.take_back
    patch.setattr(PartitionQueue, "take_back", lambda self: take_back(self)[::-1])


def hand_out_what_came_after_a_way_back(patch: Patch) -> None:
    """R4: who asked before a route led elsewhere and back is handed what came after that, and what is between later."""
    granted = OrderedGroup._granted

    def naive(self: OrderedGroup, runs: list[tuple[int, int, int, int]], journal: Any) -> None:
        granted(self, runs, journal)
        for strand in self.strands.take_out(lp_set([(first, end) for first, end, _, _ in runs])):
            strand.limit = 0

    patch.setattr(OrderedGroup, "reopened", lambda self, lps, sequence: None)
    patch.setattr(OrderedGroup, "_granted", naive)


# --- locks --------------------------------------------------------------------------------------


def use_an_epoch_again(patch: Patch) -> None:
    """What changes hands keeps its epoch."""

    def naive(members: Any, present: allocation.Allocation, *, above: int) -> allocation.Allocation:
        after = allocation.allocate(members, present, above=above)
        return allocation.Allocation(after.members, after.owners, present.epochs, present.epoch)

    patch.setattr(allocating, "allocate", naive)


def hand_over_too_early(patch: Patch) -> None:
    """A lock passes on though its owner has rows in its hands."""
    pass_on = OrderedGroup.pass_on

    def naive(self: OrderedGroup, journal: Any, now: float) -> None:
        for strand in self.strands:
            if strand.leaving:
                for piece in strand.all_held():
                    self._give_back(strand, piece, 0, journal, counted=False)
                strand.held = {}
        pass_on(self, journal, now)

    patch.setattr(OrderedGroup, "pass_on", naive)


def accept_a_lower_epoch(patch: Patch) -> None:
    """Whoever asks last gets the lock, however old what it was told."""
    wants = Locks.wants

    def naive(self: Locks, consumer: int, epochs: Any) -> bool:
        changed = wants(self, consumer, epochs)
        asked = epochs > 0
        self._top = LpNumbers.of(np.where(asked, epochs, self._top.array()))
        self._top_by = LpNumbers.of(np.where(asked, consumer, self._top_by.array()))
        self._changed()
        return changed

    patch.setattr(Locks, "wants", naive)
    patch.setattr(Locks, "to_grant", property(lambda self: (self.owner == 0) & (self._top_by.array() > 0)))
    patch.setattr(
        Locks,
        "leaving",
        property(lambda self: (self.owner > 0) & (self._top_by.array() > 0) & (self._top_by.array() != self.owner)),
    )


def ignore_the_lease(patch: Patch) -> None:
    """R14: a consumer hands out what it has, however long ago the broker was heard."""
    patch.setattr(LockRights, "valid", lambda self: True)


def keep_what_is_not_ours_any_more(patch: Patch) -> None:
    """What a consumer has got it handles, whoever has the lock by then."""
    patch.setattr(OrderedPullClient, "_drop_unstarted", lambda self, link, loop: None)
    patch.setattr(LockRights, "valid", lambda self: True)
    patch.setattr(OrderedBuffer, "take_back", lambda self, partition=None, lps=None: [])
    patch.setattr(OrderedDelivered, "may_begin", lambda self, rows: True)


def grant_right_after_a_start(patch: Patch) -> None:
    """R15: a broker that has just started knows of nothing in anybody's hands, and passes on what is asked for."""
    keep = Locks.keep

    def naive(self: Locks, known: list[int]) -> None:
        keep(self, known)
        self.unheard = set()

    patch.setattr(Locks, "keep", naive)
    patch.setattr(OrderedGroup, "frozen_until", property(lambda self: 0.0, lambda self, _: None))
    patch.setattr(LeaseGrants, "waits_for_floors", property(lambda self: False, lambda self, _: None), raising=False)


# --- rows ---------------------------------------------------------------------------------------


def take_rows_of_a_lost_owner_for_done(patch: Patch) -> None:
    """What a lost consumer had in its hands is not handed out again."""
    offline = OrderedGroup.offline

    def naive(self: OrderedGroup, consumer: AttachedConsumer, journal: Any, now: int) -> int:
        for strand in self._holding(consumer.id):
            strand.held = {}
        return offline(self, consumer, journal, now)

    patch.setattr(OrderedGroup, "offline", naive)


def lose_returned_rows_when_a_strand_is_split(patch: Patch) -> None:
    """Rows that came back are forgotten when their logical partition changes hands."""
    split = Cursor.split

    def naive(self: Cursor, number: int, lps: Any, key: int | None = None) -> Cursor:
        part = split(self, number, lps, key)
        part.returned = Ranges()
        return part

    patch.setattr(Cursor, "split", naive)


def let_a_failed_row_be_overtaken(patch: Patch) -> None:
    """A failed message of a strict subject does not hold its key."""
    patch.setattr(OrderedGroup, "strict", property(lambda self: False))


def hand_out_a_key_twice_at_a_time(patch: Patch) -> None:
    """Two messages of a key are in the user's hands at once."""
    patch.setattr(OrderedBuffer, "_is_busy", lambda self, key: False)


def forget_rows_in_hands_at_a_checkpoint(patch: Patch) -> None:
    """What is in hands when a checkpoint is made counts as done by who starts from it."""
    dump = Cursor.dump

    def naive(self: Cursor) -> CursorState:
        held, self.held = self.held, {}
        try:
            return dump(self)
        finally:
            self.held = held

    patch.setattr(Cursor, "dump", naive)


def settle_rows_of_other_tags(patch: Patch) -> None:
    """An ack settles all that its consumer has between two rows, whatever it was handed out with."""
    ack = OrderedGroup.ack

    def naive(
        self: OrderedGroup, consumer: AttachedConsumer, ranges: list[Any], journal: Any, tags: Sequence[int] = ()
    ) -> int:
        held = {*tags, *(each for strand in self.strands for each in strand.held)}
        return sum(ack(self, consumer, ranges, journal, [tag] * len(ranges)) for tag in sorted(held))

    patch.setattr(OrderedGroup, "ack", naive)
