"""Producers in checkpoints: a shard is written when one of its producers changed, and includes all of them."""

from __future__ import annotations

from plait.storage.producers import SHARDS
from tests.support.broker_node import Node, Producer, Sent


def producer_shards(node: Node) -> dict[str, bytes]:
    """The producer shards that a checkpoint writes now."""
    work = node.broker.snapshots.begin().copy_all()
    work.run()
    node.broker.snapshots.end(work)
    assert work.written
    return {name: data for name, data in work.shards.items() if name.startswith("producers-")}


def test_only_the_shards_of_producers_that_sent_are_written_again():
    node = Node()
    producers = {number: Producer(number) for number in range(1, 3 * SHARDS)}
    for producer in producers.values():
        assert node.send("orders", b"a", producer=producer).acknowledged
    assert len(producer_shards(node)) == SHARDS
    assert producer_shards(node) == {}
    node.send("orders", b"b", producer=producers[5])
    node.send("orders", b"b", producer=producers[SHARDS + 5])
    node.send("orders", b"b", producer=producers[7])
    assert sorted(producer_shards(node)) == ["producers-05", "producers-07"]


def test_a_producer_whose_shard_was_written_with_others_is_known_after_a_restart():
    node = Node(flush="sync")
    sends: list[Sent] = []
    for number in range(1, 3 * SHARDS):
        sends.append(node.send("orders", b"%d" % number, producer=Producer(number)))
        if number % 50 == 0:
            node.checkpoint()
    again = node.restart()
    assert len(again.broker.producers) == len(sends)
    for sent in sends:
        resent = again.submit(Sent("orders", sent.data, sent.bodies))
        again.turn()
        assert resent.sequence == sent.sequence
    assert len(again.bodies("orders")) == len(sends)


def test_the_next_checkpoint_does_not_include_a_forgotten_producer():
    node = Node()
    for number in (3, 3 + SHARDS):
        node.send("orders", b"a", producer=Producer(number))
        node.clock.advance(4 * 86400.0)
    both = producer_shards(node)["producers-03"]
    assert node.broker.producers.forget(node.clock.now()) == [3]
    assert len(producer_shards(node)["producers-03"]) < len(both)
    assert set(node.restart().broker.producers.ids()) == {3 + SHARDS}
