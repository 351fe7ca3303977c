"""Delivers the rows of a shared group: returned rows before new ones, to any consumer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from plait.broker.groups.group import AttachedConsumer
from plait.broker.partitions.partition import Delivery
from plait.broker.partitions.suspended import Waiter
from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.slicing import slice_mask
from plait.frame.view import FrameView
from plait.storage.logs.retained_log import rows_of
from plait.storage.ranges import Range

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import SharedGroup

#: Pieces of returned ranges that one pull collects at most: bounds its work where returned ranges are scattered.
PIECES_MAX = 64

#: Returned ranges within one frame that one pull collects at most; they cost less.
APART_MAX = 4_096


class SharedDelivery:
    """Chooses and reads the rows that a pull of a shared group gets."""

    __slots__ = ("_group", "_once")

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        #: True if the group is at-most-once: it verifies rows at the first delivery, as there is no second one.
        self._once = group.definition.delivery == "at_most_once"

    def take(self, consumer: AttachedConsumer, count: int, size: int) -> Delivery | None:
        """Rows for a consumer, which then holds them; None: there are none."""
        group = self._group
        cursor, partition = group.cursor, group.partition
        if not (cursor.returned.length or cursor.waiting.length or cursor.next < partition.visible):
            return None
        log, delivery = group.journal.message_log, Delivery()
        if partition.log_start != log.start:
            partition.expire_deleted(log)
        while len(delivery.ranges) < PIECES_MAX:
            if delivery.count >= count or (delivery.count and delivery.weight >= size):
                break
            if cursor.returned.length or (cursor.waiting.length and cursor.ready):
                start, end, attempt = cursor.returned.head()
                frame = self._frame_apart(start)
                if frame is not None:
                    gathered = self._take_apart(frame, consumer, count, size, delivery)
                    if gathered:
                        continue
                    if gathered is None:
                        break
            elif cursor.next < partition.visible and not self._at_limit(consumer):
                start, end, attempt = cursor.next, partition.visible, 0
            else:
                break
            if start < partition.start:
                end = min(partition.start, max(end, start + 1))
                # Retained rows are delivered when their turn comes.
                group.skip(start, group.retained.elsewhere_after(start, end) if cursor.returned else end)
                continue
            if start >= partition.visible or start >= end:
                break
            again = attempt > 0 or self._once
            # The first frame is delivered whatever its size; later ones must fit the size limit.
            some = not delivery.count
            room = size - delivery.weight
            batch = partition.read(log, start, end, count - delivery.count, room, some=some, again=again)
            if batch.full and not batch.count:
                break
            if not batch.ranges:
                # A gap left by damage, or unreadable rows.
                group.skip(start, batch.end)
                continue
            if batch.ranges[0][0] > start:
                group.skip(start, batch.ranges[0][0])
            for first, last in batch.ranges:
                group.record(consumer, first, last, attempt + 1)
                delivery.ranges.append((first, last, attempt + 1))
                if attempt:
                    group.redelivered_count += last - first
            for first, last in batch.damaged:
                group.skip(first, last)
            delivery.parts.extend(batch.parts)
            delivery.count += batch.count
            delivery.size += batch.size
            delivery.weight += batch.size + batch.inflated
            if batch.end < end:
                # The room is used up. Another read would return one frame whatever its size.
                break
        return delivery if delivery.count else None

    def _frame_apart(self, sequence: int) -> FrameView | None:
        """The frame of a returned row, if its returned rows may be scattered or are in the retained log; else None."""
        group = self._group
        if self._once:
            return None
        if sequence in group.retained.offsets:
            return group.frame_of(sequence)
        return (
            group.partition.whole_frame(group.journal.message_log, sequence)
            if group.cursor.returned.length > 1
            else None
        )

    def _take_apart(
        self, frame: FrameView, consumer: AttachedConsumer, count: int, size: int, delivery: Delivery
    ) -> bool | None:
        """Deliver scattered returned rows of one frame as one piece.

        Returns None if the piece does not fit, False if the rows are not scattered or the frame is damaged.
        """
        group, room = self._group, count - delivery.count
        heads: list[Range] = []
        rows = 0
        mask = np.zeros(frame.count, bool)
        for start, end, attempt in group.cursor.returned.heads(frame.end, min(room, APART_MAX)):
            # All rows of a piece have the same attempt.
            if rows >= room or (heads and attempt != heads[0].attempt):
                break
            first, last = rows_of(frame, start, min(end, start + room - rows))
            if first == last:
                break
            mask[first:last] = True
            heads.append(Range(start, start + last - first, attempt))
            rows += last - first
            if heads[-1].end < end:
                break
        if not heads or (len(heads) < 2 and not frame.has(Column.SELECTION)):
            return False
        try:
            piece = slice_mask(frame, mask)
        except FrameError:
            # ``Partition.read`` deals with damage.
            return False
        if delivery.count and delivery.weight + piece.size + frame.inflated_size > size:
            return None
        for start, end, attempt in heads:
            group.record(consumer, start, end, attempt + 1)
            delivery.ranges.append((start, end, attempt + 1))
        if heads[0].attempt:
            group.redelivered_count += rows
        delivery.parts.extend(piece.parts)
        delivery.count += rows
        delivery.size += piece.size
        delivery.weight += piece.size + frame.inflated_size
        return True

    def _at_limit(self, consumer: AttachedConsumer) -> bool:
        group = self._group
        limits, held = group.limits, group.cursor.held.get(consumer.id)
        return (
            (held is not None and held.length >= limits.consumer_ranges)
            or group.cursor.waiting.length >= limits.retry_ranges
            or len(group.retained.offsets) >= limits.retained_messages
        )

    def serve(self, send: Callable[[Waiter, Delivery], None]) -> None:
        """Answer suspended pulls, the longest waiting first, until there are no more rows or pulls."""
        passed, waiters = 0, self._group.waiters
        while passed < len(waiters):
            waiter = next(islice(waiters, passed, None))
            delivery = self.take(waiter.consumer, waiter.count, waiter.size)
            if delivery is not None:
                waiter.leave()
                send(waiter, delivery)
            elif self._at_limit(waiter.consumer):
                # This consumer is at its limit; there may be rows for others.
                passed += 1
            else:
                return
