"""A retention pass in steps: requests are served between them, and no needed row is deleted."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from plait.broker.retention import STEP_COST, Retention
from plait.errors import StorageFailed
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from tests.support.broker_node import Node, Producer, retention_steps

SUBJECTS = [f"subject-{number}" for number in range(6)]


def fill(node: Node, rounds: int = 8, size: int = 1000) -> None:
    """Make several segments with rows of every subject, and checkpoints that need none of the segments."""
    producers = {subject: Producer(100 + number) for number, subject in enumerate(SUBJECTS)}
    for _ in range(rounds):
        for subject in SUBJECTS:
            node.send(subject, b"x" * size, producer=producers[subject])
        node.clock.advance(1)
    for _ in range(KEEP):
        node.checkpoint()


def finish(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def test_a_step_visits_a_limited_number_of_partitions(monkeypatch: pytest.MonkeyPatch):
    node = Node(retention_seconds=1000.0)
    for number in range(2 * STEP_COST + 1):
        node.broker.create_subject(f"subject-{number}")
    node.turn()
    visited: list[int] = []
    visit = Retention._visit
    monkeypatch.setattr(Retention, "_visit", lambda self, *given: visited.append(1) or visit(self, *given))
    counts = []
    for _ in retention_steps(Retention(node.broker)):
        counts.append(len(visited))
        visited.clear()
    assert counts == [STEP_COST, STEP_COST, 1, 0], "a separate turn deletes the files"


def test_a_request_for_retention_during_a_pass_starts_another_pass():
    node = Node()
    fill(node)
    steps = node.retention.steps()
    for _ in SUBJECTS:
        next(steps)
    assert node.partition(SUBJECTS[0]).start == 0
    node.broker.catalog.update_subject(SUBJECTS[0], SubjectSettings(retention_seconds=0.5))
    finish(steps)
    assert node.broker.catalog.retention_wanted
    node.clock.advance(1)
    node.retention.run()
    assert node.partition(SUBJECTS[0]).start == node.partition(SUBJECTS[0]).next


def test_a_broker_that_fails_during_a_pass_deletes_nothing_more():
    node = Node(retention_seconds=5.0)
    fill(node)
    node.clock.advance(100)
    steps = node.retention.steps()
    next(steps)
    node.broker.turn.failed = StorageFailed("the disk failed")
    starts = [node.partition(subject).start for subject in SUBJECTS]
    files = node.disk.list("message")
    finish(steps)
    assert node.disk.list("message") == files
    assert [node.partition(subject).start for subject in SUBJECTS] == starts


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_in_steps_deletes_the_same_as_one_at_once(seed: int):
    rng = random.Random(seed)
    nodes = [Node(retention_seconds=20.0), Node(retention_seconds=20.0)]
    for _ in range(6):
        for _ in range(rng.randrange(30)):
            subject, size = rng.choice(SUBJECTS), rng.randrange(2000)
            for node in nodes:
                node.send(subject, b"x" * size, producer=Producer(node.broker.message_log.end + 1))
        seconds = rng.randrange(15)
        for node in nodes:
            node.clock.advance(seconds)
            node.checkpoint()
        nodes[0].retention.run()
        for _ in retention_steps(nodes[1].retention):
            nodes[1].turn()
        ends = [
            (node.broker.message_log.start, {p.row.name: p.start for p in node.broker.partitions.values()})
            for node in nodes
        ]
        assert ends[0] == ends[1]
