"""Routes while every order and every answer may arrive late, twice or never."""

from __future__ import annotations

import random

from plait.model.logical_partitions import Run
from plait.model.route import (
    PartitionId,
    Route,
    current,
    default_route,
    moves,
    openings,
    retarget,
    sealed,
    spans,
    target,
)
from tests.meta.test_routes import check, places

RUNS, STEPS = 300, 60
STEPS_OF = ("retarget", "order", "order", "seal", "seal", "report", "report", "order_to_open", "open", "open", "send")


class Broker:
    """The broker of one partition. It refuses an order (returns None) whose route version is older than its own."""

    def __init__(self) -> None:
        self.end = 0
        self.version = 0
        self.open: set[int] = set()
        self.fences: dict[int, int] = {}

    def seal(self, version: int, lps: list[Run]) -> list[tuple[int, int, int]] | None:
        if version < self.version:
            return None
        self.version = version
        chosen = [lp for first, end in lps for lp in range(first, end)]
        for lp in self.open.intersection(chosen):
            self.fences[lp] = self.end
        self.open.difference_update(chosen)
        return [(lp, lp + 1, self.fences.get(lp, 0)) for lp in chosen]

    def take(self, version: int, lps: list[Run]) -> None:
        if version >= self.version:
            self.version = version
            self.open.update(lp for first, end in lps for lp in range(first, end))


class World:
    """Targets change at any moment; seals are carried out late, partly, twice, or without their answer arriving."""

    def __init__(self) -> None:
        self.route = default_route("s", places(2))
        self.brokers: dict[PartitionId, Broker] = {}
        self.sent: dict[int, list[tuple[PartitionId, int]]] = {lp: [] for lp in (0, 300, 511, 512, 700, 1023)}
        self.seal_orders: list[tuple[int, PartitionId, list[Run]]] = []
        self.open_orders: list[tuple[int, PartitionId, list[Run]]] = []
        self.reports: list[tuple[int, PartitionId, list[tuple[int, int, int]]]] = []
        self.older = self.route
        self.open_all()

    def broker(self, place: PartitionId) -> Broker:
        return self.brokers.setdefault(place, Broker())

    def publish(self, route: Route) -> None:
        if route is self.route:
            return
        assert route.version == self.route.version + 1
        for lp in self.sent:
            before = [(self.route.partitions[span.partition], span.fence) for span in spans(self.route, lp)]
            after = [(route.partitions[span.partition], span.fence) for span in spans(route, lp)]
            assert after[: len(before) - 1] == before[:-1]
            assert after[len(before) - 1][0] == before[-1][0]
        self.older, self.route = self.route, route

    def open_all(self) -> None:
        for place, lps in zip(self.route.partitions, openings(self.route), strict=True):
            self.broker(place).take(self.route.version, lps)

    def retarget(self, count: int) -> None:
        self.publish(retarget(self.route, places(count, groups=1)))

    def order(self, pick: int) -> None:
        """Make an order to seal. It may never arrive."""
        work = moves(self.route)
        if work:
            each = work[pick % len(work)]
            self.seal_orders.append((self.route.version, self.route.partitions[each.partition], each.lps))

    def seal(self, pick: int, *, keep: bool) -> None:
        """Let an order to seal arrive, perhaps late. If ``keep``, it can arrive again."""
        if self.seal_orders:
            at = pick % len(self.seal_orders)
            version, place, lps = self.seal_orders[at] if keep else self.seal_orders.pop(at)
            fences = self.broker(place).seal(version, lps)
            if fences is not None:
                self.reports.append((version, place, fences))

    def report(self, pick: int, *, keep: bool) -> None:
        """Let the answer of a seal arrive, perhaps late. If ``keep``, it can arrive again."""
        if self.reports:
            at = pick % len(self.reports)
            version, place, fences = self.reports[at] if keep else self.reports.pop(at)
            if place in self.route.partitions:
                self.publish(sealed(self.route, version, self.route.partitions.index(place), fences))

    def order_to_open(self) -> None:
        for place, lps in zip(self.route.partitions, openings(self.route), strict=True):
            self.open_orders.append((self.route.version, place, lps))

    def open(self, pick: int, *, keep: bool) -> None:
        """Let an order to open arrive, perhaps late. If ``keep``, it can arrive again."""
        if self.open_orders:
            at = pick % len(self.open_orders)
            version, place, lps = self.open_orders[at] if keep else self.open_orders.pop(at)
            self.broker(place).take(version, lps)

    def send(self) -> None:
        """Send one row of each LP by the newest route, or by the one before if its partition still accepts the LP."""
        for lp in self.sent:
            for route in (self.route, self.older):
                place = route.partitions[int(current(route)[lp])]
                broker = self.broker(place)
                if lp in broker.open:
                    self.sent[lp].append((place, broker.end))
                    broker.end += 1
                    break

    def check_rows(self) -> None:
        """Check that the rows in the spans of an LP, one span after another, are in the order of sending."""
        for lp, rows in self.sent.items():
            left = list(rows)
            for span in spans(self.route, lp):
                place = self.route.partitions[span.partition]
                while left and left[0][0] == place and (span.fence is None or left[0][1] < span.fence):
                    left.pop(0)
            assert left == []

    def converge(self) -> None:
        """Carry out all orders: the route reaches its target, and a partition accepts the rows of every LP."""
        while work := moves(self.route):
            partition, lps = work[0]
            place = self.route.partitions[partition]
            fences = self.broker(place).seal(self.route.version, lps)
            assert fences is not None
            self.publish(sealed(self.route, self.route.version, partition, fences))
        self.open_all()
        assert (current(self.route) == target(self.route)).all()
        for lp in self.sent:
            place = self.route.partitions[int(current(self.route)[lp])]
            assert lp in self.broker(place).open


def test_rows_keep_their_order_though_orders_and_answers_arrive_late_or_twice(seed: int):
    for run in range(RUNS):
        chance = random.Random(seed + run)
        world = World()
        for _ in range(STEPS):
            step = chance.choice(STEPS_OF)
            if step == "retarget":
                world.retarget(chance.choice([1, 2, 3]))
            elif step == "order":
                world.order(chance.randrange(6))
            elif step in ("seal", "report", "open"):
                getattr(world, step)(chance.randrange(6), keep=chance.random() < 0.5)
            else:
                getattr(world, step)()
            check(world.route)
            world.check_rows()
        world.converge()
