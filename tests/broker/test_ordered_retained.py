"""Waiting retries of an ordered group outlast retention, from whichever checkpoint a start begins."""

from __future__ import annotations

import pytest

from plait.model.retry_policy import Retry
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from plait.storage.checkpoint import KEEP
from tests.broker.ordered_node import SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

RETRY = Retry(first=500.0, factor=1.0, jitter=0.0, attempts=None)


def waiting_beyond_retention(order: str) -> tuple[Node, Owner]:
    """The first message of a key waits for its retry; retention has copied it and deleted its segment."""
    node = Node(flush="sync", retention_seconds=20.0)
    make_subject(node, order)
    producer = Producer(7)
    owner = Owner(node, "c", retry=RETRY)
    owner.lease([(0, 1024, 1)])
    keyed(node, producer, [("a", b"first"), ("b", b"other")])
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    owner.ack(owner.first_of("b"))
    for number in range(6 * KEEP):
        keyed(node, producer, [("filler", b"x" * 3000)])
        if number < 3 * KEEP and number % 2:
            node.checkpoint()
        node.clock.advance(2.0)
    node.broker.leases.ask(owner.consumer, owner.wants, [], [], 2**62)
    node.turn()
    owner.ack(*owner.pull_all())
    # The first run makes the copy; once that is durable, the second deletes the segment.
    node.retention.run()
    node.turn()
    node.sync()
    assert node.retention.run() != []
    assert node.partition(SUBJECT).start > 1
    return node, owner


@pytest.mark.parametrize("order", ["strict", "best_tried"])
@pytest.mark.parametrize("how", ["killed", "power_lost", "fallen back"])
def test_a_waiting_retry_is_read_from_its_copy_when_the_partition_start_is_stale(how: str, order: str):
    node, owner = waiting_beyond_retention(order)
    if how == "power_lost":
        again = node.power_lost()
    else:
        disk = node.disk.copy()
        if how == "fallen back":
            newest = max(name for name in disk.list(CHECKPOINTS) if name.startswith("manifest-"))
            disk.flip_bit(f"{CHECKPOINTS}/{newest}", 20, 2)
        again = Node(disk, node.clock, node.config)
    keyed(again, Producer(8), [("a", b"second")])
    owner = Owner(again, "c", retry=RETRY)
    again.later(60.0)
    again.membership.lose_silent()
    owner.attach()
    owner.lease([(0, 1024, 2)])
    again.later(600.0)
    owner.lease([(0, 1024, 2)])
    handled: list[bytes] = []
    for _ in range(50):
        owner.pull()
        for row in owner.ready():
            handled.append(row.body)
            owner.ack(row)
    mine = [body for body in handled if body in (b"first", b"second")]
    assert sorted(mine) == [b"first", b"second"]
    if order == "strict":
        assert mine == [b"first", b"second"], "the key continued past the waiting message"
    assert again.group(SUBJECT, "billing").lost_count == 0
