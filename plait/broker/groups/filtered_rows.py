"""Delivers the rows of a shared group that match its filter. Rows that the filter leaves out are done.

A filter applies to rows that no consumer has begun: new rows, and rows that were returned before their first attempt.
The events of a pull are in the order of their sequences: a crash between two of them loses no row, and it delivers no
row that was left out.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.waking import wake_group
from plait.broker.partitions.partition import Delivery
from plait.filter.message_filter import Examined
from plait.frame.builder import Buffer
from plait.frame.slicing import slice_mask, slice_rows
from plait.frame.view import FrameView
from plait.storage.logs.action_events import Filtered
from plait.storage.logs.retained_log import rows_of
from plait.storage.ranges import Range, joined

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import SharedGroup

#: The most separate ranges that one pull delivers of the rows that match.
RUNS_MAX = 4_096


def take_matching(
    group: SharedGroup, consumer: AttachedConsumer, place: tuple[int, int], count: int, size: int, delivery: Delivery
) -> bool:
    """Deliver the rows in the range ``place`` that match. Returns False when the pull is to end.

    No row of the range was begun. The log has all of its rows that can be read.
    """
    start, end = place
    examined = start
    runs_left = ranges_left(group, consumer, delivery)
    for first, last, frame in group.partition.walk(group.journal.message_log, start, end):
        if not may_scan(group):
            _leave_out(group, start, examined)
            return False
        if frame is None:
            _leave_out(group, start, first)
            group.skip(first, last)
            start = examined = last
            continue
        matching = examine(group, frame, first - frame.base)
        all_examined, last = frame.base + matching.last >= last, min(last, frame.base + matching.last)
        rows = np.flatnonzero(matching.mask[: last - first])[: count - delivery.count]
        runs = joined(rows + first)[:runs_left]
        if runs:
            rows = rows[: np.searchsorted(rows, runs[-1][1] - first)]
            piece = _cut(frame, rows + (first - frame.base))
            weight = sum(map(len, piece)) + frame.inflated_size
            if delivery.count and delivery.weight + weight > size:
                _leave_out(group, start, first)
                return False
            _add(delivery, piece, len(rows), weight, frame)
        for low, high in runs:
            _leave_out(group, start, low)
            group.record(consumer, low, high, 1)
            delivery.ranges.append((low, high, 1))
            start = high
        runs_left -= len(runs)
        if delivery.count >= count or runs_left <= 0 or (delivery.count and delivery.weight >= size):
            return False
        examined = last
        if not all_examined:
            # The budget has no room for the rest of the frame.
            break
    _leave_out(group, start, examined)
    return examined == end or may_scan(group)


def examine(group: Group, frame: FrameView, first: int) -> Examined:
    """Which rows of a frame from ``first`` on match the group's filter; the rest is examined in a later turn."""
    assert group.wanted is not None
    found = group.partition.keys.matching(frame, group.wanted, first, group.journal.scans.budget)
    if found.last < frame.count:
        may_scan(group)
    return found


def may_scan(group: Group) -> bool:
    """Whether the filter may examine a frame in this turn. If not, suspended pulls are served in a later turn."""
    scans = group.journal.scans
    if scans.budget.has_room():
        return True
    scans.later(group, partial(wake_group, group))
    return False


def match_scattered(
    group: SharedGroup, frame: FrameView, heads: list[Range]
) -> tuple[list[Range], npt.NDArray[np.bool_]]:
    """The parts of returned ranges of a frame that match, and a mask of their rows. The other rows are done.

    Examines what the budget has room for; the ranges behind it are left as they are. Raises ``FrameError`` if the frame
    is damaged.
    """
    matching = examine(group, frame.verify(), rows_of(frame, *heads[0][:2])[0])
    mask, sequences = matching.whole(frame.count), frame.sequences()
    examined = int(sequences[matching.last]) if matching.last < frame.count else frame.end
    chosen = np.zeros(frame.count, bool)
    parts: list[Range] = []
    for start, end, attempt in heads:
        end = min(end, examined)
        if start >= end:
            break
        first, last = rows_of(frame, start, end)
        chosen[first:last] = mask[first:last]
        for low, high in joined(sequences[first:last][mask[first:last]]):
            _leave_out(group, start, low)
            parts.append(Range(low, high, attempt))
            start = high
        _leave_out(group, start, end)
    return parts, chosen


def ranges_left(group: SharedGroup, consumer: AttachedConsumer, delivery: Delivery) -> int:
    """How many separate ranges a pull of the consumer may get."""
    held = group.cursor.held.get(consumer.id)
    room = group.limits.consumer_ranges - (0 if held is None else held.length)
    return max(min(RUNS_MAX - len(delivery.ranges), room), 1)


def _leave_out(group: SharedGroup, start: int, end: int) -> None:
    """Record that rows which no consumer has begun do not match: they are done."""
    if start < end:
        event = Filtered(0, start, end, rows=end - start)
        group.journal.event(group, event)
        group.replay(event, 0)


def _cut(frame: FrameView, rows: npt.NDArray[np.int64]) -> list[Buffer]:
    """Rows of a frame, given by their indexes, as a frame."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if len(rows) == frame.count:
        return [frame.buffer]
    if last - first == len(rows):
        return slice_rows(frame, first, last).parts
    mask = np.zeros(frame.count, bool)
    mask[rows] = True
    return slice_mask(frame, mask).parts


def _add(delivery: Delivery, parts: list[Buffer], count: int, weight: int, frame: FrameView) -> None:
    delivery.parts.extend(parts)
    delivery.count += count
    delivery.size += weight - frame.inflated_size
    delivery.weight += weight
