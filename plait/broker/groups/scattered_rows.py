"""Delivers rows that are scattered in a frame, or that only the retained log has, as one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plait.broker.groups.filtered_rows import match_scattered, may_scan
from plait.broker.groups.group import AttachedConsumer
from plait.broker.partitions.partition import Delivery
from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.slicing import slice_mask
from plait.storage.logs.retained_log import rows_of
from plait.storage.ranges import Range, Ranges

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import SharedGroup

#: Ranges within one frame that one pull collects at most; they cost less than ranges of several frames.
APART_MAX = 4_096


def take_scattered(
    group: SharedGroup, consumer: AttachedConsumer, source: Ranges, count: int, size: int, delivery: Delivery
) -> bool | None:
    """Deliver the rows of ``source`` in the frame of its first row.

    Returns None if the piece does not fit, False if the rows are not scattered or the frame cannot be read.
    """
    frame, room = group.frame_of(source.first), count - delivery.count
    if frame is None:
        return False
    heads: list[Range] = []
    rows = 0
    mask = np.zeros(frame.count, bool)
    for start, end, attempt in source.heads(frame.end, min(room, APART_MAX)):
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
        if group.wanted is not None and not heads[0].attempt:
            if not may_scan(group):
                return None
            heads, mask = match_scattered(group, frame, heads)
            if not heads:
                return True
            rows = int(mask.sum())
        piece = slice_mask(frame, mask)
    except FrameError:
        # ``Partition.read`` deals with damage.
        return False
    weight = piece.size + frame.inflated_size
    if delivery.count and delivery.weight + weight > size:
        return None
    for start, end, attempt in heads:
        group.record(consumer, start, end, attempt + 1)
        delivery.ranges.append((start, end, attempt + 1))
    if heads[0].attempt:
        group.redelivered_count += rows
    delivery.parts.extend(piece.parts)
    delivery.count += rows
    delivery.size += piece.size
    delivery.weight += weight
    return True
