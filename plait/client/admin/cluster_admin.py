"""Management of a cluster: routes of subjects, broker groups, and the allocation of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from plait.client.net.admin_calls import Calls, Partition
from plait.client.types import PartitionName
from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.model.lp_runs import NumberedRun
from plait.wire.admin import cluster
from plait.wire.admin.cluster import BrokerInfo, LostPartition, RouteDetails, State

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


class ClusterAdmin(Calls):
    """The operations of ``plait cluster``, and the routes and shares of ``plait subject`` and ``plait group``."""

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
