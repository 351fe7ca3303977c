"""Restarts: clean and unclean ends, unreadable checkpoints, newer formats, damage in any file."""

from __future__ import annotations

import random

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataDirError, FrameError, StorageFailed
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from plait.storage.checkpoint import FORMAT_VERSION
from plait.storage.logs.action_events import Pulled
from plait.storage.ranges import Ranges
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node, Producer


def contents(disk: SimulatedDisk, directory: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in disk.list(directory):
        path = f"{directory}/{name}" if directory else name
        if path in disk._directories:
            found |= contents(disk, path)
        else:
            found[path] = disk.read(path)
    return found


def busy(flush: str = "sync") -> Node:
    """A node with rows, groups in every state, and a checkpoint in between."""
    node = Node(flush=flush)
    producer = Producer(7)
    consumers = [node.attach("orders", "g", f"c{n}") for n in range(3)]
    once = node.attach("orders", "once", "o", delivery="at_most_once")
    broadcast = node.attach("orders", None, "b", start="earliest")
    for number in range(40):
        node.send("orders", b"%02d" % number, producer=producer)
        consumer = consumers[number % 3]
        node.pull(consumer, 1)
        if number % 4 == 0:
            node.ack(consumer, (number, number + 1))
        elif number % 4 == 1:
            node.nack(consumer, (number, number + 1))
        node.pull(once, 1)
        node.pull(broadcast, 1)
        if number % 2:
            node.ack(broadcast, (number, number + 1))
        if number == 20:
            node.checkpoint()
    return node


def positions(node: Node) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, group in node.partition("orders").groups.items():
        position: object = group.dump(), group.failures.dump()
        if group.definition.broadcast:
            # Attempts are counted by pull events, which a broadcast group does not log.
            [cursor] = group.dump()
            returned = [tuple(r) for r in Ranges((r.start, r.end, 0) for r in cursor.returned)]
            position = cursor.next, returned, list(group.failures.dead)
        found[name] = position, sorted(group.consumers), group.definition
    return found


@pytest.mark.parametrize("end", ["restart", "killed", "power_lost"])
def test_the_state_is_the_same_after_any_end(end: str):
    node = busy()
    rows, before = node.stored("orders"), positions(node)
    again = getattr(node, end)()
    assert again.stored("orders") == rows
    assert positions(again) == before
    assert again.report.clean == (end == "restart")


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_with_fewer_checkpoints_the_state_is_still_the_same(bad: int):
    node = busy()
    node.checkpoint()
    rows, before = node.stored("orders"), positions(node)
    for name in [name for name in node.disk.list(CHECKPOINTS) if name.startswith("manifest")][-bad:]:
        node.disk.flip_bit(f"{CHECKPOINTS}/{name}", 33, 3)
    again = node.killed()
    assert len(again.report.rejected_checkpoints) == bad
    assert again.stored("orders") == rows
    assert positions(again) == before
    assert again.broker.turn.epoch > node.broker.turn.epoch or bad == 3
    later = again.killed()
    assert later.report.rejected_checkpoints == []
    assert positions(later) == before


def test_a_start_reads_only_the_log_after_the_checkpoint():
    node = busy()
    node.checkpoint()
    end = node.broker.message_log.end
    node.send("orders", b"after", producer=Producer(9))
    again = node.killed()
    assert again.report.scanned_bytes == node.broker.message_log.end - end
    assert again.report.frames == 1
    assert node.restart().report.scanned_bytes == 0


def test_consumers_that_reconnect_in_time_keep_their_rows():
    node = busy()
    held = {c: [tuple(r) for r in ranges] for c, ranges in node.group("orders", "g").cursor.held.items()}
    again = node.killed()
    again.clock.advance(4)
    assert again.membership.lose_silent() == []
    assert {c: [tuple(r) for r in ranges] for c, ranges in again.group("orders", "g").cursor.held.items()} == held
    again.clock.advance(2)
    lost = again.membership.lose_silent()
    assert sorted(consumer.client for consumer, _ in lost) == ["c0", "c1", "c2"]
    assert again.group("orders", "g").cursor.held == {}


def test_a_newer_format_is_refused_and_no_file_is_changed():
    node = busy()
    node.broker.stop()
    disk = node.disk
    body = msgspec.msgpack.encode({"version": FORMAT_VERSION + 1, "number": 99})
    file = disk.open(f"{CHECKPOINTS}/manifest-000000000099", create=True)
    file.write([b"PLCK" + crc32c(body).to_bytes(4, "little") + body], 0)
    disk.open("message/00000000000099999999.log", create=True)
    before, operations = contents(disk), disk.operations
    with pytest.raises(DataDirError, match="use the Plait that wrote it"):
        Node(disk, node.clock, node.config)
    assert contents(disk) == before
    assert disk.operations == operations


def test_a_start_on_a_disk_that_cannot_be_synced_fails():
    node = busy()
    disk = node.disk.copy()
    disk.fail("sync", path="message/*", times=None)
    with pytest.raises(StorageFailed, match="recovery of the data directory failed"):
        Node(disk, node.clock, node.config)


def test_rows_held_by_unknown_consumers_are_redelivered():
    node = Node(flush="sync")
    for number in range(5):
        node.send("orders", b"%d" % number)
    consumer = node.attach("orders", "g")
    node.broker.turn.event(consumer.group, Pulled(1, False, 4711, 0, 5))
    consumer.group.cursor.pulled(4711, 0, 5, 1)
    node.turn()
    again = node.killed()
    assert again.pull(again.attach("orders", "g", "c2")).ranges == [(0, 5, 2)]


# --- damage in the files of a whole data directory ------------------------------------------------


def test_every_group_skips_a_damaged_row_and_counts_it_as_lost():
    node = Node(flush="sync")
    producer = Producer(7)
    for number in range(10):
        node.send("orders", b"%d" % number * 50, producer=producer)
    node.checkpoint()
    record = node.partition("orders").consume_log.record(4)
    node.disk.flip_bit("message/00000000000000000000.log", record.offset + 100, 0)
    again = node.power_lost()
    groups = [again.attach("orders", f"new{n}", f"x{n}") for n in range(2)]
    for consumer in groups:
        assert [row.sequence for row in again.pull(consumer).rows] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert consumer.group.lost_count == 1
        again.ack(consumer, (0, 10, 1))
        assert consumer.group.cursor.floor == 10


def test_a_row_damaged_while_the_broker_runs_is_detected_by_the_consumer_and_then_skipped():
    node = Node(flush="sync")
    producer = Producer(7)
    for number in range(10):
        node.send("orders", b"%d" % number * 50, producer=producer)
    record = node.partition("orders").consume_log.record(4)
    node.disk.flip_bit("message/00000000000000000000.log", record.offset + 100, 0)
    consumer = node.attach("orders", "g", "x")
    with pytest.raises(FrameError, match="checksum"):
        assert node.pull(consumer).rows
    node.membership.detach(consumer)
    consumer = node.attach("orders", "g", "x")
    assert [row.sequence for row in node.pull(consumer).rows] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert consumer.group.lost_count == 1


def test_new_rows_with_sequences_of_damaged_rows_are_not_acked():
    """The last frame of a subject is damaged: new rows get its sequences, and the acks do not apply to them."""
    node = Node(flush="sync")
    producer, other = Producer(7), Producer(8)
    node.send("orders", b"kept", producer=producer)
    consumer = node.attach("orders", "g")
    node.send("orders", b"rots" * 20, producer=producer)
    node.pull(consumer)
    node.ack(consumer, (0, 2))
    node.send("other", b"proof that all this was durable", producer=other)
    record = node.partition("orders").consume_log.record(1)
    node.disk.flip_bit("message/00000000000000000000.log", record.offset + 100, 0)
    for again in (node.killed(), node.killed().killed()):
        assert again.bodies("orders") == [b"kept"]
        assert again.send("orders", b"new", producer=Producer(9)).sequence == 1
        assert again.pull(again.attach("orders", "g", "c2")).bodies == [b"new"]


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_in_any_file_is_survived(seed: int):
    """In any file: the start succeeds or names the reason, and only stored rows are delivered."""
    rng = random.Random(seed)
    disk = _BUSY.disk.copy() if rng.random() < 0.5 else _STOPPED.copy()
    files = {path: data for path, data in contents(disk).items() if data}
    path = rng.choice(sorted(files))
    used = len(files[path].rstrip(b"\0")) or 1
    disk.flip_bit(path, rng.randrange(used), rng.randrange(8))
    again = Node(disk, _BUSY.clock, _BUSY.config)
    stored = {(row.producer, row.number): row.body for row in again.stored("orders")}
    assert len(stored) >= len(_ROWS) - (1 if path.startswith("message/") else 0)
    assert stored.items() <= _ROWS.items()
    for group in list(again.partition("orders").groups.values()):
        assert group.cursor.next <= again.partition("orders").next
    assert again.send("orders", b"new row", producer=Producer(rng.getrandbits(40))).acknowledged
    again.clock.advance(6)
    again.membership.lose_silent()
    assert b"new row" in again.pull(again.attach("orders", "fresh", "f")).bodies


_BUSY = busy()
_ROWS = {(row.producer, row.number): row.body for row in _BUSY.stored("orders")}


def _stopped() -> SimulatedDisk:
    disk: SimulatedDisk = _BUSY.disk.copy()
    Node(disk, _BUSY.clock, _BUSY.config).broker.stop()
    return disk


_STOPPED = _stopped()
