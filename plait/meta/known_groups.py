"""Progress reports of brokers, and the groups that a route remembers when partitions are retired.

``start=`` applies only to a group that no partition of the subject knows. When retention has emptied a sealed
partition, the partition is retired, and its broker drops it with its groups. A group whose consumers were stopped all
that time would then look like a new group, and ``start=`` could skip messages in the later partitions. So the route
remembers the group's name and the route version at which it began, until the group or the subject is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from plait.limits import REMEMBERED_GROUPS_MAX
from plait.meta.database.schema import PartitionAssignment
from plait.model import names
from plait.model.logical_partitions import NumberedRun
from plait.model.route import Route

log = logging.getLogger("plait.meta")


class ReportedProgress(msgspec.Struct, frozen=True, array_like=True):
    """The last report of a broker about a partition, as stored in the database."""

    #: Group → (first, end, fence) of the sealed LPs that the group has finished.
    passed: dict[str, list[NumberedRun]] = {}
    #: Rows below this sequence are removed; 0: the partition is sealed and never had a row; -1: no row is removed.
    gone_below: int = -1
    #: Group → the route version at which the group started.
    began: dict[str, int] = {}


_decoder = msgspec.msgpack.Decoder(ReportedProgress)


def progress_of(row: PartitionAssignment) -> ReportedProgress | None:
    """The last report about a partition, or None before the first."""
    return _decoder.decode(row.progress) if row.progress else None


def remembering(route: Route, leaving: Iterable[PartitionAssignment]) -> Route:
    """The route with the groups that the reports of these partitions name."""
    began = dict(route.began)
    for row in leaving:
        progress = progress_of(row)
        for name, version in progress.began.items() if progress is not None else ():
            # Re-insert the group, so that the groups are ordered by their last retirement.
            began[name] = min(version, began.pop(name, version))
    if began == route.began:
        return route
    if len(began) > REMEMBERED_GROUPS_MAX:
        # Forget broadcast groups first, and the oldest of each kind first.
        order = sorted(began, key=names.is_broadcast, reverse=True)
        log.warning(
            "subject %s: its retired partitions knew %d groups; %d are remembered, the others will count as new",
            route.subject,
            len(began),
            REMEMBERED_GROUPS_MAX,
        )
        began = {name: began[name] for name in order[-REMEMBERED_GROUPS_MAX:]}
    return msgspec.structs.replace(route, began=began)
