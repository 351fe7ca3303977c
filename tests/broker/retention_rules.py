"""The scenarios of R21, retention; ``test_rules`` runs them, with and without their defects."""

from __future__ import annotations

from typing import Any

from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from tests.support.broker_node import Node, Producer, Sent


def aged(**settings: Any) -> tuple[Node, Producer, list[Sent]]:
    """Sixty rows over six minutes, with a checkpoint after every ten rows; the first fifty are acked."""
    node = Node(flush="sync", retention_seconds=100.0, **settings)
    producer = Producer(7)
    consumer = node.attach("orders", "g")
    slow = node.attach("orders", "slow")
    node.pull(slow, 5)
    sends = []
    for number in range(60):
        sends.append(node.send("orders", b"%02d " % number * 150, producer=producer))
        node.clock.advance(6)
        if number < 50:
            node.pull(consumer, 1)
            node.ack(consumer, (number, number + 1))
        if number % 10 == 9:
            node.checkpoint()
    return node, producer, sends


def r21_the_start_moves_and_an_overtaken_group_can_see_it() -> None:
    node, _, _ = aged()
    node.retention.run()
    node.turn()
    start = node.partition("orders").start
    assert 40 <= start <= 50
    assert node.group("orders", "g").lost_count == 0
    assert node.group("orders", "slow").lost_count == start
    for again in (node.power_lost(), node.restart()):
        assert again.group("orders", "slow").lost_count >= start
        assert again.group("orders", "slow").cursor.next >= start


def r21_both_logs_are_kept_from_the_oldest_checkpoint_on() -> None:
    node, _, sends = aged()
    node.retention.run()
    node.turn()
    node.checkpoint()
    removed = node.retention.run()
    oldest = node.broker.checkpoints.oldest
    assert oldest is not None
    assert node.broker.message_log.start <= oldest.message_offset
    assert node.broker.action_log.start <= oldest.action_offset
    assert removed or node.broker.message_log.start > 0
    manifests = [name for name in node.disk.list(CHECKPOINTS) if name.startswith("manifest")]
    for name in manifests[1:]:
        node.disk.flip_bit(f"{CHECKPOINTS}/{name}", 30, 1)
    again = node.power_lost()
    assert len(again.report.rejected_checkpoints) == len(manifests) - 1
    assert again.group("orders", "g").cursor.floor == 50, "acks are in the action log or in the checkpoint"
    before = len(again.stored("orders"))
    for sent in sends:
        again.submit(Sent("orders", sent.data, sent.bodies))
    again.turn()
    assert len(again.stored("orders")) == before, "and so are the stored rows of every producer"


def r21_a_segment_is_deleted_when_all_its_partitions_allow() -> None:
    node = Node(flush="sync", retention_seconds=None)
    node.broker.create_subject("short", SubjectSettings(retention_seconds=1.0))
    node.send("kept", b"precious")
    producer = Producer(7)
    for _ in range(60):
        node.send("short", b"x" * 700, producer=producer)
        node.clock.advance(1)
    for _ in range(6):
        node.checkpoint()
    node.retention.run()
    assert node.partition("short").start > 50
    assert node.bodies("kept") == [b"precious"]
    node.broker.catalog.update_subject("kept", SubjectSettings(retention_seconds=1.0))
    node.send("kept", b"young")
    assert len(node.retention.run()) >= 4
    assert node.bodies("kept") == [b"young"]
    assert node.power_lost().bodies("kept") == [b"young"]
