"""What brokers report of a partition, and what is remembered of it when it leaves the route: the groups that it knew.

``start=`` is for a group that no partition of the subject knows. Retention empties a partition that takes no messages
any more, it leaves the route, and its broker drops it with its groups. One that was stopped all the time would be taken
for a new group then, and skip what is stored in the partitions that came later. So its name stays with the route, with
the version that it began with, until the group or the subject is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from plait.limits import REMEMBERED_GROUPS_MAX
from plait.meta.database.schema import PartitionAssignment
from plait.model import names
from plait.model.lp_runs import NumberedRun
from plait.model.route import Route

log = logging.getLogger("plait.meta")


class ReportedProgress(msgspec.Struct, frozen=True, array_like=True):
    """What a broker has reported of a partition."""

    #: Group → (first, end, fence) of the logical partitions that end there and that it is done with.
    passed: dict[str, list[NumberedRun]] = {}
    #: Rows below this are gone; 0: it takes nothing and never had a row; -1: none are.
    gone_below: int = -1
    #: Group → the version of the route that it began with.
    began: dict[str, int] = {}

    def without(self, group: str) -> ReportedProgress:
        """The same but for a group that was deleted since."""
        kept = {name: version for name, version in self.began.items() if name != group}
        return msgspec.structs.replace(self, began=kept)


_decoder = msgspec.msgpack.Decoder(ReportedProgress)


def progress_of(row: PartitionAssignment) -> ReportedProgress | None:
    """What was reported of a partition; None: nothing yet."""
    return _decoder.decode(row.progress) if row.progress else None


def remembering(route: Route, leaving: Iterable[PartitionAssignment]) -> Route:
    """The route with the groups that these partitions knew, as far as they were reported."""
    began = dict(route.began)
    for row in leaving:
        progress = progress_of(row)
        for name, version in progress.began.items() if progress is not None else ():
            # As the newest of all.
            began[name] = min(version, began.pop(name, version))
    if began == route.began:
        return route
    if len(began) > REMEMBERED_GROUPS_MAX:
        # Broadcasts first, and of each kind the oldest.
        order = sorted(began, key=names.is_broadcast, reverse=True)
        log.warning(
            "subject %s: partitions that left its route knew %d groups; %d are remembered, the others count as new",
            route.subject,
            len(began),
            REMEMBERED_GROUPS_MAX,
        )
        began = {name: began[name] for name in order[-REMEMBERED_GROUPS_MAX:]}
    return msgspec.structs.replace(route, began=began)


def forgetting(route: Route, group: str) -> Route:
    """The next version, without a group that was deleted; the same route if it is not remembered."""
    if group not in route.began:
        return route
    kept = {name: version for name, version in route.began.items() if name != group}
    return msgspec.structs.replace(route, version=route.version + 1, began=kept)
