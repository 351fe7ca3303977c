"""What the settings of a subject change in one partition: paused groups, and limits, of which it enforces its share.

Partitions and groups are typed ``Any`` here, because their modules import this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.broker.partition_rate import partition_rate
from plait.limits import LOGICAL_PARTITIONS
from plait.model.settings import priority_refused


def apply_settings(partition: Any) -> None:
    """Apply the settings in the partition's row to it and its groups."""
    wanted = partition.row.settings.send_rate
    partition.send_rate = None if wanted is None else partition_rate(wanted, partition.send_rate, share_of(partition))
    for group in partition.groups.values():
        apply_to_group(partition, group)


def apply_to_group(partition: Any, group: Any) -> None:
    """Apply the settings in the partition's row to a group."""
    settings = partition.row.settings
    group.paused = settings.paused.get(group.name, 0)
    wanted = settings.group_rates.get(group.name)
    group.rate = None if wanted is None else partition_rate(wanted, group.rate, share_of(partition, group))


def share_of(partition: Any, group: Any = None) -> float:
    """The share of the subject that the partition has: of its LPs, those whose rows are stored here.

    For a group, also those that were sealed here and that it has not finished: their next rows come from here too.
    """
    accepts, fences = partition.accepts, partition.fences
    if accepts is None:
        return 1.0
    if group is not None and fences is not None and fences.any():
        accepts = accepts | (fences > group.floor)
    return max(int(np.count_nonzero(accepts)), 1) / LOGICAL_PARTITIONS


def refuse_on_strict(partition: Any) -> None:
    """Refuse rows with priorities if their partition, or the one that they are to enter, is of a strict subject."""
    if partition.row.settings.order == "strict":
        raise priority_refused(partition.row.subject)
