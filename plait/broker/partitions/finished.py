"""Which sealed logical partitions of a partition each group has finished (R26).

The broker reports this to the meta servers, which store it. A consumer then need not ask a broker that has no rows for
its group, and a partition without rows leaves the route. The meta servers also remember which groups the partition had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plait.broker.groups.group import Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.partitions.partition import Partition
from plait.limits import REMEMBERED_GROUPS_MAX
from plait.model.logical_partitions import runs_with
from plait.storage.catalog import Fence

if TYPE_CHECKING:
    from plait.broker.broker import Broker


def passed(partition: Partition) -> dict[str, list[Fence]]:
    """Group → (first, end, fence) of the sealed logical partitions that it has finished.

    Groups that have finished none are included. Broadcasts are not: no later consumer asks for their progress.
    """
    if partition.fences is None:
        return {}
    groups = [group for group in partition.groups.values() if not group.definition.broadcast]
    return {group.name: _passed(group, partition.fences) for group in groups}


def began(partition: Partition) -> dict[str, int]:
    """Group → the version of the route at which it began, with broadcasts.

    If there are too many groups, only the newest are included, and broadcasts only if there is room left.
    """
    groups = sorted(
        (each.definition for each in partition.groups.values()), key=lambda each: (each.broadcast, -each.id)
    )
    return {each.name: each.began for each in groups[:REMEMBERED_GROUPS_MAX]}


def _passed(group: Group, fences: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Fence]:
    done = fences > 0
    if isinstance(group, OrderedGroup):
        for cursor in group.cursors:
            # A parked key waits here for an operator, and its rows in later partitions wait for it.
            done &= ~cursor.lps | ((fences <= cursor.floor) & (not cursor.parked))
    else:
        done &= fences <= group.floor
    return runs_with(fences, done)


def gone_below(broker: Broker, partition: Partition) -> int:
    """The sequence below which the partition has no rows and nothing that belongs to them.

    The meta server removes the spans below it from the route. -1: remove nothing. 0: the partition accepts no rows and
    never had one. A partition that is no longer in the route is dropped, so the result is also -1 while a partition
    that accepts no rows has anything left.
    """
    fences, accepts = partition.fences, partition.accepts
    if fences is None or accepts is None or (not accepts.any() and _holds(broker, partition)):
        return -1
    below = int(fences[fences <= min(partition.start, _retained_from(partition))].max(initial=0))
    return -1 if not below and accepts.any() else below


def _retained_from(partition: Partition) -> int:
    """The first row that an ordered group has not finished, even if retention removed it; else the next row.

    A failed message is retained, and rows of its key in other partitions wait for it. They would not wait if the route
    omitted that the key was here before, and no consumer would ask here for a dead letter that is resent.
    """
    first = partition.next
    for group in partition.groups.values():
        if isinstance(group, OrderedGroup):
            if group.failures.dead:
                first = min(first, group.failures.dead.first)
            for cursor in group.cursors:
                if cursor.parked and cursor.letter >= 0:
                    first = min(first, cursor.letter)
                elif cursor.parked or cursor.returned or cursor.waiting or cursor.held:
                    first = min(first, cursor.floor)
    return first


def _holds(broker: Broker, partition: Partition) -> bool:
    """Whether it has rows, delayed messages, forwards to other partitions, retained rows, dead letters or stages."""
    name = partition.row.name
    schedule = broker.schedules.by_subject.get(name)
    return (
        partition.start < partition.next
        or (schedule is not None and broker.schedules.waits(schedule))
        or any(each.start < each.next for each in broker.forwards.of(name))
        or any(group.retained or group.failures.dead for group in partition.groups.values())
        or broker.stages.any_for(name)
    )
