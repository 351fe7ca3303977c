"""Management of a cluster: routes of subjects, broker groups, and who is to handle what of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from plait.client.net.admin_calls import Calls, Partition
from plait.client.types import PartitionName
from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS

#: Whether a broker, or a broker group, can be sent to (W) and consumed from (R).
State = Literal["RW", "R", "W", "NRW"]
#: Partitions of a subject: so many, or these.
Partitions = int | Sequence[Partition]

STATES: Final = ("RW", "R", "W", "NRW")


class PartitionShare(msgspec.Struct, frozen=True):
    """What a route leads to one partition, in logical partitions of 1024."""

    #: As name@group.
    partition: str
    #: Those whose messages it takes now, and those that it is to take.
    takes: int
    wanted: int
    #: Those whose older messages lie here, while newer ones go elsewhere or came back, and that a group has not
    #: finished. None are where no group reads.
    draining: int
    #: Of its broker group: "RW", "R", "W" or "NRW", which is also one that is lost.
    state: State


class RouteInfo(msgspec.Struct, frozen=True):
    """Where a subject's messages go. ``reached``: as it was asked for, nothing is left to move."""

    subject: str
    version: int
    #: "best_tried" or "strict".
    order: str
    reached: bool
    #: Logical partitions that are still to move.
    moving: int
    partitions: list[PartitionShare]


class BrokerInfo(msgspec.Struct, frozen=True):
    """A broker as the meta server sees it."""

    group: str
    broker: str
    address: str
    #: What the operator wishes, and what it is: less if the broker says so, "NRW" if it is lost.
    wished: State
    state: State
    #: One more with every start that followed a crash.
    epoch: int
    #: Partitions of all subjects.
    partitions: int
    #: Why the broker takes no messages, as it reports: a full disk. Empty where it takes them.
    reason: str = ""


class LostPartition(msgspec.Struct, frozen=True):
    """What is lost with a partition of a broker group that was given up."""

    subject: str
    #: As name@group.
    partition: str
    #: Logical partitions of 1024 whose messages it took: what a group has not handled of them is lost.
    takes: int
    #: Group → logical partitions that had moved elsewhere, and whose older messages here it had not finished.
    groups: dict[str, int]


class MemberShare(msgspec.Struct, frozen=True):
    """A member of a group and what it is to handle."""

    client: str
    #: How many logical partitions.
    count: int
    #: (first, end, epoch) of each run of them.
    lps: list[tuple[int, int, int]]


class AllocationInfo(msgspec.Struct, frozen=True):
    """Who is to handle what of a group: a proposal, as only the brokers' locks give the right to.

    A group that is "shared" has members without shares, as everybody may get everything.
    """

    subject: str
    group: str
    strategy: Literal["exclusive", "shared"]
    epoch: int
    members: list[MemberShare]


class _Route(msgspec.Struct):
    """A route as the meta server tells it."""

    subject: str
    version: int
    order: str
    partitions: list[str]
    #: (first, end, [(partition, fence)])
    histories: list[tuple[int, int, list[tuple[int, int | None]]]]
    target: list[tuple[int, int, int]]
    brokers: dict[str, tuple[list[str], State]]
    #: Group → (partition, first, end, fence): what it has finished in partitions that took more once.
    passed: dict[str, list[tuple[int, int, int, int]]] = {}
    #: Partitions of which that was reported.
    reported: list[int] = []


class _Allocation(msgspec.Struct):
    """An allocation as the meta server tells it."""

    subject: str
    group: str
    strategy: Literal["exclusive", "shared"]
    epoch: int
    members: dict[str, list[tuple[int, int, int]]]


class ClusterAdmin(Calls):
    """What ``plait cluster`` does, and ``plait subject`` and ``plait group`` where they ask for routes and shares."""

    async def route(self, subject: str) -> RouteInfo:
        """Where a subject's messages go now, and where they are to go."""
        return _route_info(await self._run("subject.route", _Route, subject=subject))

    async def expand_subject(self, subject: str, partitions: Partitions) -> RouteInfo:
        """Spread a subject over so many partitions (more or fewer than now), or over these ("name@group").

        It begins at once and goes on by itself: ``route`` says how far it is. Order keys keep their order.
        """
        wanted = partitions if isinstance(partitions, int) else _names(partitions)
        return _route_info(await self._run("subject.expand", _Route, subject=subject, partitions=wanted))

    async def brokers(self) -> list[BrokerInfo]:
        """All brokers of the cluster, by their groups."""
        found: list[BrokerInfo] = await self._run("broker.describe", list[BrokerInfo])
        return found

    async def set_broker_state(self, group: str, state: State) -> None:
        """Use a broker group less: with "R", "W" or "NRW" new partitions go to others; "RW" is as usual.

        With "R" and "NRW" clients also send elsewhere what may go elsewhere, once they have looked at their routes.
        What is stored there is consumed all the same.
        """
        if state not in STATES:
            raise InvalidArgument(f"state {state!r} is not known; use {', '.join(STATES)}")
        await self._run("broker.state", None, group=group, state=state)

    async def forget_broker(self, group: str, *, lost: bool = False) -> list[LostPartition]:
        """Give up a broker group that is switched off and will not come back: routes lead to others, permanently.

        Where a group has not finished what is stored there, or messages are sent there, ``InvalidArgument`` says so;
        with ``lost`` those messages are given up, and what is lost is returned.
        """
        found: list[LostPartition] = await self._run("broker.forget", list[LostPartition], group=group, lost=lost)
        return found

    async def allocation(self, subject: str, group: str) -> AllocationInfo:
        """The members of a group, and who is to handle what."""
        found: _Allocation = await self._run("group.allocation", _Allocation, subject=subject, group=group)
        members = [
            MemberShare(client, sum(end - first for first, end, _ in lps), lps)
            for client, lps in sorted(found.members.items())
        ]
        return AllocationInfo(found.subject, found.group, found.strategy, found.epoch, members)


def _names(partitions: object) -> list[str]:
    if isinstance(partitions, str) or not isinstance(partitions, Sequence):
        raise InvalidArgument(f"partitions {partitions!r} are not understood; use a number, or names as 'name@group'")
    for each in partitions:
        if not isinstance(each, str | PartitionName):
            raise InvalidArgument(f"partition {each!r} is a {type(each).__name__}; use 'name@group'")
    return [str(each) for each in partitions]


def _route_info(route: _Route) -> RouteInfo:
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


def _state(route: _Route, partition: str) -> State:
    return route.brokers[partition.rpartition("@")[2]][1]


def _table(runs: Iterable[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
    """The partition of each logical partition."""
    table = np.zeros(LOGICAL_PARTITIONS, np.int64)
    for first, end, partition in runs:
        table[first:end] = partition
    return table
