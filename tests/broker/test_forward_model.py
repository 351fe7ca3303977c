"""Delayed rows while routes change: a model of two brokers with three partitions of one subject.

Logical partitions move between the partitions while rows wait and while rows are forwarded; processes are killed,
machines lose power, replies are lost, routes arrive late. In the end every row that was acknowledged and not cancelled
is stored once, in a partition that accepted its LP.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from plait.broker.partitions import sealing
from plait.broker.schedule import delayed_requests
from plait.broker.schedule import forwards as forwards_module
from plait.broker.schedule.forwards import ForwardRoute, Forwards
from plait.errors import DiskFull, FlowControl, PlaitError, StaleRoute
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import lp_of_key
from plait.model.settings import SubjectSettings
from tests.broker.schedule_node import SECOND, delayed_frame, delivered_frames, run_due, submit
from tests.support.broker_node import Node, Producer

SUBJECT = "orders"
PLACES = [("orders", "g1"), ("orders#1", "g1"), ("orders", "g2")]
KEYS = [f"k{n}" for n in range(6)]


def keyed(keys: list[str | None]) -> dict[str, object]:
    """Columns of rows with these keys."""
    from plait.client.send.open_rows import hash_keys

    return {} if None in keys else {"keys": keys, "key_hashes": hash_keys(keys, len(keys))}


class Model:
    """Two brokers, the current route, and the rows that were sent."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.nodes = {group: Node(flush="sync", group=group) for group in ("g1", "g2")}
        for node in self.nodes.values():
            # All nodes share one clock.
            node.clock.advance(self.nodes["g1"].clock.now() / 1e6 - node.clock.now() / 1e6)
        self.version = 1
        self.table = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for place, (name, group) in enumerate(PLACES):
            lps = [(0, LOGICAL_PARTITIONS)] if place == 0 else []
            sealing.open_lps(self.nodes[group].broker, SUBJECT, name, lps, 1, SubjectSettings())
            self.nodes[group].turn()
        self.producers = {place: Producer(100 + index) for index, place in enumerate(PLACES)}
        #: Acknowledged bodies, and their keys.
        self.sent: dict[bytes, str | None] = {}
        self.cancelled: set[bytes] = set()
        self.scheduled: list[tuple[int, int, int, bytes]] = []
        self.number = 0
        #: Place → number of rows that were checked.
        self.seen = [0] * len(PLACES)

    # --- steps ----------------------------------------------------------------------------------

    def delay(self) -> None:
        place = self.draw.randrange(len(PLACES))
        name, group = PLACES[place]
        node = self.nodes[group]
        count = self.draw.choice([1, 1, 3])
        keys: list[str | None] = [self.draw.choice([*KEYS, None]) for _ in range(count)]
        if None in keys:
            keys = [None] * count
        bodies = [b"%d" % (self.number + n) for n in range(count)]
        self.number += count
        due = node.clock.now() + int(self.draw.choice([0.0, 0.5, 3.0, 20.0]) * SECOND)
        producer = self.producers[name, group]
        before = (producer.next, dict(producer.last))
        sent = submit(node, delayed_frame(producer, due, *bodies, subject=name, **keyed(keys)))
        node.turn()
        if not sent.acknowledged:
            producer.next, producer.last = before
            return
        self.sent |= dict(zip(bodies, keys, strict=True))
        assert sent.sequence is not None
        self.scheduled += [(place, sent.sequence + n, due, body) for n, body in enumerate(bodies)]

    def cancel(self) -> None:
        if not self.scheduled:
            return
        place, number, due, body = self.scheduled.pop(self.draw.randrange(len(self.scheduled)))
        name, group = PLACES[place]
        if delayed_requests.cancel(self.nodes[group].broker, name, number, due):
            self.cancelled.add(body)
        self.nodes[group].turn()

    def move(self) -> None:
        """Move some LPs to another partition."""
        here, there = self.draw.sample(range(len(PLACES)), 2)
        keys = self.draw.sample(KEYS, self.draw.choice([1, 3, 6]))
        chosen = np.zeros(LOGICAL_PARTITIONS, bool)
        if self.draw.random() < 0.4:
            chosen[:] = True
        chosen[[lp_of_key(key) for key in keys]] = True
        chosen &= self.table == here
        runs = [(int(lp), int(lp) + 1) for lp in np.flatnonzero(chosen)]
        if not runs:
            return
        self.version += 1
        name, group = PLACES[here]
        fences: list[tuple[int, int, int]] = []
        sealing.seal(self.nodes[group].broker, name, runs, self.version, fences.extend)
        self.nodes[group].turn()
        assert fences
        self.look()
        if self.draw.random() < 0.3:
            # Rows become due after the seal and before the new route is known.
            self.due()
            self.look()
        self.table[chosen] = there
        name, group = PLACES[there]
        sealing.open_lps(self.nodes[group].broker, SUBJECT, name, runs, self.version, SubjectSettings())
        self.nodes[group].turn()

    def due(self) -> None:
        seconds = self.draw.choice([0.3, 1.0, 5.0])
        for node in self.nodes.values():
            node.clock.advance(seconds)
            run_due(node)

    def learn(self, node: Node) -> None:
        """Give a broker the current route."""
        node.broker.forwards.learn(SUBJECT, ForwardRoute(self.table.copy(), PLACES))
        run_due(node)

    def route(self) -> None:
        for node in self.nodes.values():
            if node.broker.forwards.unrouted:
                self.learn(node)

    def ship(self) -> None:
        for node in self.nodes.values():
            for partition in node.broker.forwards.waiting():
                for _ in range(self.draw.choice([1, 5])):
                    if partition.id in node.broker.partitions and not self._ship(node, partition):
                        break

    def _ship(self, node: Node, partition: object) -> bool:
        forwards: Forwards = node.broker.forwards
        waiting = forwards.first(partition)  # type: ignore[arg-type]
        if waiting is None or node.broker.message_log.durable < waiting.log_end:
            return False
        forward = partition.row.forward  # type: ignore[attr-defined]
        answers: list[PlaitError | None] = []
        other = self.nodes[forward.group]
        frame = FrameView(bytes(waiting.frame.buffer))
        try:
            other.broker.submit(other.partition(forward.name), frame, lambda _, error: answers.append(error))
        except FlowControl:
            # The other broker has a long checkpoint: send again later.
            return False
        other.turn()
        [error] = answers
        if self.draw.random() < 0.2:
            # The reply is lost.
            return False
        if error is None:
            forwards.stored(partition, waiting.end)  # type: ignore[arg-type]
            return True
        if isinstance(error, StaleRoute):
            forwards.learn(SUBJECT, ForwardRoute(self.table.copy(), PLACES))
            if forwards.fits(partition, waiting.frame):  # type: ignore[arg-type]
                return False
        self._take_back(node, partition)
        return False

    def _take_back(self, node: Node, partition: object) -> None:
        """Take rows back in one or several turns, perhaps only until the disk is full or the process ends."""
        while self.draw.random() < 0.9:
            full = self.draw.random() < 0.2
            capacity = node.disk.capacity
            if full:
                node.disk.capacity -= node.disk.space()[0]
            try:
                done = node.broker.forwards.take_back(partition)  # type: ignore[arg-type]
            except DiskFull:
                done = True
            node.disk.capacity = capacity
            if self.draw.random() < 0.8:
                node.turn()
            if self.draw.random() < 0.1:
                node.checkpoint()
            if done:
                break

    def crash(self) -> None:
        group = self.draw.choice(["g1", "g2"])
        node = self.nodes[group]
        match self.draw.randrange(3):
            case 0:
                self.nodes[group] = node.killed()
            case 1:
                self.nodes[group] = node.power_lost(self.draw.choice(["none", "random"]), self.draw)
            case 2:
                node.turn()
                self.nodes[group] = node.restart()

    def checkpoint(self) -> None:
        self.draw.choice(list(self.nodes.values())).checkpoint()

    def checkpoint_step(self) -> None:
        self.draw.choice(list(self.nodes.values())).checkpoint_step()

    def housekeep(self) -> None:
        self.draw.choice(list(self.nodes.values())).retention.run()

    # --- checks ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Make all rows due, and forward them until none waits."""
        for node in self.nodes.values():
            while node.broker.snapshots.work is not None:
                node.checkpoint_step()
        for _ in range(12):
            for node in self.nodes.values():
                node.clock.advance(10.0)
                run_due(node)
            self.route()
            for node in self.nodes.values():
                for partition in node.broker.forwards.waiting():
                    while partition.id in node.broker.partitions and self._ship(node, partition):
                        pass
                node.turn()
        for node in self.nodes.values():
            assert node.broker.forwards.waiting() == []
            assert node.broker.schedules.count == 0

    def look(self) -> None:
        """Check that each partition accepts the LPs of the rows that it got since the last check."""
        for place, (name, group) in enumerate(PLACES):
            partition = self.nodes[group].partition(name)
            for frame in delivered_frames(self.nodes[group], name):
                if frame.base >= self.seen[place]:
                    assert partition.takes(frame), f"{frame.binary(Column.BODY).to_pylist()} is stored behind a fence"
            self.seen[place] = partition.next

    def judge(self) -> None:
        found: list[bytes] = []
        for name, group in PLACES:
            for frame in delivered_frames(self.nodes[group], name):
                found += frame.binary(Column.BODY).to_pylist()
        assert len(found) == len(set(found)), "stored twice"
        assert set(found) == set(self.sent) - self.cancelled


def run(seed: int, steps: int) -> None:
    model = Model(seed)
    actions = [model.delay] * 6 + [model.cancel, *[model.move] * 2, *[model.due] * 2, *[model.route] * 2]
    actions += [*[model.ship] * 2, model.crash, model.checkpoint, model.housekeep]
    actions += [model.checkpoint_step] * 3
    for _ in range(steps):
        model.draw.choice(actions)()
        model.look()
    model.finish()
    model.judge()


@pytest.mark.parametrize("number", range(12))
def test_every_delayed_row_enters_the_partition_that_its_route_leads_to_once(
    seed: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One or two frames.
    monkeypatch.setattr(forwards_module, "TAKE_BACK_SIZE_MAX", 200)
    run(seed * 1_000 + number, 60)


@pytest.mark.deep("crash")
@pytest.mark.parametrize("number", range(400))
def test_many_more_seeds(seed: int, number: int) -> None:
    run(seed * 1_000 + 100 + number, 150)
