"""Delayed messages wait and none is lost while too many open files prevent opening their buckets."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from plait.broker.schedule import delayed_requests
from plait.broker.schedule.delayed_requests import count_scheduled, list_scheduled
from plait.errors import FlowControl, StorageFailed
from plait.storage.schedule.bucket import DIRECTORY
from tests.broker.schedule_node import SECOND, delay, delivered, later, run_due, schedules
from tests.support.broker_node import Node, Producer

HOUR = 3600 * SECOND


@contextmanager
def too_many_files(disk: Any) -> Iterator[None]:
    """Fail every attempt to open a bucket."""
    opened = disk.open

    def refused(path: str, *, create: bool = False) -> Any:
        if path.startswith(f"{DIRECTORY}/"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return opened(path, create=create)

    disk.open = refused
    try:
        yield
    finally:
        disk.open = opened


@pytest.fixture
def producer() -> Producer:
    return Producer(7)


def test_rows_that_are_nearly_due_when_a_checkpoint_ends_are_not_lost(producer: Producer) -> None:
    node = Node()
    delay(node, producer, [node.clock.now() + 300_000] * 3, b"a", b"b", b"c")
    run_due(node)
    work = node.broker.snapshots.begin().copy_all()
    work.run()
    with too_many_files(node.disk):
        node.broker.snapshots.end(work)
    later(node, 1)
    assert delivered(node) == [b"a", b"b", b"c"]
    assert schedules(node).notices == []


def test_delivery_waits_until_files_can_be_opened(producer: Producer) -> None:
    node = Node()
    delay(node, producer, [node.clock.now() + 60 * SECOND] * 2, b"a", b"b")
    node.checkpoint()
    with too_many_files(node.disk):
        later(node, 61)
        later(node, 2)
        later(node, 2)
        assert delivered(node) == []
        assert node.broker.turn.failed is None
        assert len(schedules(node).notices) == 1
        assert "is paused" in schedules(node).notices[0]
        assert "Too many open files" in schedules(node).notices[0]
    node.checkpoint()
    later(node, 2)
    assert delivered(node) == [b"a", b"b"]
    assert schedules(node).lost_count == 0


def test_a_bucket_that_cannot_be_mapped_again_is_retried(producer: Producer) -> None:
    node = Node()
    delay(node, producer, [node.clock.now() + 60 * SECOND] * 2, b"a", b"b")
    node.checkpoint()
    [bucket] = schedules(node).buckets.values()
    assert bucket.open_run(0)
    bucket.bytes_read += 1 << 30
    with too_many_files(node.disk):
        later(node, 61)
        assert delivered(node) == []
    later(node, 2)
    assert delivered(node) == [b"a", b"b"]


def test_requests_are_refused_and_change_nothing(producer: Producer) -> None:
    node = Node()
    due = node.clock.now() // (24 * HOUR) * 24 * HOUR + 5 * 24 * HOUR
    delay(node, producer, [due, due + 2 * HOUR], b"a", b"b")
    node.checkpoint()
    before = node.broker.message_log.end
    with too_many_files(node.disk):
        for request in (
            lambda: delayed_requests.cancel(node.broker, "orders", 0, due),
            lambda: delayed_requests.reschedule(node.broker, "orders", 0, due, due + SECOND),
            lambda: list_scheduled(node.broker, "orders", 0, 1 << 62, None, 10),
            lambda: count_scheduled(node.broker, None, due + SECOND, 1 << 62, "time"),
            lambda: count_scheduled(node.broker, None, due + SECOND, due + HOUR, "subject"),
        ):
            with pytest.raises(FlowControl, match="Too many open files"):
                request()
    node.turn()
    assert node.broker.message_log.end == before
    assert schedules(node).count == 2
    assert delayed_requests.cancel(node.broker, "orders", 0, due)
    later(node, 6 * 86_400)
    assert delivered(node) == [b"b"]


def test_a_start_that_cannot_open_buckets_fails_and_the_next_one_finds_all_rows(producer: Producer) -> None:
    node = Node()
    due = node.clock.now() + HOUR
    delay(node, producer, [due, due], b"a", b"b")
    node.checkpoint()
    assert delayed_requests.cancel(node.broker, "orders", 0, due)
    node.turn()
    disk = node.disk.copy()
    with too_many_files(disk), pytest.raises(StorageFailed, match="Too many open files"):
        Node(disk)
    node = Node(disk)
    assert schedules(node).count == 1
    later(node, 3600)
    assert delivered(node) == [b"b"]
