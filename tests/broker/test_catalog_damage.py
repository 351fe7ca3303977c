"""A damaged catalog frame loses no subject, and no subject gets the rows of another."""

from __future__ import annotations

import pytest

from plait.frame.view import FrameView
from plait.storage.catalog import CATALOG, read_rows
from plait.storage.logs.recovery import LogScan
from tests.broker.schedule_node import SECOND, delay, later
from tests.support.broker_node import Node, Producer

PATH = "message/00000000000000000000.log"


def with_rows(segment_size: int = 65536) -> tuple[Node, list[bytes], list[tuple[int, int]]]:
    """A subject with 50 rows that no checkpoint includes, and (offset, size) of the frames that define it."""
    node = Node(flush="sync", message_segment_size=segment_size)
    producer = Producer(7)
    bodies = [b"%d" % number for number in range(50)]
    for body in bodies:
        assert node.send("orders", body, producer=producer).acknowledged
    frames = [(offset, frame.size) for offset, frame in LogScan(node.broker.message_log, 0) if _defines(frame)]
    return node, bodies, frames


def _defines(frame: FrameView) -> bool:
    return frame.partition == CATALOG and b"orders" in bytes(frame.buffer)


@pytest.mark.parametrize("filling", [b"\0", b"\xa5"])
def test_no_damaged_sector_of_4096_bytes_makes_rows_outside_of_it_unreadable(filling: bytes):
    node, bodies, frames = with_rows(1 << 20)
    rows = [(offset, frame.size) for offset, frame in LogScan(node.broker.message_log, 0) if frame.partition != CATALOG]
    (first, size), (last, _) = frames[0], frames[-1]
    edges = [first - 4096, first + size - 4096, first, last - 4096, last]
    for start in sorted({*edges, *range(first - 4096, rows[1][0], 104)}):
        damaged = range(max(start, 0), start + 4096)
        if not damaged:
            continue
        disk = node.disk.copy()
        disk.open(PATH).write([filling * len(damaged)], damaged.start)
        again = Node(disk, node.clock, node.config)
        whole = [at + size <= damaged.start or at >= damaged.stop for at, size in rows]
        assert again.bodies("orders") == [body for body, kept in zip(bodies, whole, strict=True) if kept], damaged


@pytest.mark.parametrize("byte", [8, 150])
def test_the_number_of_a_partition_whose_definition_is_lost_is_not_reused(byte: int):
    node, _, frames = with_rows()
    for offset, _ in frames:
        node.disk.flip_bit(PATH, offset + byte, 1)
    again = node.killed()
    for _ in range(2):
        assert again.bodies("others") == []
        assert "orders" not in again.broker.subjects
        again = again.killed()
    [found] = [damage for damage in node.killed().report.damages if "partition 1" in damage.reason]
    assert found.reason == "50 messages cannot be read: the definition of partition 1 is damaged"
    assert again.send("others", b"new", producer=Producer(8)).sequence == 0
    assert again.killed().bodies("others") == [b"new"]


def test_a_deletion_is_not_undone_by_a_flipped_bit():
    node, _, _ = with_rows()
    end = node.broker.message_log.end
    node.broker.delete_subject("orders")
    node.turn()
    for byte in range(0, node.broker.message_log.end - end, 7):
        disk = node.disk.copy()
        disk.flip_bit(PATH, end + byte, byte % 8)
        again = Node(disk, node.clock, node.config)
        assert "orders" not in again.broker.subjects


def test_delayed_rows_of_a_partition_whose_definition_is_lost_wait_and_block_no_other():
    node = Node(flush="sync")
    node.send("others", b"1")
    delay(node, Producer(7), node.clock.now() + SECOND, b"a")
    for offset, frame in list(LogScan(node.broker.message_log, 0)):
        if frame.partition == CATALOG and any(row.name == "orders" and not row.kind for row in read_rows(frame)):
            node.disk.flip_bit(PATH, offset + 100, 3)
    node = node.killed()
    assert "orders" not in node.broker.subjects
    later(node, 2.0)
    assert node.send("others", b"2", producer=Producer(9)).acknowledged
    assert "delayed messages of 'orders' cannot be delivered" in node.broker.schedules.notices[0]
    # They are delivered once the subject exists again.
    assert node.send("orders", b"b", producer=Producer(8)).acknowledged
    later(node, 1.0)
    assert sorted(node.bodies("orders")) == [b"a", b"b"]
