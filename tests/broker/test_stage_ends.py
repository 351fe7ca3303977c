"""Stages that are never published expire, and their segments are deleted once that is durable."""

from __future__ import annotations

import errno

import msgspec
import pytest

from plait.broker import catalog
from plait.errors import DamageError, Expired
from plait.model.settings import SubjectSettings
from plait.storage.logs.segment import segment_name
from tests.broker.stage_node import Task, ask, ask_and_settle, complete, publish, settle, staged
from tests.support.broker_node import Node

DAY = 86_400


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def task() -> Task:
    return Task(11)


def fill_and_expire(node: Node) -> None:
    """Send and delete rows, with enough checkpoints that only stages can still retain segments."""
    for _ in range(6):
        node.send("passing", *[b"y" * 1000] * 6)
        node.broker.delete_subject("passing")
        node.checkpoint()
        node.retention.run()


def test_a_stage_that_is_never_published_expires_and_is_remembered(node: Node, task: Task) -> None:
    task.write(node, *[b"x" * 1000] * 20)
    start = node.broker.message_log.start
    node.clock.advance(6 * DAY)
    node.retention.run()
    complete(node, task)
    node.clock.advance(2 * DAY)
    node.retention.run()
    fill_and_expire(node)
    assert node.broker.message_log.start > start
    node = node.killed()
    for call in (node.broker.stages.complete, node.broker.publisher.publish):
        with pytest.raises(Expired, match="expired"):
            call([task.named], lambda _: None)
    # The stage stays known without limit: an unknown stage would count as published.
    node.clock.advance(500 * DAY)
    node.retention.run()
    with pytest.raises(Expired, match="expired"):
        node.broker.publisher.publish([task.named], lambda _: None)
    node.broker.turn.limits = msgspec.structs.replace(node.broker.limits, stages_expired=0)
    node.retention.run()
    assert staged(node) == 0


def test_an_open_stage_retains_its_segments(node: Node, task: Task) -> None:
    task.write(node, b"a")
    node.broker.create_subject("other", SubjectSettings(retention_seconds=1))
    for _ in range(4):
        node.send("other", *[b"y" * 1000] * 6)
        node.clock.advance(5)
        node.checkpoint()
        node.retention.run()
    assert node.broker.message_log.start == 0
    publish(node, task)
    assert node.bodies("orders") == [b"a"]


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("published", [True, False])
def test_segments_of_a_stage_are_deleted_only_when_its_end_is_durable(flush: str, published: bool, task: Task) -> None:
    node = Node(flush=flush)
    bodies = [b"%d" % n + b"x" * 1000 for n in range(20)]
    for body in bodies:
        task.write(node, body)
    complete(node, task)
    for _ in range(6):
        node.checkpoint()
    if published:
        ask(node, [task])
        node.commit()
    else:
        node.clock.advance(8 * DAY)
    for _ in range(3):
        assert node.retention.run() == []
    again = node.power_lost()
    publish(again, task)
    assert again.bodies("orders") == bodies
    node.turn()
    node.sync()
    assert node.retention.run() != []
    again = node.power_lost()
    if published:
        publish(again, task)
        assert again.bodies("orders") == bodies
    else:
        with pytest.raises(Expired):
            ask(again, [task])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_stages_that_cannot_expire_yet_block_nothing_else(
    code: int, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(retention_seconds=10.0)
    for _ in range(6):
        node.send("orders", *[b"y" * 1000] * 7)
    task.write(node, b"a")
    node.clock.advance(8 * DAY)
    for _ in range(6):
        node.checkpoint()
    log = node.broker.message_log
    # The segment is full, and no other can be created.
    node.send("orders", b"y" * (log.segments[-1].end - log.end - 300))
    node.sync()
    for operation in ("create", "allocate"):
        node.disk.fail(operation, path="message/*", times=None, error=code)
    assert node.retention.run() != []
    assert "cannot be expired yet" in caplog.text
    assert node.broker.turn.failed is None
    node = node.killed()
    node.retention.run()
    with pytest.raises(Expired):
        ask(node, [task])


def test_more_stages_than_fit_in_one_catalog_frame_expire_together(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(catalog, "CATALOG_FRAME_ROWS", 3)
    sizes: list[int] = []
    define = node.broker.segment_headers.define
    monkeypatch.setattr(node.broker.segment_headers, "define", lambda rows: sizes.append(len(rows)) or define(rows))
    tasks = [Task(n) for n in range(1, 9)]
    for task in tasks:
        task.write(node, b"a")
    sizes.clear()
    assert node.broker.stages.drop([1]) == 1
    node.clock.advance(8 * DAY)
    node.retention.run()
    assert staged(node) == 7
    node.broker.turn.limits = msgspec.structs.replace(node.broker.limits, stages_expired=0)
    node.retention.run()
    assert staged(node) == 0
    assert sizes == [1, 3, 3, 1, 3, 3, 1]
    node.turn()
    assert staged(node.killed()) == 0


@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_stage_expires_and_releases_its_segments(
    node: Node, task: Task, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    task.write(node, b"spoilt")
    complete(node, task)
    node.checkpoint()
    record = task.open(node).consume_log.record(0)
    node.disk.flip_bit(f"message/{segment_name(0)}", record.offset + record.size - 1, 0)
    assert isinstance(ask_and_settle(node, task), DamageError)
    if restarted:
        node = node.killed()
        caplog.clear()
        settle(node)
    assert "orders" in caplog.text
    assert "000000000000000b" in caplog.text
    node.clock.advance(6 * DAY)
    node.retention.run()
    assert isinstance(ask_and_settle(node, task), DamageError)
    node.clock.advance(2 * DAY)
    node.retention.run()
    node.turn()
    for each in (node.killed(), node):
        with pytest.raises(Expired):
            ask(each, [task])
        fill_and_expire(each)
        assert each.broker.message_log.start > 0


def test_a_stage_that_waits_for_space_does_not_expire(node: Node, task: Task) -> None:
    task.write(node, b"a")
    answers = ask(node, [task])
    node.broker.turn.low_space = "full"
    node.turn()
    node.clock.advance(8 * DAY)
    node.retention.run()
    node.broker.turn.low_space = ""
    settle(node)
    assert answers == [None]
    assert node.bodies("orders") == [b"a"]
