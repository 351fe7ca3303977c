"""Rows of ordered groups that are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.broker.groups.group import NackOutcome
from plait.broker.groups.ordered import row_reader
from plait.broker.partitions.frame_search import keys_in
from plait.storage.logs.consume_log import RECORD
from tests.broker.ordered_node import SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024, 1)]


def node_with() -> Node:
    node = Node(flush="sync")
    make_subject(node)
    return node


def test_held_rows_are_read_once_for_all_keys_that_fail(monkeypatch: pytest.MonkeyPatch):
    node = node_with()
    keyed(node, Producer(5), [(f"k{number}", b"%d" % number) for number in range(100)])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    rows = owner.pull()[:50]
    reads = []

    def counted(*place: Any) -> Iterator:
        reads.append(place)
        return keys_in(*place)

    monkeypatch.setattr(row_reader, "keys_in", counted)
    ranges = [(row.sequence, row.end, row.epoch) for row in rows]
    node.broker.nack(owner.consumer, ranges, None, NackOutcome(0.0), [row.tag for row in rows])
    node.turn()
    assert len(node.group(SUBJECT, "billing").cursors.by_key) == 50
    assert len(reads) < 5


def test_held_rows_with_a_damaged_consume_log_record_stay_held():
    """The record is derived state: the frame is found in the message log, as when it was delivered."""
    node = node_with()
    producer = Producer(5)
    for body in (b"1", b"2", b"3"):
        keyed(node, producer, [("a", body)])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    assert [row.body for row in owner.pull_all()] == [b"1", b"2", b"3"]
    node.checkpoint()
    path = node.partition(SUBJECT).consume_log.path
    node.disk.flip_bit(path, RECORD.itemsize + RECORD.fields["offset"][1], 4)
    again = node.killed()
    owner.node = again
    owner.attach()
    owner.lease(ALL)
    assert owner.pull() == []
    owner.ack(*owner.rows)
    assert again.group(SUBJECT, "billing").floor == 3
