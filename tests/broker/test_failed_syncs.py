"""A start after a failed sync finds frames in the page cache that no later sync writes, and writes them again.

Linux marks the pages of a failed sync clean and keeps them readable, so a restart on the same machine reads them back.
"""

from __future__ import annotations

import random

import pytest

from plait.broker.groups.group import NackOutcome
from plait.errors import StorageFailed
from plait.frame.view import FrameView
from plait.testing.cached_file import SECTOR_SIZE
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node, Producer, Sent


def failed(node: Node, path: str) -> SimulatedDisk:
    """Fail the next sync of a log. Returns the disk as the next process on the same machine reads it."""
    node.disk.fail("sync", path=path)
    node.sync()
    assert node.broker.turn.failed is not None
    return node.disk.copy()


@pytest.mark.parametrize("number", range(5))
def test_a_duplicate_is_acknowledged_only_once_it_is_durable(number: int):
    node = Node(SimulatedDisk(seed=number), flush="sync")
    node.send("orders", b"safe")
    sent = node.submit(Producer(7).frame("orders", b"a" * 2000, b"b" * 2000))
    node.commit()
    again = Node(failed(node, "message/*"), node.clock, node.config)
    resent = again.submit(Sent("orders", sent.data, sent.bodies))
    again.turn()
    assert resent.sequence == 1
    assert again.power_lost().bodies("orders") == [b"safe", *sent.bodies]


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_rows_that_a_start_serves_survive_a_power_loss(flush: str):
    node = Node(SimulatedDisk(seed=2), flush=flush)
    node.checkpoint()
    bodies = [b"%04d" % number * 300 for number in range(30)]
    for body in bodies:
        node.broker.submit(node.partition("orders"), Producer(int(body[:4]) + 1).frame("orders", body).view, None)
        node.commit()
    assert len(node.broker.message_log.segments) > 2
    again = Node(failed(node, "message/*"), node.clock, node.config)
    assert again.bodies("orders") == bodies
    assert again.power_lost().bodies("orders") == bodies


@pytest.mark.parametrize("number", range(5))
def test_retained_rows_that_a_start_finds_survive_a_power_loss(number: int):
    node = Node(SimulatedDisk(seed=number), flush="sync")
    for row in range(8):
        node.send("orders", b"%d" % row * 200)
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    node.broker.nack(consumer, [(0, 8, node.broker.turn.epoch)], None, failure=NackOutcome(None, reject=True))
    node.commit()
    again = Node(failed(node, "retained/*"), node.clock, node.config).power_lost()
    group = again.group("orders", "g")
    assert group.failures.dead.count == 8
    for sequence in range(8):
        frame = group.retained.frame(again.broker.retained_log, sequence)
        assert frame is not None
        frame.verify()


def test_acks_after_events_that_a_start_found_survive_the_loss_of_its_checkpoint():
    node = Node(SimulatedDisk(seed=3), flush="sync")
    for number in range(100):
        node.send("orders", b"%d" % number)
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    node.checkpoint()
    for number in range(0, 60, 2):
        node.broker.ack(consumer, [(number, number + 1, node.broker.turn.epoch)], None)
        node.commit()
    again = Node(failed(node, "action/*"), node.clock, node.config)
    consumer = again.attach("orders", "g")
    acked = again.ack(consumer, (61, 99, 1))
    assert acked == [True]
    disk = again.disk.after_crash(keep="none")
    newest = [name for name in disk.list("checkpoints") if name.startswith("manifest")][-1]
    disk.flip_bit(f"checkpoints/{newest}", 20, 2)
    last = Node(disk, node.clock, node.config)
    assert last.report.rejected_checkpoints
    log = last.group("orders", "g").cursor
    assert not log.returned.overlap(61, 99)
    assert not any(held.overlap(61, 99) for held in log.held.values())


def sector_sized(node: Node, producer: int) -> Sent:
    """A frame after which the log ends at a sector boundary."""
    size = FrameView(Producer(producer).frame("orders", b"").data).size
    room = -(node.broker.message_log.end + size) % SECTOR_SIZE + 4 * SECTOR_SIZE
    return Producer(producer).frame("orders", b"%d" % producer * room)


def test_frames_that_a_start_cut_stay_cut_after_the_sync_of_the_cut_failed():
    """A cut frame is still on the disk after new frames of the log; its epoch shows that it is not part of the log."""
    path, seen = "message/00000000000000000000.log", 0
    for seed in range(20):
        node = Node(SimulatedDisk(seed=seed), flush="async")
        node.send("orders", b"safe")
        node.sync()
        lost_from = node.broker.message_log.end
        sents = [node.submit(sector_sized(node, 8))]
        node.turn()
        sents.append(node.submit(sector_sized(node, 9)))
        node.turn()
        # The power loss loses sectors of the first frame, but not the second.
        disk = node.disk.after_crash(random.Random(seed), keep="all")
        file = disk.open(path)
        file.write([bytes(2 * SECTOR_SIZE)], lost_from + SECTOR_SIZE)
        file.sync()
        disk.fail("sync", path="message/*")
        with pytest.raises(StorageFailed):
            Node(disk, node.clock, node.config)
        found = Node(disk.copy(), node.clock, node.config)
        assert found.bodies("orders") == [b"safe"]
        again = found.submit(Sent("orders", sents[0].data, sents[0].bodies))
        found.turn()
        found.sync()
        assert again.acknowledged
        last = found.disk.after_crash(keep="none")
        seen += sents[1].data[-600:] in last.read(path)
        after = Node(last, node.clock, node.config)
        assert after.bodies("orders") == [b"safe", *sents[0].bodies]
        again = after.submit(Sent("orders", sents[1].data, sents[1].bodies))
        after.turn()
        assert again.sequence == 2
        assert after.partition("orders").epochs == [(0, 1), (1, 2), (2, 3)]
    assert seen > 2
