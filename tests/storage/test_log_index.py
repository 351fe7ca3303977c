"""The log index, built from segment files, has the records of the server's consume logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.errors import DamageError
from plait.storage.disk import RealDisk
from plait.storage.reading import log_index
from plait.storage.reading.log_chunks import WantedRows
from plait.storage.reading.log_index import LogIndex
from plait.storage.reading.log_reader import LogReader, open_log
from plait.storage.reading.log_walk import LogWalk
from tests.support.broker_node import Node, Producer

ORDERS = WantedRows(frozenset({"orders"}))


def index_of(path: Path, wanted: WantedRows = ORDERS, *, fail_on_damage: bool = True) -> LogIndex:
    index = LogIndex(lambda: open_log(str(path)), wanted, fail_on_damage=fail_on_damage)
    index.refresh()
    return index


def fill(node: Node, count: int, producer: Producer | None = None) -> None:
    for number in range(count):
        node.clock.advance(1.0)
        node.send("orders", b"%d" % number * 20, b"y", producer=producer)
        node.send("refunds", b"x", producer=producer)


def assert_same(index: LogIndex, node: Node) -> None:
    """The index has the partitions and records of the broker."""
    (partition,) = index.partitions.values()
    here = node.partition("orders")
    assert np.array_equal(partition.records, here.consume_log.slice(0, len(here.consume_log)))
    assert partition.epochs == here.epochs
    assert (partition.start, partition.end) == (here.start, here.visible)


def test_the_records_are_those_of_the_consume_log(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    fill(node, 100)
    assert len(list((tmp_path / "message").iterdir())) > 3
    assert_same(index_of(tmp_path), node)
    # The first node was not stopped: this start follows a crash.
    node = Node(RealDisk(tmp_path))
    fill(node, 50, Producer(2))
    assert [epoch for _, epoch in node.partition("orders").epochs] == [1, 2]
    assert_same(index_of(tmp_path), node)
    node.broker.stop()


def test_a_refresh_reads_only_the_newest_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = Node(RealDisk(tmp_path))
    fill(node, 200)
    index = index_of(tmp_path)
    opened: list[LogReader] = []

    def watched(reader: LogReader, *, fail_on_damage: bool) -> LogWalk:
        opened.append(reader)
        return LogWalk(reader, fail_on_damage=fail_on_damage)

    monkeypatch.setattr(log_index, "LogWalk", watched)
    for _ in range(3):
        fill(node, 60)
        before = len(list((tmp_path / "message").iterdir()))
        index.refresh()
        assert_same(index, node)
        assert len(opened[-1].files) < before / 2
    monkeypatch.setattr(log_index, "OPEN_SEGMENTS", 1)
    index.refresh()
    assert_same(index, node)
    node.broker.stop()


def test_damage_raises_or_is_skipped(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    fill(node, 100)
    node.broker.stop()
    path = sorted((tmp_path / "message").iterdir())[0]
    data = bytearray(path.read_bytes())
    # A wrong size: no header follows.
    data[data.index(b"PL", 2000) + 4] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamageError):
        index_of(tmp_path)
    (partition,) = index_of(tmp_path, fail_on_damage=False).partitions.values()
    assert partition.end == 200
    assert len(partition.records) in (99, 100)


def test_a_partition_whose_messages_were_all_removed_keeps_its_end(tmp_path: Path):
    node = Node(RealDisk(tmp_path), retention_seconds=5.0)
    fill(node, 100)
    for _ in range(6):
        node.clock.advance(100.0)
        node.send("others", b"x" * 4000)
        node.checkpoint()
    # The checkpoints are older than this retention run and do not contain its changes.
    node.retention.run()
    assert node.broker.message_log.start > 0
    (partition,) = index_of(tmp_path).partitions.values()
    assert len(partition.records) == 0
    here = node.partition("orders")
    assert (partition.start, partition.end) == (here.start, here.visible) == (200, 200)
    node.broker.stop()


def test_damage_is_listed_once_after_several_verifications(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    fill(node, 200)
    for path in sorted((tmp_path / "message").iterdir())[:3]:
        data = bytearray(path.read_bytes())
        for after in (2000, 4000):
            data[data.index(b"PL", after) + 4] ^= 0xFF
        path.write_bytes(data)
    walk = LogWalk(open_log(str(tmp_path)), fail_on_damage=False)
    assert sum(len(piece.frames) for piece in walk) > 300
    offsets = [damage.offset for damage in walk.damages]
    assert offsets == sorted(set(offsets))
    assert len(offsets) == 6
