"""Plans of part of a log, and the facts in a plan other than its chunks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from plait.storage.disk import RealDisk
from plait.storage.reading.log_chunks import WantedRows, plan
from plait.storage.reading.log_reader import open_log
from tests.support.broker_node import Node

ALL = WantedRows(prefixes=("",))


def test_a_chunk_has_the_sequences_of_its_frame_headers(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    for number in range(60):
        node.send(("orders", "refunds")[number % 2], b"x", b"y" * 300)
    node.broker.stop()
    planned = plan(open_log(str(tmp_path)), ALL)
    assert len(planned.chunks) > 2
    for partition in planned.chunks[0].partitions:
        pieces = [piece for chunk in planned.chunks for piece in chunk.ranges[partition]]
        assert pieces[0][0] == 0
        assert pieces[-1][1] == 60
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
    assert planned.end == node.broker.message_log.end
    assert {row.subject for row in planned.partitions.values()} == {"orders", "refunds"}


def test_only_frames_between_two_log_offsets_are_planned_on_request(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    ends = [node.broker.message_log.end]
    for _ in range(40):
        node.send("orders", b"x" * 300)
        ends.append(node.broker.message_log.end)
    node.broker.stop()
    planned = plan(open_log(str(tmp_path)), ALL, offsets=(ends[7], ends[30]))
    pieces = [piece for chunk in planned.chunks for pieces in chunk.ranges.values() for piece in pieces]
    assert (pieces[0][0], pieces[-1][1]) == (7, 30)
    assert plan(open_log(str(tmp_path)), ALL, offsets=(ends[-1], None)).chunks == []
