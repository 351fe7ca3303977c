"""Keys that failed and recovered lose their own cursors, whatever else is in flight."""

from __future__ import annotations

import pytest

from plait.limits import ServerLimits
from plait.model.logical_partitions import lp_of_key
from tests.broker.ordered_node import Held, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024, 1)]


class Shop:
    """A strict subject, an owner of all LPs, and one slow message."""

    def __init__(self, held_keys: int = 5) -> None:
        self.node = Node(
            message_segment_size=1 << 20, action_segment_size=1 << 20, limits=ServerLimits(held_keys=held_keys)
        )
        make_subject(self.node)
        self.producer = Producer(5)
        self.owner = Owner(self.node, "c1")
        self.owner.lease(ALL)

    def send(self, *rows: tuple[str, bytes]) -> None:
        keyed(self.node, self.producer, list(rows))

    def ack(self, key: str) -> Held:
        row = self.owner.first_of(key)
        assert self.owner.ack(row)
        return row

    def fails_once(self, key: str) -> None:
        """Nack a key's message, and ack its redelivery."""
        self.owner.pull()
        self.owner.nack(self.owner.first_of(key))
        self.owner.pull()
        assert self.ack(key).attempt == 2

    def slow(self, *keys: str) -> None:
        """Keep one message in flight, in a frame with rows of other keys, which fail and recover meanwhile."""
        self.send(("slow", b"s"), *((key, key.encode()) for key in keys))
        for key in keys:
            self.fails_once(key)
        self.owner.pull()


KEYS = [f"k{number}" for number in range(20)]


def test_a_slow_message_does_not_keep_the_cursors_of_recovered_keys():
    shop = Shop()
    shop.slow(*KEYS)
    assert not shop.owner.group.cursors.by_key
    shop.send(("new", b"n"))
    assert [row.body for row in shop.owner.pull()] == [b"n"]


@pytest.mark.parametrize("crash", [False, True])
def test_acked_rows_of_a_recovered_key_are_not_redelivered_with_the_slow_message(crash: bool):
    shop = Shop()
    shop.slow(*KEYS)
    shop.send(("new", b"n"), ("k3", b"more"))
    node = shop.node
    if crash:
        node = node.killed()
    else:
        node.membership.detach(shop.owner.consumer)
        node.turn()
    node.later(20.0)
    node.membership.lose_silent()
    node.turn()
    after = Owner(node, "c2")
    after.lease([(0, 1024, 2)])
    assert [row.body for row in after.pull_all()] == [b"s", b"n", b"more"]


def test_a_waiting_message_without_a_key_does_not_keep_the_cursors_of_recovered_keys():
    shop = Shop()
    shop.send(("", b"keyless"), ("a", b"a"))
    shop.owner.pull()
    # The same logical partitions, so the same cursor.
    shop.owner.nack(next(row for row in shop.owner.rows if not row.key), 60.0)
    shop.owner.nack(shop.owner.first_of("a"))
    shop.owner.pull()
    shop.ack("a")
    shop.owner.pull()
    assert not shop.owner.group.cursors.by_key
    node = shop.owner.node = shop.node.killed()
    shop.owner.attach()
    shop.owner.lease()
    assert shop.owner.pull() == []
    node.later(61.0)
    shop.owner.attach()
    shop.owner.lease()
    assert [(row.body, row.attempt) for row in shop.owner.pull()] == [(b"keyless", 2)]


def test_a_key_keeps_its_cursor_until_its_rows_in_flight_are_done():
    shop = Shop()
    shop.send(("slow", b"s"), ("a", b"a1"))
    shop.fails_once("a")
    shop.send(("a", b"a2"), ("b", b"b1"))
    # Delivered with the other keys, under the tag of their cursor.
    assert [row.body for row in shop.owner.pull()] == [b"a2", b"b1"]
    shop.owner.nack(shop.owner.first_of("a"))
    shop.send(("a", b"a3"))
    assert [row.body for row in shop.owner.pull()] == [b"a2"]
    assert len(shop.owner.group.cursors.by_key) == 1
    shop.ack("a")
    assert [row.body for row in shop.owner.pull()] == [b"a3"]
    shop.ack("a")
    shop.owner.pull()
    assert not shop.owner.group.cursors.by_key


def test_a_recovered_key_does_not_wait_for_other_logical_partitions():
    shop = Shop()
    low = next(key for key in KEYS if lp_of_key(key) < 512)
    high = next(key for key in KEYS if lp_of_key(key) >= 512)
    shop.send((low, b"l"), (high, b"h"))
    shop.fails_once(low)
    other = Owner(shop.node, "c2")
    other.lease([(512, 1024, 2)])
    shop.owner.lease([(0, 512, 1)])
    shop.owner.pull()
    assert not shop.owner.group.cursors.by_key
