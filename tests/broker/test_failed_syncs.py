"""A start after a failed sync finds frames in the page cache that no later sync writes, and writes them again.

Linux marks the pages of a failed sync clean and keeps them readable, so a restart on the same machine reads them back.
"""

from __future__ import annotations

import random

import pytest

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
