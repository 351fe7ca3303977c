"""Publishing a large batch: it is synced while more is copied, other requests are served, memory is released."""

from __future__ import annotations

import errno

import pytest

from plait.broker.staging import stage_publisher as staging
from tests.broker.stage_node import Task, ask, complete, publish, settle
from tests.support.broker_node import Node, Producer


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def task() -> Task:
    return Task(11)


@pytest.fixture
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish one frame per turn."""
    monkeypatch.setattr(staging, "PUBLISH_SIZE_MAX", 1)


def written(node: Node, task: Task, count: int) -> list[bytes]:
    """Write and complete a stage of ``count`` frames. Returns their bodies."""
    for n in range(count):
        task.write(node, b"%d" % n)
    complete(node, task)
    return task.bodies


# --- other requests -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_turns")
def test_published_frames_are_synced_while_more_are_copied(node: Node, task: Task) -> None:
    written(node, task, 2)
    answers = ask(node, [task])
    node.commit()
    assert node.broker.turn.sync_wanted
    node.sync()
    assert node.broker.message_log.durable == node.broker.message_log.end
    assert (node.bodies("orders"), answers) == ([b"0"], [])
    settle(node)
    assert (node.bodies("orders"), answers) == ([b"0", b"1"], [None])


@pytest.mark.usefixtures("small_turns")
def test_only_one_turn_is_copied_ahead_of_a_running_sync(node: Node, task: Task) -> None:
    bodies = written(node, task, 8)
    ask(node, [task])
    node.commit()
    for done in range(1, 5):
        work = node.broker.turn.begin_sync()
        for _ in range(5):
            node.broker.run_timers()
            node.commit()
        assert node.bodies("orders") == bodies[: done + 1]
        work.run()
        node.broker.turn.end_sync(work)
        assert node.broker.turn.sync_wanted, "the next sync can begin at once"
    settle(node)
    assert node.bodies("orders") == bodies


@pytest.mark.usefixtures("small_turns")
def test_a_slow_disk_during_a_large_batch_refuses_no_sends(task: Task) -> None:
    node = Node(flush="async")
    written(node, task, 40)
    answers, producer = ask(node, [task]), Producer(7)
    node.commit()
    for n in range(5):
        work = node.broker.turn.begin_sync()
        for _ in range(10):
            node.clock.advance(0.03)
            node.commit()
        sent = node.submit(producer.frame("other", b"%d" % n))
        node.commit()
        assert sent.acknowledged, sent.answers
        work.run()
        node.broker.turn.end_sync(work)
    settle(node)
    assert answers == [None]


# --- faults -------------------------------------------------------------------------------------


def test_publishing_survives_a_full_disk_and_retention(node: Node, task: Task) -> None:
    for n in range(14):
        task.write(node, b"%x" % n * 900)
    complete(node, task)
    log = node.broker.message_log
    assert len(log.segments) > 1
    for _ in range(6):
        node.checkpoint()
    answers = ask(node, [task])
    # One more segment can be created, the next one cannot.
    for operation in ("create", "allocate"):
        node.disk.fail(operation, path="message/*", after=1, error=errno.ENOSPC)
    node.turn()
    assert 0 < len(node.bodies("orders")) < 14
    for _ in range(6):
        node.sync()
        node.checkpoint()
        node.retention.run()
    assert log.start > 0
    node.later(2)
    node.later(2)
    assert (answers, node.broker.turn.failed) == ([None], None)
    assert node.bodies("orders") == task.bodies


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_turns")
def test_the_memory_of_published_frames_is_released_in_merged_ranges(
    monkeypatch: pytest.MonkeyPatch, node: Node
) -> None:
    tasks = [Task(11), Task(12), Task(13)]
    for each in tasks:
        each.open(node)
    log = node.broker.message_log
    before = log.end
    for each in tasks * 2:
        each.write(node, b"x" * 100)
    end = log.end
    node.send("orders", b"other")
    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(log, "forget", lambda *range_: forgotten.append(range_))
    publish(node, *tasks[:2])
    size = (end - before) // 6
    firsts = [before, before + 3 * size]
    # The frames of the first task are single ranges; those of the second extend them.
    assert forgotten == [(at, at + size) for at in firsts] + [(at, at + 2 * size) for at in firsts]
    forgotten.clear()
    publish(node, tasks[2])
    assert forgotten == [(at + 2 * size, at + 3 * size) for at in firsts]
