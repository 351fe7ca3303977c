"""Several meta servers over one database: each of them accepts any request at any time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from plait.clock import ManualClock
from plait.errors import MetaBusy, SubjectExists
from plait.limits import LOGICAL_PARTITIONS, MetaLimits
from plait.meta.route_changes import Make, Move
from plait.meta.service import MetaService
from plait.model.route import PartitionId, Route, current, spans, target
from tests.meta.support import Stores, converge, join, lps, pass_time, register, settle, subject_names

STEPS = 150


class History:
    """What clients have seen of one database; none of it may be revoked."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        #: (subject, group, LP) → the epochs and owners it was proposed under.
        self.owners: dict[tuple[str, str, int], dict[int, str]] = {}
        self.epochs: dict[tuple[str, str], int] = {}

    def see_route(self, route: Route) -> None:
        before = self.routes.get(route.subject)
        assert before is None or route.version >= before.version
        if before is not None and before.version == route.version:
            assert route == before
        elif before is not None and before.partitions[0] in route.partitions:
            for lp in (0, 333, 512, 1023):
                old = [(before.partitions[span.partition], span.fence) for span in spans(before, lp)]
                new = [(route.partitions[span.partition], span.fence) for span in spans(route, lp)]
                assert new[: len(old) - 1] == old[:-1]
                assert new[len(old) - 1][0] == old[-1][0]
        self.routes[route.subject] = route

    def see_allocation(self, service: MetaService, subject: str, group: str) -> None:
        view = service.allocator.view(subject, group)
        assert view.epoch >= self.epochs.get((subject, group), 0)
        self.epochs[subject, group] = view.epoch
        for client, runs in view.members.items():
            for first, end, epoch in runs:
                for lp in range(first, end, 64):
                    known = self.owners.setdefault((subject, group, lp), {})
                    assert epoch >= max(known, default=0)
                    assert known.setdefault(epoch, client) == client


def send_broker_heartbeats(*services: MetaService) -> None:
    for service in services:
        for group in ("g1", "g2", "g3"):
            assert service.brokers.heartbeat(group, f"{group}-1", "RW")


@pytest.mark.parametrize("run", range(2))
def test_clients_see_one_history_whichever_meta_server_they_ask(stores: Stores, seed: int, run: int):
    chance = random.Random(seed + run)
    clock = ManualClock()
    services = [MetaService(stores(), clock) for _ in range(2)]
    register(services[0], "g1", "g2", "g3")
    for service in services:
        service.tick()
        send_broker_heartbeats(service)
    history = History()
    orders: list[tuple[str, Make | Move]] = []
    members: dict[str, set[str]] = {}
    services[0].subjects.create("s")
    for _ in range(STEPS):
        service = chance.choice(services)
        match chance.randrange(11):
            case 0:
                service.routing.retarget("s", chance.randint(1, 6))
            case 1:
                orders += [("make", make) for make in service.routing.makes("s")]
                orders += [("move", move) for move in service.routing.moves("s")]
            case 2 | 3 | 4 if orders:
                # A broker carries the order out, perhaps late, and reports to either of the two, perhaps twice.
                kind, order = orders[at] if (at := chance.randrange(len(orders))) % 3 else orders.pop(at)
                if kind == "make":
                    service.routing.made(order)
                elif isinstance(order, Move):
                    service.routing.sealed(order, [(first, end, order.version) for first, end in order.lps])
            case 5 | 6:
                client = f"c{chance.randrange(6)}"
                wanted = {group for group in ("g", "h") if chance.random() < 0.6}
                members[client] = wanted
                reply = service.members.heartbeat(client, [("s", group, True) for group in sorted(wanted)])
                assert reply.refused == {}
            case 7:
                service.step()
            case 8:
                clock.advance(0.3)
                send_broker_heartbeats(*services)
                for client, wanted in members.items():
                    service.members.heartbeat(client, [("s", group, True) for group in sorted(wanted)])
                service.tick()
            case 9:
                history.see_route(service.routing.view("s", create=False).route)
            case _:
                for group in sorted(service._core.mirror.groups_of["s"]):
                    history.see_allocation(service, "s", group)
    for service in services:
        service.tick()
        # A server that has not read the last leave yet ignores the join as a repeat; the next heartbeat repairs that.
        for client, wanted in members.items():
            service.members.heartbeat(client, [("s", group, True) for group in sorted(wanted)])
        settle(service)
        converge(service)
        history.see_route(service.routing.view("s").route)
    routes = [service.routing.view("s").route for service in services]
    assert routes[0] == routes[1]
    assert (current(routes[0]) == target(routes[0])).all()
    for group in sorted(services[0]._core.mirror.groups_of["s"]):
        views = [service.allocator.view("s", group) for service in services]
        assert views[0] == views[1]
        online = {client for client, groups in members.items() if group in groups}
        assert views[0].members.keys() == online
        assert sum(map(lps, views[0].members.values())) == (LOGICAL_PARTITIONS if online else 0)


