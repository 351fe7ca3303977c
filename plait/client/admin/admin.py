"""The ``Admin`` class: subjects, groups and the cluster here, the other concerns inherited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from plait.client.admin.dead_letter_admin import DeadAdmin
from plait.client.admin.parked_key_admin import ParkedAdmin
from plait.client.admin.rate_admin import RateAdmin
from plait.client.admin.recurrence_admin import RecurrenceAdmin
from plait.client.admin.rewind_admin import RewindAdmin
from plait.client.admin.schedule_admin import ScheduleAdmin
from plait.client.admin.transaction_admin import TransactionAdmin
from plait.client.arguments import Duration, seconds_of
from plait.client.net.admin_calls import Partition
from plait.client.types import PartitionName
from plait.errors import GroupNotFound, InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.model.filter_terms import TagFilter, filter_terms
from plait.model.logical_partitions import NumberedRun
from plait.model.retry_policy import Retry
from plait.model.settings import check_fair_by
from plait.wire.admin import cluster, subjects
from plait.wire.admin.cluster import BrokerInfo, LostPartition, RouteDetails, State
from plait.wire.admin.subjects import ConsumerInfo, GroupInfo, SubjectDetails, SubjectInfo

#: Partitions of a subject: their number, or their names.
Partitions = int | Sequence[Partition]

STATES: Final = get_args(State)


class PartitionShare(msgspec.Struct, frozen=True):
    """One partition of a route. Counts are of logical partitions, of 1024 in all."""

    #: As name@group.
    partition: str
    #: LPs whose messages the partition accepts now, and LPs whose messages it is to accept.
    takes: int
    wanted: int
    #: LPs that have moved to another partition, but have older messages here that some group has not finished. 0 if
    #: there is no group.
    draining: int
    #: The state of its broker group; a lost one is "NRW".
    state: State


class RouteInfo(msgspec.Struct, frozen=True):
    """The route of a subject. ``reached``: the requested distribution is in place, no LP is left to move."""

    subject: str
    version: int
    #: "best_tried" or "strict".
    order: str
    reached: bool
    #: Logical partitions that are still to move.
    moving: int
    partitions: list[PartitionShare]


class MemberShare(msgspec.Struct, frozen=True):
    """A member of a group and its share."""

    client: str
    #: The number of logical partitions.
    count: int
    #: (first, end, epoch) of each run of them.
    lps: list[tuple[int, int, int]]


class AllocationInfo(msgspec.Struct, frozen=True):
    """The allocation of a group. It is a proposal: only a broker's lock gives the right to handle an LP.

    The members of a "shared" group have no shares, as each may get any message.
    """

    subject: str
    group: str
    strategy: Literal["exclusive", "shared"]
    epoch: int
    members: list[MemberShare]


def _names(partitions: object) -> list[str]:
    if isinstance(partitions, str) or not isinstance(partitions, Sequence):
        raise InvalidArgument(f"partitions {partitions!r} is not valid; use a number, or a list of 'name@group'")
    for each in partitions:
        if not isinstance(each, str | PartitionName):
            raise InvalidArgument(f"partition {each!r} is a {type(each).__name__}; use 'name@group'")
    return [str(each) for each in partitions]


def _route_info(route: RouteDetails) -> RouteInfo:
    count = len(route.partitions)
    here = _table((first, end, spans[-1][0]) for first, end, spans in route.histories)
    there = _table(route.target)
    left: npt.NDArray[np.bool_] = np.zeros((count, LOGICAL_PARTITIONS), bool)
    fences = np.zeros((count, LOGICAL_PARTITIONS), np.int64)
    for first, end, spans in route.histories:
        for partition, fence in spans[:-1]:
            left[partition, first:end] = True
            fences[partition, first:end] = np.maximum(fences[partition, first:end], fence or 0)
    # Which groups have finished a partition is unknown until its broker reports it.
    unfinished = np.ones((count, LOGICAL_PARTITIONS), bool)
    unfinished[route.reported] = False
    for runs in route.passed.values():
        done = np.zeros((count, LOGICAL_PARTITIONS), np.int64)
        for partition, first, end, fence in runs:
            done[partition, first:end] = fence
        unfinished |= done < fences
    left &= unfinished
    takes, wanted = np.bincount(here, minlength=count), np.bincount(there, minlength=count)
    draining = left.sum(axis=1)
    moving = int((here != there).sum())
    shares = [
        PartitionShare(name, int(takes[at]), int(wanted[at]), int(draining[at]), _state(route, name))
        for at, name in enumerate(route.partitions)
    ]
    return RouteInfo(route.subject, route.version, route.order, not moving, moving, shares)


def _state(route: RouteDetails, partition: str) -> State:
    return route.brokers[partition.rpartition("@")[2]][1]


def _table(runs: Iterable[NumberedRun]) -> npt.NDArray[np.int64]:
    """The partition of each logical partition."""
    table = np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, partition in runs:
        table[first:end] = partition
    return table


#: The fields that are summed over the partitions of a subject. A consumer at several partitions is counted once.
_GROUP_SUMS: Final = [
    f.name for f in msgspec.structs.fields(GroupInfo) if f.type is int and f.name not in ("online", "filter_version")
]


class Admin(DeadAdmin, ScheduleAdmin, RecurrenceAdmin, ParkedAdmin, RewindAdmin, RateAdmin, TransactionAdmin):
    """The operations of ``plait subject``, ``group``, ``dlq``, ``schedule``, ``cron``, ``transactions``, ``cluster``.

    Where a subject has several partitions, ``partition`` selects one: "name@group".
    """

    async def subjects(self) -> list[SubjectInfo]:
        """All subjects by name, an entry for each partition."""
        found = [info for each in await self._everywhere(subjects.LIST_SUBJECTS) for info in each]
        return sorted(found, key=lambda info: (info.subject, info.partition))

    async def subject(self, subject: str) -> SubjectDetails:
        """A subject, its partitions and its groups."""
        answers = await self._each(await self._places(subject), subjects.DESCRIBE_SUBJECT)
        details = [answer for _, answer in answers]
        groups = merged_groups([group for each in details for group in each.groups])
        partitions = [each.subject for each in details]
        merged = partitions[0]
        if len(partitions) > 1:
            merged = msgspec.structs.replace(
                merged,
                partition=", ".join(each.partition for each in partitions),
                groups=len(groups),
                created=min(each.created for each in partitions),
                **_sums(partitions, ("start", "end", "count", "size")),
            )
        return SubjectDetails(merged, groups, partitions)

    async def create_subject(
        self,
        subject: str,
        *,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        order: Literal["best_tried", "strict"] = "best_tried",
        partitions: int | None = None,
        groups: Sequence[str] | None = None,
    ) -> SubjectInfo:
        """Create a subject; ``retention`` is how long its messages are kept (None: the server's default).

        ``order`` decides whether a failed message holds back its key. The subject gets ``partitions`` partitions on the
        broker ``groups``; by default one on each of two broker groups.
        """
        if isinstance(groups, str):
            raise InvalidArgument(f"groups {groups!r} is a string; use a list of names")
        await self._run(
            subjects.CREATE_SUBJECT,
            subject=subject,
            retention_seconds=None if retention is None else seconds_of(retention),
            retention_bytes=retention_bytes,
            order=order,
            partitions=partitions,
            groups=None if groups is None else list(groups),
        )
        return (await self.subject(subject)).subject

    async def set_subject(
        self,
        subject: str,
        *,
        retention: Duration | Literal["default"] | None = None,
        retention_bytes: int | Literal["default"] | None = None,
    ) -> SubjectInfo:
        """Change how long, or how many bytes of, a subject's messages are kept; "default": the server's default.

        An argument that is left out changes nothing. A shorter retention takes effect within a minute: the messages
        beyond it are deleted, and so are log segments that no other subject needs. The order cannot be changed.
        """
        changed: dict[str, Any] = {}
        if retention is not None:
            changed["retention_seconds"] = None if retention == "default" else seconds_of(retention)
        if retention_bytes is not None:
            changed["retention_bytes"] = None if retention_bytes == "default" else retention_bytes
        if not changed:
            raise InvalidArgument(f"no setting of {subject!r} to change; pass retention= or retention_bytes=")
        await self._run(subjects.SET_SUBJECT, subject=subject, **changed)
        return (await self.subject(subject)).subject

    async def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups, permanently."""
        await self._run(subjects.DELETE_SUBJECT, subject=subject)

    async def groups(self, subject: str | None = None, *, partition: Partition | None = None) -> list[GroupInfo]:
        """The groups of a subject, of one of its partitions, or of all subjects."""
        if subject is None:
            if partition is not None:
                raise InvalidArgument(f"partition {str(partition)!r} needs its subject; pass subject= too")
            found = [info for each in await self._everywhere(subjects.LIST_GROUPS) for info in each]
        else:
            answers = await self._each(await self._places(subject, partition), subjects.LIST_GROUPS)
            found = [info for _, answer in answers for info in answer]
        return merged_groups(found)

    async def group(self, subject: str, group: str, *, partition: Partition | None = None) -> GroupInfo:
        """A group's progress; with several partitions, the sum over them."""
        places = await self._places(subject, partition)
        [merged] = merged_groups([a for _, a in await self._each(places, subjects.DESCRIBE_GROUP, group=group)])
        return merged

    async def set_group(
        self, subject: str, group: str, *, retry: Retry | None = None, fair_by: str | EllipsisType | None = ...
    ) -> GroupInfo:
        """Change settings of an idle group; ``GroupBusy`` while it has consumers. What is left out stays.

        The retry policy applies to members that name none. The first member that names one replaces it. All members
        must name the same ``fair_by`` as the group has then; None: the group is not fair.
        """
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidArgument(f"retry is {retry!r}; use plait.Retry(...)")
        changed = {} if isinstance(fair_by, EllipsisType) else {"fair_by": fair_by and check_fair_by(fair_by)}
        await self._each(await self._places(subject), subjects.SET_GROUP, group=group, retry=retry, **changed)
        return await self.group(subject, group)

    async def set_group_filter(
        self,
        subject: str,
        group: str,
        *,
        where: str | None = None,
        tags: TagFilter | str | Iterable[str] | None = None,
    ) -> GroupInfo:
        """Change the filter of a group; without ``where`` and ``tags`` it gets every message.

        The filter applies to messages that no member has begun. Members without a filter of their own follow; a member
        that states another one fails with ``GroupMismatch``.
        """
        wanted, places = filter_terms(where, tags), await self._places(subject)
        known = [info for _, info in await self._each(places, subjects.DESCRIBE_GROUP, group=group)]
        version = 1 + max(info.filter_version for info in known)
        await self._each(places, subjects.SET_GROUP_FILTER, group=group, filter=wanted, version=version)
        return await self.group(subject, group)

    async def delete_group(self, subject: str, group: str) -> None:
        """Delete an idle group, its position and its dead letters, permanently; ``GroupBusy`` while it has consumers.

        A later consumer with the same group name is the first member of a new group.
        """
        places = await self._places(subject)
        # First the brokers: each refuses while it has a consumer of the group. Then the meta server, which has the
        # group's settings and remembers groups of partitions that have left the route. It may be the only server that
        # knows the group.
        missing: GroupNotFound | None = None
        try:
            await self._each(places, subjects.DELETE_GROUP, group=group)
        except GroupNotFound as error:
            missing = error
        # A later group of this name is not paused, and has no rate.
        await self._run(subjects.PAUSE_GROUP, subject=subject, group=group, paused=False)
        await self._run(subjects.SET_RATE, subject=subject, group=group, rate=None)
        remembered = await self._run(subjects.FORGET_GROUP, subject=subject, group=group)
        if missing is not None and not remembered:
            raise missing

    async def route(self, subject: str) -> RouteInfo:
        """The route of a subject: which partitions accept its messages now, and which are to accept them."""
        return _route_info(await self._run(cluster.DESCRIBE_ROUTE, subject=subject))

    async def expand_subject(self, subject: str, partitions: Partitions) -> RouteInfo:
        """Spread a subject over a number of partitions, more or fewer than now, or over named ones ("name@group").

        The change starts at once and proceeds in the background; ``route`` shows its progress. Order per key is kept.
        """
        wanted = partitions if isinstance(partitions, int) else _names(partitions)
        return _route_info(await self._run(cluster.EXPAND_SUBJECT, subject=subject, partitions=wanted))

    async def brokers(self) -> list[BrokerInfo]:
        """All brokers of the cluster, by their groups."""
        return await self._run(cluster.DESCRIBE_BROKERS)

    async def set_broker_state(self, group: str, state: State) -> None:
        """Restrict the use of a broker group: with "R", "W" or "NRW" it gets no new partitions; "RW" lifts this.

        With "R" and "NRW" clients also send messages to other groups where the order allows it, once they have
        refreshed their routes. Messages that are stored on the group are still consumed.
        """
        if state not in STATES:
            raise InvalidArgument(f"state {state!r} is not known; use {', '.join(STATES)}")
        await self._run(cluster.SET_BROKER_STATE, group=group, state=state)

    async def forget_broker(self, group: str, *, lost: bool = False) -> list[LostPartition]:
        """Remove a broker group that will not come back from the cluster and from all routes, permanently.

        ``InvalidArgument`` if the group still accepts messages, or has messages that a consumer group has not finished.
        With ``lost`` those messages are given up, and the loss is returned.
        """
        return await self._run(cluster.FORGET_BROKER, group=group, lost=lost)

    async def allocation(self, subject: str, group: str) -> AllocationInfo:
        """The members of a group and their shares."""
        found = await self._run(cluster.DESCRIBE_ALLOCATION, subject=subject, group=group)
        members = [
            MemberShare(client, sum(end - first for first, end, _ in lps), lps)
            for client, lps in sorted(found.members.items())
        ]
        return AllocationInfo(found.subject, found.group, found.strategy, found.epoch, members)

    async def server(self) -> dict[str, Any]:
        """Facts about the server."""
        return await self._run(subjects.DESCRIBE_SERVER)


def merged_groups(found: list[GroupInfo]) -> list[GroupInfo]:
    """Merge the reports of partitions into one entry per group, sorted by subject and group."""
    together: dict[tuple[str, str], list[GroupInfo]] = {}
    for info in found:
        together.setdefault((info.subject, info.group), []).append(info)
    return [_merged_group(together[key]) for key in sorted(together)]


def _merged_group(parts: list[GroupInfo]) -> GroupInfo:
    if len(parts) == 1:
        return parts[0]
    consumers: dict[str, ConsumerInfo] = {}
    for consumer in (consumer for part in parts for consumer in part.consumers):
        known = consumers.get(consumer.client, ConsumerInfo(consumer.client, False, 0))
        consumers[consumer.client] = ConsumerInfo(
            consumer.client,
            known.online or consumer.online,
            known.held + consumer.held,
            known.locks + consumer.locks,
        )
    newest = max(parts, key=lambda part: part.filter_version)
    return msgspec.structs.replace(
        parts[0],
        filter=newest.filter,
        filter_version=newest.filter_version,
        consumers=list(consumers.values()),
        online=sum(consumer.online for consumer in consumers.values()),
        estimated=any(part.estimated for part in parts),
        lost_estimated=any(part.lost_estimated for part in parts),
        paused=min((part.paused for part in parts if part.paused is not None), default=None),
        **_sums(parts, _GROUP_SUMS),
    )


def _sums(parts: Sequence[msgspec.Struct], fields: Iterable[str]) -> dict[str, int]:
    return {field: sum(getattr(part, field) for part in parts) for field in fields}
