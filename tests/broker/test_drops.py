"""Broker orders to drop a partition, which may arrive late or twice."""

from __future__ import annotations

import pytest

from plait.broker.partitions import sealing
from plait.broker.partitions.sealing import LATE_SECONDS
from plait.errors import StaleRoute
from plait.model.settings import SubjectSettings
from tests.broker.ordered_node import SUBJECT, Owner, keyed
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024)]


def make(node: Node, version: int) -> None:
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, ALL, version, SubjectSettings(order="strict"))
    node.turn()


def drop(node: Node, version: int, subject: str = SUBJECT) -> None:
    sealing.drop(node.broker, subject, SUBJECT, version)
    node.turn()


@pytest.mark.parametrize("crash", [False, True])
def test_a_late_drop_order_does_not_affect_a_partition_that_was_made_again(crash: bool):
    node = Node()
    make(node, 1)
    drop(node, 2)
    make(node, 3)
    assert keyed(node, Producer(5), [("a", b"new")]).acknowledged
    if crash:
        node = node.killed()
    with pytest.raises(StaleRoute, match="has route version 3, the order has the older version 2"):
        drop(node, 2)
    owner = Owner(node, "c1")
    owner.lease([(0, 1024, 1)], route=3)
    assert [row.body for row in owner.pull_all()] == [b"new"]


def test_dropping_a_partition_is_idempotent_and_needs_its_subject():
    node = Node()
    make(node, 1)
    drop(node, 2, subject="other")
    assert SUBJECT in node.broker.subjects
    drop(node, 2)
    drop(node, 2)
    assert SUBJECT not in node.broker.subjects


def test_a_late_order_to_make_a_dropped_partition_is_refused():
    """No route would lead to the partition, and no consumer would read rows that producers with an old route send."""
    node = Node()
    make(node, 1)
    drop(node, 2)
    with pytest.raises(StaleRoute, match="was dropped by route version 2, the order has version 1"):
        make(node, 1)
    assert SUBJECT not in node.broker.subjects
    make(node, 3)
    assert SUBJECT in node.broker.subjects


def test_dropped_partitions_are_remembered_for_a_limited_time():
    node = Node()
    make(node, 5)
    drop(node, 6)
    node.clock.advance(LATE_SECONDS)
    make(node, 1)
    assert SUBJECT in node.broker.subjects
    drop(node, 2)
    assert len(node.broker.dropped) == 1


def test_a_send_in_the_turn_that_deletes_its_subject_is_not_damage() -> None:
    node = Node(flush="sync")
    node.send("orders", b"1")
    sent = node.submit(Producer(7).frame("orders", b"2"))
    node.broker.delete_subject("orders")
    node.turn()
    assert sent.acknowledged
    assert node.killed().report.damages == []
