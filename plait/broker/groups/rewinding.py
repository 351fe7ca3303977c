"""Rewinds groups, and computes before what a rewind changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from plait.broker.broker import Broker
from plait.broker.groups.group import Group
from plait.broker.groups.group_settings import resolve_start
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.ordered.row_reader import LAG_COUNTED_MAX, RowCounter
from plait.broker.partitions.partition import Partition
from plait.errors import GroupBusy
from plait.frame.header import SEQUENCE_MAX
from plait.storage.cursor import Cursor
from plait.storage.ranges import Range, count_of
from plait.storage.shared_cursor import SharedCursor
from plait.wire.admin.rewinds import PartitionRewind

#: Counts the rows of a cursor in [start, end) ranges.
Count = Callable[[Cursor, Iterable[Sequence[int]]], int]


def rewind(
    broker: Broker, group: Group, start: Any, *, skipping: bool = False, preview: bool = False
) -> PartitionRewind:
    """Deliver every row from ``start`` on to a group without connected consumers, whether it is done or not.

    ``skipping``: rows before ``start`` are not delivered any more; else those that are not done still are. ``preview``
    changes nothing. Returns what changes.
    """
    _refuse_leased(group, broker.clock.monotonic())
    found = changes(group, start, skipping, broker.config.group)
    if not preview:
        broker.turn.refuse_when_stalled()
        group.rewind(found.position, skipping=skipping)
        broker.expect_retry(group)
    return found


def _refuse_leased(group: Group, now: float) -> None:
    """``GroupBusy`` while a consumer without a connection may still handle rows under its locks (R14)."""
    if not isinstance(group, OrderedGroup):
        return
    for consumer in group.consumers.values():
        if group.locks.had_by(consumer.id) and consumer.leased_until > now:
            subject = group.partition.row.subject
            raise GroupBusy(
                f"consumer {consumer.client!r} of group {group.name!r} of {subject!r} is not connected, but may "
                f"handle messages until its lease ends in {consumer.leased_until - now:.1f} s; try again then",
                subject=subject,
                group=group.name,
                consumers=1,
            )


def changes(group: Group, start: Any, skipping: bool, broker_group: str) -> PartitionRewind:
    """What moving the group to ``start`` changes."""
    partition, dead = group.partition, group.failures.dead
    # After a start from an older checkpoint the partition may not know yet what retention removed.
    partition.expire_deleted(group.journal.message_log)
    to = resolve_start(partition, start)
    counter: RowCounter | None = None
    count: Count = _length
    parked: list[Cursor] = []
    if isinstance(group, OrderedGroup):
        counter = RowCounter(partition, group.reader, LAG_COUNTED_MAX)
        count, parked = counter.count, group.policy.parked()
    cursors = list(group.positions.values())
    before = max(cursor.next for cursor in cursors)
    again = unfinished = below = held = waiting = 0
    for cursor in cursors:
        pieces = cursor.begun(0, cursor.next)
        if isinstance(cursor, SharedCursor):
            pieces += cursor.passed.overlap(0, cursor.next)
        held += count(cursor, cursor.all_held())
        waiting += cursor.waiting.count
        again += count(cursor, [(to, cursor.next)])
        unfinished += count(cursor, _from(pieces, to))
        below += count(cursor, [*_below(pieces, to), (cursor.next, to)])
    dead_again = count_of(dead.overlap(to, SEQUENCE_MAX))
    skipped = below if skipping else 0
    first, last = _between(partition, group.floor if skipped else to, before, to)
    gone, at_most = _gone(partition, start)
    return PartitionRewind(
        f"{partition.row.name}@{broker_group}",
        before,
        to,
        again,
        max(again - unfinished - dead_again, 0),
        below - skipped,
        skipped,
        held,
        waiting,
        dead_again,
        dead.count - dead_again,
        len(parked) if skipping else sum(cursor.letter >= to for cursor in parked),
        gone,
        at_most,
        first if again or skipped else None,
        last if again or skipped else None,
        counter is not None and not counter.exact,
    )


def _length(_: Cursor, ranges: Iterable[Sequence[int]]) -> int:
    return sum(max(each[1] - each[0], 0) for each in ranges)


def _from(pieces: list[Range], to: int) -> list[tuple[int, int]]:
    return [(max(start, to), end) for start, end, _ in pieces if end > to]


def _below(pieces: list[Range], to: int) -> list[tuple[int, int]]:
    return [(start, min(end, to)) for start, end, _ in pieces if start < to]


def _between(partition: Partition, floor: int, before: int, to: int) -> tuple[int | None, int | None]:
    """When the first and the last row were stored whose delivery a move from ``before`` to ``to`` changes."""
    low, high = max(min(floor, to), partition.start), max(before, to if floor < to else before)
    log = partition.consume_log
    if low >= high or not len(log):
        return None, None
    first, last = (min(log.find(sequence), len(log) - 1) for sequence in (low, high - 1))
    return log.record(first).time, log.record(last).time


def _gone(partition: Partition, start: Any) -> tuple[int, bool]:
    """How many of the messages that ``start`` asks for are removed, and whether the number is an upper bound."""
    match start:
        case "earliest":
            return partition.start, False
        case ["sequence", int(sequence)]:
            return max(partition.start - sequence, 0), False
        case ["time", int(time)]:
            head = partition.head
            # The store times of removed messages are not known.
            older = head is None or time < head.time
            return (partition.start, True) if older and partition.start else (0, False)
    return 0, False
