"""Helpers for meta server tests: brokers that carry out orders, clients that send heartbeats, a clock that advances."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from plait.clock import ManualClock
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.database.store import Store
from plait.meta.members.shares import HeartbeatView, Share
from plait.meta.service import MetaService
from plait.model.logical_partitions import NumberedRun
from plait.model.route import PartitionId
from plait.model.subject_patterns import SubjectPatterns
from plait.wire.admin.cluster import PartitionProgress

#: Makes a store over the test's database.
Stores = Callable[..., Store]


def subject_names(service: MetaService) -> list[str]:
    """The names of all subjects, with the changes of other meta servers."""
    service.subjects.matching(SubjectPatterns.of("*"))
    return list(service._core.mirror.names())


def settle(service: MetaService) -> None:
    """Run steps until every allocation is written."""
    while service.step().more:
        pass


def converge(service: MetaService, *, without: Iterable[str] = (), fence: int = 10) -> None:
    """Carry out all broker orders, except those to the unreachable broker groups ``without``."""
    lost = set(without)
    while True:
        makes = [make for make in service.routing.makes() if make.place.group not in lost]
        moves = [move for move in service.routing.moves() if move.place.group not in lost]
        for make in makes:
            service.routing.made(make)
        for move in moves:
            service.routing.sealed(move, [(first, end, fence) for first, end in move.lps])
        if not makes and not moves:
            return


def register(service: MetaService, *groups: str) -> None:
    for group in groups:
        service.register_broker(group, f"{group}-1", f"plait://{group}:1")


def pass_time(clock: ManualClock, seconds: float, *services: MetaService, alive: Iterable[str] = ()) -> None:
    """Advance the clock second by second; the brokers of ``alive`` send heartbeats to the first meta server."""
    for _ in range(round(seconds)):
        clock.advance(1.0)
        for group in alive:
            assert services[0].brokers.heartbeat(group, f"{group}-1", "RW")
        for service in services:
            service.tick()
            settle(service)


def join(
    service: MetaService, client: str, subject: str = "s", group: str = "g", *, ordered: bool = True
) -> HeartbeatView:
    return service.members.heartbeat(client, [(subject, group, ordered)])


def lps(runs: Iterable[NumberedRun]) -> int:
    return sum(end - first for first, end, _ in runs)


def share(reply: HeartbeatView) -> Share:
    (only,) = reply.shares
    return only


def places(service: MetaService, subject: str) -> list[str]:
    return [str(place) for place in service.routing.view(subject, create=False).route.partitions]


def place(text: str) -> PartitionId:
    return PartitionId(*text.split("@"))


def expire(service: MetaService, subject: str, name: str, below: int) -> None:
    """The broker of a partition reports that rows below a sequence have expired."""
    where = place(name)
    progress(service, where.group, PartitionProgress(where.name, subject, 1 << 60, gone_below=below))


def progress(service: MetaService, group: str, *reports: PartitionProgress) -> None:
    """The broker of a group reports progress."""
    [broker] = [each.broker for each in service.brokers.views() if each.group == group]
    assert service.retiring.report(group, broker, reports)


ALL = [(0, LOGICAL_PARTITIONS)]
