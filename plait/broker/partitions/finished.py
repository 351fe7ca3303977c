"""What the groups of a partition have passed of the logical partitions that it takes no more (R26).

A broker reports it to the meta servers, who keep it: a consumer then needs no answer from a broker that holds nothing
for its group, and a partition whose rows are gone leaves the route. That it knew its groups is remembered there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plait.broker.groups.ordered_group import OrderedGroup
from plait.broker.groups.shared_group import Group
from plait.broker.partitions.partition import Partition
from plait.limits import REMEMBERED_GROUPS_MAX
from plait.model.logical_partitions import runs_with
from plait.storage.catalog import Fence

if TYPE_CHECKING:
    from plait.broker.broker import Broker


def passed(partition: Partition) -> dict[str, list[Fence]]:
    """Group → (first, end, fence) of the logical partitions that end here and that it is done with.

    Groups that are not done with any are in it too. A broadcast has no successor that would ask.
    """
    if partition.fences is None:
        return {}
    groups = [group for group in partition.groups.values() if not group.definition.broadcast]
    return {group.name: _passed(group, partition.fences) for group in groups}


def began(partition: Partition) -> dict[str, int]:
    """Group → the version of the route that it began with; broadcasts too.

    Where there are too many to be remembered: the newest, and broadcasts last.
    """
    groups = sorted(
        (each.definition for each in partition.groups.values()), key=lambda each: (each.broadcast, -each.id)
    )
    return {each.name: each.began for each in groups[:REMEMBERED_GROUPS_MAX]}


def _passed(group: Group, fences: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Fence]:
    done = fences > 0
    if isinstance(group, OrderedGroup):
        for strand in group.strands:
            # A parked key waits here for a decision, and its successors with it.
            done &= ~strand.lps | ((fences <= strand.floor) & (not strand.parked))
    else:
        done &= fences <= group.floor
    return runs_with(fences, done)


def gone_below(broker: Broker, partition: Partition) -> int:
    """Rows below this are gone from the partition, as is all that belongs to them; -1: a route leaves out nothing.

    0: it takes nothing and never had a row. A route without the rows' spans may have no place for the
    partition any more, which is then dropped. So it is -1 as well while anything else waits in a partition that takes
    nothing.
    """
    fences, accepts = partition.fences, partition.accepts
    if fences is None or accepts is None or (not accepts.any() and _holds(broker, partition)):
        return -1
    below = int(fences[fences <= min(partition.start, _kept_from(partition))].max(initial=0))
    return -1 if not below and accepts.any() else below


def _kept_from(partition: Partition) -> int:
    """The first row that an ordered group has not finished though retention took it; the next row: there is none.

    A message that failed is kept beyond retention, and its key's rows in other partitions wait for it. They would
    not if the route left out that the key was here before; nor would a consumer ask here for a dead letter that is
    sent again.
    """
    kept = partition.next
    for group in partition.groups.values():
        if isinstance(group, OrderedGroup):
            if group.pull_log.dead:
                kept = min(kept, group.pull_log.dead.first)
            for strand in group.strands:
                if strand.parked and strand.letter >= 0:
                    kept = min(kept, strand.letter)
                elif strand.parked or strand.returned or strand.waiting or strand.held:
                    kept = min(kept, strand.floor)
    return kept


def _holds(broker: Broker, partition: Partition) -> bool:
    """It has rows, delayed messages, messages on their way to other partitions, dead letters or staged rows."""
    name = partition.row.name
    schedule = broker.schedules.by_subject.get(name)
    return (
        partition.start < partition.next
        or (schedule is not None and broker.schedules.waits(schedule))
        or any(each.start < each.next for each in broker.forwards.of(name))
        or any(group.kept or group.pull_log.dead for group in partition.groups.values())
        or broker.stages.any_for(name)
    )