def test_of_concurrent_creations_of_one_subject_one_wins(stores: Stores):
    services = [MetaService(stores(), ManualClock()) for _ in range(4)]
    register(services[0], "g1", "g2", "g3")
    for service in services[1:]:
        service.brokers.views()
        send_broker_heartbeats(service)
    together = Barrier(4, timeout=60)

    def create(number: int) -> str:
        won = ""
        for at in range(5):
            together.wait()
            try:
                services[number].subjects.create(f"s{at}")
                won += "1"
            except SubjectExists:
                won += "0"
        return won

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(create, range(4)))
    assert [sum(int(result[at]) for result in results) for at in range(5)] == [1] * 5
    assert len({str(subject_names(service)) for service in services}) == 1


def test_no_change_is_lost_when_all_change_the_same_route_and_group(stores: Stores):
    services = [MetaService(stores(), ManualClock(), MetaLimits(attempts=100)) for _ in range(4)]
    register(services[0], "g1")
    for service in services:
        service.brokers.views()
        service.brokers.heartbeat("g1", "g1-1", "RW")
    services[0].subjects.create("s")
    first = services[0].routing.view("s").route.version
    together = Barrier(4, timeout=60)

    def work(number: int) -> int:
        changes = 0
        for at in range(6):
            together.wait()
            before = services[number].routing.view("s").route
            after = services[number].routing.retarget(
                "s", [PartitionId("s", "g1"), PartitionId(f"s#{number}-{at}", "g1")]
            )
            changes += after is not before
            join(services[number], f"c{number}-{at}")
            services[number].step()
        return changes

    with ThreadPoolExecutor(4) as pool:
        changes = sum(pool.map(work, range(4)))
    # Each change published its own route version.
    assert services[1].routing.view("s").route.version == first + changes == first + 24
    settle(services[2])
    members = services[2].allocator.view("s", "g").members
    assert members.keys() == {f"c{number}-{at}" for number in range(4) for at in range(6)}
    assert sum(map(lps, members.values())) == LOGICAL_PARTITIONS


def test_a_change_that_conflicts_repeatedly_fails_with_a_retryable_error(stores: Stores, clock: ManualClock):
    service, other = MetaService(stores(), clock, MetaLimits(attempts=3)), MetaService(stores(), clock)
    register(service, "g1")
    service.subjects.create("s")
    other.brokers.views()
    other.brokers.heartbeat("g1", "g1-1", "RW")
    number = 0

    def write_first() -> None:
        nonlocal number
        number += 1
        other.routing.retarget("s", [PartitionId("s", "g1"), PartitionId(f"s#{number}", "g1")])

    news = service._core.store.news

    def read_then_conflict(seen: int) -> object:
        found = news(seen)
        write_first()
        return found

    service._core.store.news = read_then_conflict  # type: ignore[method-assign, assignment]
    with pytest.raises(MetaBusy, match="3 attempts conflicted") as caught:
        service.routing.retarget("s", [PartitionId("s", "g1"), PartitionId("s#mine", "g1")])
    assert caught.value.retryable
    assert number == 3


def test_meta_servers_list_each_other_while_they_are_alive(stores: Stores, clock: ManualClock):
    services = [MetaService(stores(), clock, address=f"plait://m{number}:1") for number in range(3)]
    pass_time(clock, 2, *services)
    assert services[1].peers.addresses() == ["plait://m1:1", "plait://m0:1", "plait://m2:1"]
    pass_time(clock, 7, *services[:2])
    assert services[0].peers.addresses() == ["plait://m0:1", "plait://m1:1"]
    # A meta server without an address is not listed, but sees the others.
    hidden = MetaService(stores(), clock)
    hidden.tick()
    assert hidden.peers.addresses() == ["plait://m0:1", "plait://m1:1"]
    lone = MetaService(stores(alone=True), clock, address="plait://alone:1")
    lone.tick()
    assert lone.peers.addresses() == ["plait://alone:1"]
