"""Keys of an ordered group that failed once, whose cursors have caught up or nearly so with those of their LPs."""

from __future__ import annotations

from plait.limits import ServerLimits
from tests.broker.ordered_node import Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024, 1)]


def node_with(**settings: object) -> Node:
    node = Node(**settings)
    make_subject(node)
    return node


def bodies(rows: list) -> list[bytes]:
    return [row.body for row in rows]


def fail_and_ack(owner: Owner, key: str) -> None:
    """Nack the first row of a key, and ack its redelivery."""
    owner.nack(owner.first_of(key))
    [again] = owner.pull()
    owner.ack(again)


def test_an_ack_of_a_range_shared_by_keys_does_not_settle_later_rows_of_one_of_them():
    node = node_with(limits=ServerLimits(consumer_ranges=2))
    producer = Producer(5)
    first_rows = [("x", b"x1"), ("a", b"a0"), ("a", b"a1"), ("y", b"y1"), ("b", b"b0"), ("b", b"b1"), ("z", b"z1")]
    keyed(node, producer, first_rows)
    owner = Owner(node, "c1")
    owner.lease(ALL)
    owner.pull()
    # Both keys have a row in flight, so they keep their cursors.
    for key in ("a", "b"):
        fail_and_ack(owner, key)
        [in_flight] = owner.pull()
        assert in_flight.key == key
    # The consumer holds two ranges of the other keys, its limit: only rows of the two keys are delivered.
    owner.ack(owner.first_of("y"))
    keyed(node, producer, [("a", b"a2"), ("b", b"b2"), ("a", b"a3"), ("b", b"b3")])
    shared = owner.pull()
    assert bodies(shared) == [b"a2", b"b2", b"a3", b"b3"]
    owner.ack(owner.first_of("a"), owner.first_of("b"))
    owner.nack(owner.first_of("a"))
    again = owner.pull()
    assert bodies(again) == [b"a2"]
    owner.ack(*again)
    assert bodies(owner.pull()) == [b"a3"]
    # A client acks one range that includes rows of the frame that it has returned.
    _, first, _, last = shared
    node.broker.ack(owner.consumer, [(first.sequence, last.end, first.epoch)], lambda: None, [first.tag])
    owner.rows = [row for row in owner.rows if row not in (first, last)]
    node.turn()
    node = node.killed()
    owner.node, owner.rows = node, []
    owner.attach()
    owner.lease(ALL)
    assert b"a3" in bodies(owner.pull_all())


def test_a_key_that_catches_up_gets_its_next_row_at_once():
    node = node_with()
    producer = Producer(5)
    keyed(node, producer, [("a", b"a1"), ("x", b"x1")])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"))
    keyed(node, producer, [("x", b"x2")])
    assert bodies(owner.pull()) == [b"a1", b"x2"]
    owner.ack(owner.first_of("a"))
    keyed(node, producer, [("a", b"a2")])
    waiting = node.pull(owner.consumer, wait=10)
    assert waiting.answered
    assert waiting.bodies == [b"a2"]
