"""Shared groups with priorities and tenants, step by step: what each pull delivers, and what remains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.broker.groups.group_settings import set_fair_by
from plait.broker.views import group_view
from plait.client.send.encoding import encode_headers
from plait.client.send.open_rows import hash_keys
from plait.errors import FrameError, GroupMismatch, InvalidArgument
from plait.limits import PRIORITY_SHARE
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from tests.support.broker_node import Node, Producer, Pulled

SUBJECT = "work"


@pytest.fixture
def node() -> Node:
    node = Node()
    node.broker.create_subject(SUBJECT, SubjectSettings())
    return node


def send(node: Node, producer: Producer, count: int, **columns: Any) -> None:
    node.submit(producer.frame(SUBJECT, *[b"x"] * count, **columns))
    node.turn()


def keyed(key: str, count: int) -> dict[str, Any]:
    return {"keys": [key] * count, "key_hashes": hash_keys([key] * count, count)}


def sequences(pulled: Pulled) -> list[int]:
    return [row.sequence for row in pulled.rows]


def test_a_high_priority_is_delivered_before_everything_that_waits(node: Node):
    producer = Producer(1)
    for _ in range(50):
        send(node, producer, 20)
    send(node, producer, 1, priority=9)
    send(node, producer, 3, priority=np.array([2, 9, 0], np.uint8))
    assert sequences(node.pull(node.attach(SUBJECT, "g"), 4)) == [1000, 1002, 1001, 0]


def test_lower_priorities_get_one_of_sixteen_rows(node: Node):
    producer = Producer(1)
    send(node, producer, 100)
    send(node, producer, 100, priority=5)
    send(node, producer, 2000, priority=9)
    consumer = node.attach(SUBJECT, "g")
    got = [sequence for _ in range(100) for sequence in sequences(node.pull(consumer, PRIORITY_SHARE))]
    low, middle = sum(s < 100 for s in got), sum(100 <= s < 200 for s in got)
    assert len(got) == 1600
    assert low + middle in range(95, 101)
    # The lower priorities take turns.
    assert abs(low - middle) <= 1


def test_each_tenant_gets_the_same_share(node: Node):
    producer = Producer(1)
    send(node, producer, 5000, **keyed("large", 5000))
    for number in range(9):
        send(node, producer, 10, **keyed(f"small-{number}", 10))
    consumer = node.attach(SUBJECT, "g", fair_by="key")
    got = sequences(node.pull(consumer, 100))
    assert len(got) == 100
    assert sum(sequence >= 5000 for sequence in got) == 90
    assert sequences(node.pull(consumer, 3)) == [10, 11, 12]


def test_a_tenant_may_be_a_header(node: Node):
    producer = Producer(1)
    send(node, producer, 100, headers=[encode_headers({"tenant": "a"})] * 100)
    send(node, producer, 2, headers=[encode_headers({"tenant": 7}), encode_headers({"other": 1})])
    consumer = node.attach(SUBJECT, "g", fair_by="tenant")
    assert sequences(node.pull(consumer, 6)) == [0, 1, 2, 3, 100, 101]


def test_rows_that_were_overtaken_are_new_rows_after_a_restart(node: Node):
    producer = Producer(1)
    send(node, producer, 10)
    send(node, producer, 1, priority=1)
    consumer = node.attach(SUBJECT, "g")
    assert sequences(node.pull(consumer, 1)) == [10]
    assert node.ack(consumer, (10, 11))
    node.checkpoint()
    again = node.killed()
    view = group_view(again.partition(SUBJECT).groups["g"])
    assert (view.lag, view.returned, view.floor, view.next) == (10, 0, 0, 11)
    pulled = again.pull(again.attach(SUBJECT, "g"), 100)
    assert sequences(pulled) == list(range(10))
    assert {attempt for _, _, attempt in pulled.ranges} == {1}


def test_retention_expires_rows_that_were_overtaken_and_retains_none():
    node = Node(retention_seconds=60.0, message_segment_size=4096)
    node.broker.create_subject(SUBJECT, SubjectSettings())
    producer = Producer(1)
    send(node, producer, 10)
    send(node, producer, 1, priority=1)
    consumer = node.attach(SUBJECT, "g")
    assert sequences(node.pull(consumer, 1)) == [10]
    for _ in range(KEEP):
        node.checkpoint()
    node.clock.advance(120)
    send(node, producer, 1)
    node.retention.run()
    node.turn()
    group = node.partition(SUBJECT).groups["g"]
    view = group_view(group)
    assert (node.partition(SUBJECT).start, view.lost, view.lag) == (11, 10, 2)
    assert list(group.retained.offsets) == [10]


def test_a_strict_subject_refuses_priorities():
    node = Node()
    node.broker.create_subject(SUBJECT, SubjectSettings(order="strict"))
    error = node.submit(Producer(1).frame(SUBJECT, b"x", priority=3)).error
    assert isinstance(error, InvalidArgument)
    assert "subject 'work' is strict" in str(error)


def test_a_priority_over_nine_is_refused(node: Node):
    error = node.submit(Producer(1).frame(SUBJECT, b"x", b"y", priority=np.array([0, 10], np.uint8))).error
    assert isinstance(error, FrameError)
    assert "priority 10 is over 9" in str(error)


def test_members_must_name_the_same_tenant(node: Node):
    consumer = node.attach(SUBJECT, "g", fair_by="key")
    with pytest.raises(GroupMismatch, match="has fair_by='key', this member asks for fair_by='tenant'"):
        node.attach(SUBJECT, "g", "c2", fair_by="tenant")
    with pytest.raises(InvalidArgument, match="is for shared groups"):
        node.attach(SUBJECT, "h", ordered=True, fair_by="key")
    set_fair_by(node.broker, consumer.group, "tenant")
    node.turn()
    again = node.killed()
    assert again.attach(SUBJECT, "g", "c2", fair_by="tenant").group.definition.fair_by == "tenant"


def test_a_partition_without_priorities_is_not_looked_ahead(node: Node):
    send(node, Producer(1), 10)
    consumer = node.attach(SUBJECT, "g")
    assert len(node.pull(consumer, 100).rows) == 10
    assert consumer.group.ranked is None  # type: ignore[attr-defined]
