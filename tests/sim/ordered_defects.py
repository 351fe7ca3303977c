"""Defects of ordered delivery. Tests patch them into Plait's classes, and the simulated cluster must find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from plait.broker.groups.group import AttachedConsumer
from plait.broker.groups.ordered.failure_policy import FailurePolicy
from plait.broker.groups.ordered.lock_handover import LockHandover
from plait.broker.groups.ordered.locks import LockFloors, Locks
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.forwards import Forwards
from plait.client.consume.ordered import ordered_fetcher
from plait.client.consume.ordered.ordered_buffer import HandedOutRows, OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import LockRights, OrderedDelivered, no_lps
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.client.consume.ordered.wanted_locks import WantedLocks
from plait.client.send.partition_sender import PartitionSender
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members import allocation
from plait.meta.members import allocator as allocating
from plait.model.logical_partitions import LpNumbers, lp_set
from plait.storage.cursor import Cursor, CursorState
from plait.storage.ranges import Ranges

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]

# --- routes -------------------------------------------------------------------------------------


def take_rows_behind_the_fence(patch: Patch) -> None:
    """R5: a partition still accepts rows of a sealed logical partition from producers with an old route."""
    patch.setattr(Partition, "takes", lambda self, frame: True)


def deliver_behind_the_fence(patch: Patch) -> None:
    """R25: a delayed row enters the partition where it waited, even if that partition no longer accepts its key."""
    patch.setattr(Forwards, "split", lambda self, target, hashes, numbers: [(target, np.arange(len(numbers)))])


def ask_brokers_that_hold_nothing(patch: Patch) -> None:
    """R26: only the broker, which may be switched off, knows what a group has finished."""
    patch.setattr(ordered_fetcher, "with_passed", lambda route, group, reports: list(reports))


def report_drained_too_early(patch: Patch) -> None:
    """R4: the broker reports a span as drained too early."""

    def naive(self: LockHandover, wants: list[tuple[int, int, int, int]]) -> Any:
        return lp_set([(first, end) for first, end, _, until in wants if until])

    patch.setattr(LockHandover, "drained", naive)


def ask_the_newest_span_first(patch: Patch) -> None:
    """R4: consumers pull from the newest span while older spans still have rows."""

    def naive(route: Any, mine: Any, _: Any) -> list[WantedLocks]:
        chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
        for first, end, spans in route.histories:
            chosen[spans[-1].partition].lps[first:end] |= mine[first:end]
        return chosen

    patch.setattr(ordered_fetcher, "wanted", naive)


def ask_all_spans_at_once(patch: Patch) -> None:
    """R4: consumers pull from all spans of a logical partition at once."""

    def naive(route: Any, mine: Any, _: Any) -> list[WantedLocks]:
        chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
        for first, end, spans in route.histories:
            for span in spans:
                chosen[span.partition].lps[first:end] |= mine[first:end]
        return chosen

    patch.setattr(ordered_fetcher, "wanted", naive)


def overtake_rows_that_are_sent_again(patch: Patch) -> None:
    """R8: rows that a changed route refused are resent in any order."""
    take_back = PartitionSender.take_back
    patch.setattr(PartitionSender, "take_back", lambda self: take_back(self)[::-1])


def deliver_rows_from_after_a_round_trip(patch: Patch) -> None:
    """R4: a pull from before a round trip of the route is answered with rows from after it."""
    granted = LockHandover._granted

    def naive(self: LockHandover, runs: list[tuple[int, int, int, int]]) -> None:
        granted(self, runs)
        for cursor in self._cursors.take_out(lp_set([(first, end) for first, end, _, _ in runs])):
            cursor.limit = 0

    patch.setattr(LockHandover, "reopened", lambda self, lps, sequence: None)
    patch.setattr(LockHandover, "_granted", naive)


# --- locks --------------------------------------------------------------------------------------


def use_an_epoch_again(patch: Patch) -> None:
    """A logical partition keeps its epoch when its owner changes."""

    def naive(members: Any, present: allocation.Allocation, *, above: int) -> allocation.Allocation:
        after = allocation.allocate(members, present, above=above)
        return allocation.Allocation(after.members, after.owners, present.epochs, present.epoch)

    patch.setattr(allocating, "allocate", naive)


def hand_over_too_early(patch: Patch) -> None:
    """A lock gets a new owner while the old one has rows in flight."""
    transfer = LockHandover.transfer

    def naive(self: LockHandover, now: float) -> None:
        for cursor in self._cursors:
            if cursor.leaving:
                for piece in cursor.all_held():
                    self._in_flight.return_piece(cursor, piece, 0, counted=False)
                cursor.held = {}
        transfer(self, now)

    patch.setattr(LockHandover, "transfer", naive)


def accept_a_lower_epoch(patch: Patch) -> None:
    """The last consumer to request a lock gets it, whatever its epoch."""
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
    """R14: a consumer hands out rows after its lease has expired."""
    patch.setattr(LockRights, "valid", lambda self: True)


def handle_rows_of_lost_locks(patch: Patch) -> None:
    """A consumer handles the rows it received even after it lost their lock."""
    patch.setattr(OrderedPullClient, "_drop_unstarted", lambda self, link: None)
    patch.setattr(LockRights, "valid", lambda self: True)
    patch.setattr(OrderedBuffer, "take_back", lambda self, partition=None, lps=None: [])
    patch.setattr(OrderedDelivered, "may_begin", lambda self, rows: True)


def grant_right_after_a_start(patch: Patch) -> None:
    """R15: a broker grants locks right after a start, before it knows which rows consumers hold."""
    keep = Locks.keep

    def naive(self: Locks, known: list[int]) -> None:
        keep(self, known)
        self.unconfirmed = set()

    patch.setattr(Locks, "keep", naive)
    patch.setattr(LockHandover, "frozen_until", property(lambda self: 0.0, lambda self, _: None))
    patch.setattr(LockFloors, "awaited", property(lambda self: False, lambda self, _: None), raising=False)


# --- rows ---------------------------------------------------------------------------------------


def count_rows_of_a_lost_owner_as_done(patch: Patch) -> None:
    """Rows that a lost consumer held are not delivered again."""
    offline = OrderedGroup.offline

    def naive(self: OrderedGroup, consumer: AttachedConsumer, now: int) -> int:
        for cursor in self.cursors.holding(consumer.id):
            cursor.held = {}
        return offline(self, consumer, now)

    patch.setattr(OrderedGroup, "offline", naive)


def lose_returned_rows_when_a_cursor_is_split(patch: Patch) -> None:
    """Returned rows are forgotten when their logical partition changes owners."""
    split = Cursor.split

    def naive(self: Cursor, number: int, lps: Any, key: int | None = None) -> Cursor:
        part = split(self, number, lps, key)
        part.returned = Ranges()
        return part

    patch.setattr(Cursor, "split", naive)


def let_a_failed_row_be_overtaken(patch: Patch) -> None:
    """A failed message of a strict subject does not hold back its key."""
    patch.setattr(FailurePolicy, "strict", property(lambda self: False))


def hand_out_a_key_twice_at_a_time(patch: Patch) -> None:
    """Two messages of a key are handed to the user at once."""
    patch.setattr(HandedOutRows, "has_key", lambda self, key: False)


def forget_held_rows_at_a_checkpoint(patch: Patch) -> None:
    """Rows in flight at a checkpoint count as done after a start from it."""
    dump = Cursor.dump

    def naive(self: Cursor, *, durable_holds: bool) -> CursorState:
        held, self.held = self.held, {}
        try:
            return dump(self, durable_holds=durable_holds)
        finally:
            self.held = held

    patch.setattr(Cursor, "dump", naive)


def settle_rows_of_other_tags(patch: Patch) -> None:
    """An ack of a range acks every row in it that the consumer holds, including rows of other deliveries."""
    ack = OrderedGroup.ack

    def naive(self: OrderedGroup, consumer: AttachedConsumer, ranges: list[Any], tags: Sequence[int] = ()) -> None:
        held = {*tags, *(each for cursor in self.cursors for each in cursor.held)}
        for tag in sorted(held):
            ack(self, consumer, ranges, [tag] * len(ranges))

    patch.setattr(OrderedGroup, "ack", naive)
