"""Reads of damaged frames: their cost, and that rows are found if only the consume log is damaged."""

from __future__ import annotations

import pytest

from plait.broker.partitions import frame_search
from plait.storage.logs.consume_log import RECORD
from plait.storage.logs.recovery import ReadableLog
from plait.storage.logs.segment import segment_name
from tests.support.broker_node import Node, Producer


def filled(monkeypatch: pytest.MonkeyPatch) -> tuple[Node, list[int]]:
    """Rows of two subjects in many segments, all in checkpoints, and a list that gets the offset of each log scan."""
    node = Node(flush="sync")
    producer = Producer(7)
    for number in range(60):
        node.send("orders" if number % 4 == 0 else "others", b"%03d" % number * 200, producer=producer)
    node.checkpoint()
    scans: list[int] = []
    scan = frame_search.LogScan

    def counted(log: object, start: int, *rest: object) -> object:
        scans.append(start)
        return scan(log, start, *rest)  # type: ignore[arg-type]

    again = node.killed()
    monkeypatch.setattr(frame_search, "LogScan", counted)
    return again, scans


def flip(node: Node, offset: int) -> None:
    segment = node.broker.message_log.segment_at(offset)
    node.disk.flip_bit(f"message/{segment_name(segment.base)}", offset - segment.base, 3)


@pytest.mark.parametrize("byte", [5, 20, 300])
@pytest.mark.parametrize("index", [0, 7, 14])
def test_a_damaged_frame_is_skipped_without_a_scan_of_the_log(index: int, byte: int, monkeypatch: pytest.MonkeyPatch):
    node, scans = filled(monkeypatch)
    flip(node, node.partition("orders").consume_log.record(index).offset + byte)
    for _ in range(3):
        assert [row.sequence for row in node.stored("orders")] == [each for each in range(15) if each != index]
    consumer = node.attach("orders", "g")
    assert [row.sequence for row in node.pull(consumer).rows] == [each for each in range(15) if each != index]
    assert node.group("orders", "g").lost_count == 1
    assert scans == []


def test_frames_that_were_overwritten_are_searched_for_between_their_neighbours(monkeypatch: pytest.MonkeyPatch):
    """No record leads to its frame: each frame is searched for in the few bytes that can hold it."""
    node, _ = filled(monkeypatch)
    records = node.partition("orders").consume_log
    gone = range(5, 9)
    for index in gone:
        offset = records.record(index).offset
        segment = node.broker.message_log.segment_at(offset)
        segment.file.write([bytes(200)], offset - segment.base)
    looked_at: list[int] = []
    counted = frame_search.LogScan

    def measured(log: ReadableLog, *rest: object) -> object:
        looked_at.append(sum(len(segment.view) for segment in log.segments))
        return counted(log, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(frame_search, "LogScan", measured)
    assert [row.sequence for row in node.stored("orders")] == [each for each in range(15) if each not in gone]
    room = max(records.record(each + 1).offset - records.record(each - 1).offset for each in gone)
    assert len(looked_at) == len(gone)
    assert max(looked_at) <= room


@pytest.mark.parametrize("index", [0, 7, 14])
@pytest.mark.parametrize("field", ["base", "offset", "size", "count"])
def test_a_row_whose_record_is_wrong_is_searched_for_once(index: int, field: str, monkeypatch: pytest.MonkeyPatch):
    node, scans = filled(monkeypatch)
    log = node.partition("orders").consume_log
    offset = RECORD.fields[field][1]  # type: ignore[index]
    node.disk.flip_bit(log.path, index * RECORD.itemsize + offset, 6)
    log.unmap()
    for _ in range(3):
        assert [row.sequence for row in node.stored("orders")] == list(range(15))
    assert len(scans) == 1
