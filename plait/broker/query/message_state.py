"""``state_of``: where a stored message is for a group now, from the group's cursors."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from plait.broker.broker import Broker
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.filter.frame_fields import UsedFields
from plait.storage.cursor import Cursor
from plait.storage.ranges import Ranges, count_of
from plait.wire.admin.why import MessageState


class RowKey(NamedTuple):
    """The logical partition and the key hash of a row; ``key`` is None if the row has no key."""

    lp: int
    key: int | None


def key_of(broker: Broker, group: Group, sequence: int) -> RowKey | None:
    """The key of a stored row; None: the row cannot be read."""
    partition = group.partition
    for first, _, frame in partition.walk(broker.message_log, sequence, sequence + 1):
        if frame is not None and first == sequence:
            lps, hashes = partition.keys.of(frame)
            row = sequence - frame.base
            return RowKey(int(lps[row]), None if hashes is None else int(hashes[row]))
    return None


def cursor_of(group: Group, row: RowKey | None) -> Cursor | None:
    """The cursor that a row belongs to; None: unknown, because the row cannot be read."""
    if not isinstance(group, OrderedGroup):
        return next(iter(group.positions.values()))
    return None if row is None else group.cursors.for_row(row.lp, row.key)


def state_of(broker: Broker, group: Group, sequence: int, row: RowKey | None) -> MessageState:
    """Where the row is now, without its history."""
    partition, definition = group.partition, group.definition
    online = sum(consumer.connected for consumer in group.consumers.values())
    used = UsedFields() if group.wanted is None else group.wanted.used
    found = MessageState(
        "done",
        definition.delivery,
        definition.ordered,
        definition.broadcast,
        online=online,
        filter=definition.filter,
        filter_headers=sorted(used.headers),
        filter_tags=used.tags,
        filter_key=used.key,
        paused=group.paused,
    )

    def state(name: str, **fields: int | str | bool) -> MessageState:
        return msgspec.structs.replace(found, state=name, **fields)

    partition.expire_deleted(broker.message_log)
    if sequence >= partition.visible:
        return state("invisible")
    if dead := group.failures.dead.overlap(sequence, sequence + 1):
        return state("dead", attempt=dead[0].attempt)
    cursor = cursor_of(group, row)
    if cursor is None:
        return state("removed")
    for holder, ranges in cursor.held.items():
        if piece := ranges.overlap(sequence, sequence + 1):
            number = cursor.owner if definition.ordered else holder
            clients = [consumer.client for consumer in group.consumers.values() if consumer.id == number]
            return state("held", client="".join(clients), attempt=piece[0].attempt)
    again = cursor.returned.overlap(sequence, sequence + 1) or cursor.waiting.overlap(sequence, sequence + 1)
    if again or sequence >= cursor.next:
        if cursor.parked and cursor.letter != sequence:
            return state("parked", blocker=cursor.letter)
        for due, pieces in cursor.waiting:
            if any(piece.start <= sequence < piece.end for piece in pieces):
                return state("retry", due=due, attempt=again[0].attempt)
        if cursor.key is not None and cursor.floor < sequence:
            # A key with its own cursor gets no later rows before its delivered rows are done.
            return state("behind", blocker=cursor.floor)
        if again:
            return state("returned", attempt=again[0].attempt)
    passed = cursor.passed or Ranges()
    if sequence >= cursor.next or passed.overlap(sequence, sequence + 1):
        before = count_of(passed.overlap(0, sequence)) + max(sequence - cursor.next, 0)
        return state("next", ahead=before, overtaken=sequence < cursor.next)
    return state("removed" if sequence < partition.start else "before" if sequence < definition.start else "done")
