"""A retention pass in steps: requests are served between them, and no needed row is deleted."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from plait.broker.retention import STEP_COST, Retention
from plait.errors import StorageFailed
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from plait.storage.marks import ArchiveMark, write_archived
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


def test_rows_stored_during_a_pass_are_kept():
    node = Node(retention_seconds=5.0)
    fill(node)
    node.clock.advance(100)
    producers = {subject: Producer(900 + number) for number, subject in enumerate(SUBJECTS)}
    sent: dict[str, list[bytes]] = {subject: [] for subject in SUBJECTS}
    for number, _ in enumerate(retention_steps(node.retention)):
        # Partitions before, at and after the current step.
        for subject in SUBJECTS:
            sent[subject].append(b"%d" % number)
            node.send(subject, sent[subject][-1], producer=producers[subject])
    node.sync()
    node.retention.run()
    assert node.broker.message_log.start > 0, "expired segments are deleted"
    assert {subject: node.bodies(subject) for subject in SUBJECTS} == sent
    found = node.power_lost()
    count = len(sent[SUBJECTS[0]])
    assert {subject: found.bodies(subject)[-count:] for subject in SUBJECTS} == sent


def test_subjects_can_be_created_and_deleted_during_a_pass():
    node = Node(retention_seconds=5.0)
    fill(node)
    node.clock.advance(100)
    made = []
    for number, _ in enumerate(retention_steps(node.retention)):
        # The first partition was visited already, the others were not.
        node.broker.delete_subject(SUBJECTS[-number])
        made.append(f"new-{number}")
        node.send(made[-1], b"new", producer=Producer(11 + number))
    assert len(made) > 2
    assert node.broker.catalog.retention_wanted, "partitions deleted after their visit free space in the next pass"
    node.checkpoint()
    node.retention.run()
    assert all(node.bodies(subject) == [b"new"] for subject in made)
    found = node.killed()
    assert sorted(found.broker.subjects) == sorted(node.broker.subjects)


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


def test_a_checkpoint_that_begins_during_a_pass_is_valid():
    node = Node(retention_seconds=5.0)
    consumers = [node.attach(subject, "g") for subject in SUBJECTS]
    fill(node)
    held = {consumer: [row.sequence for row in node.pull(consumer, count=2).rows] for consumer in consumers}
    node.clock.advance(100)
    for number, _ in enumerate(retention_steps(node.retention)):
        if number == 3:
            work = node.broker.snapshots.begin()
        if number in (3, 4):
            # Some shards are copied before their partitions are visited, some after.
            assert work.copy_some(1)
        if number == 5:
            work.copy_all().run()
            node.broker.snapshots.end(work)
            for found in (node.killed(), node.power_lost()):
                for consumer in consumers:
                    subject = consumer.group.partition.row.subject
                    again = found.attach(subject, "g")
                    assert [row.sequence for row in found.pull(again).rows][:2] == held[consumer]
    node.turn()
    node.sync()
    found = node.power_lost()
    for consumer in consumers:
        again = found.attach(consumer.group.partition.row.subject, "g")
        rows = found.pull(again).rows
        assert [row.sequence for row in rows] == held[consumer], "held rows are kept, all others have expired"


def test_a_pass_waits_for_the_archive():
    node = Node(retention_seconds=5.0, archive_before_delete=True)
    fill(node)
    node.clock.advance(100)
    assert [removed for removed in retention_steps(node.retention) if removed] == []
    steps = node.retention.steps()
    next(steps)
    # An archiver finishes during a pass.
    ends = [log.durable for log in node.broker.logs]
    write_archived(node.disk, ArchiveMark(ends[0], ends[2], retained_offset=ends[1]))
    finish(steps)
    assert node.broker.message_log.start > 0


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
