"""Reads with a filter: what they examine in one turn of the loop, and that every reader gets its turn."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.broker.partitions.partition import Partition, ReadBatch
from plait.clock import ManualClock
from plait.filter import scan_budget
from plait.filter.message_filter import Filter, compile_filter
from plait.frame import FrameView
from plait.limits import FILTER_SCAN_SECONDS
from plait.model.filter_terms import FilterTerms
from plait.storage.logs.consume_log import Record
from plait.storage.logs.log import Log
from tests.support.broker_node import Node, Producer, rows_of

encode = msgspec.msgpack.Encoder().encode
NOTHING = "amount < 0"


class TickingClock(ManualClock):
    """Each look at the monotonic clock takes ``tick`` seconds."""

    tick = 0.0

    def monotonic(self) -> float:
        self._monotonic += self.tick
        return super().monotonic()


def filled(frames: int, clock: ManualClock | None = None) -> tuple[Node, Producer]:
    """A subject with frames of one message, which have the header ``amount``."""
    node, producer = Node(clock=clock, message_segment_size=1 << 20), Producer(7)
    add(node, producer, range(frames))
    return node, producer


def add(node: Node, producer: Producer, numbers: range) -> None:
    for number in numbers:
        node.submit(producer.frame("orders", b"%d" % number, headers=[encode({"amount": number})], send_time=5))
        node.commit()


def read(node: Node, where: str, start: int = 0, wait: float = 0.0, count: int = 1000) -> list[ReadBatch]:
    """Read without ending the turn. The returned list gets the answer."""
    answers: list[ReadBatch] = []
    wanted = compile_filter(FilterTerms(where=where))
    node.broker.read(node.partition("orders"), start, count, 1 << 20, wait, answers.append, wanted)
    return answers


def numbers_of(batch: ReadBatch) -> list[int]:
    return [int(row.body) for row in rows_of(batch.parts)]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the first sequence of each part of a frame that a filter examines."""
    bases: list[int] = []
    parts = Filter.parts

    def counted(self: Filter, frame: Any, *rest: Any) -> Any:
        for part in parts(self, frame, *rest):
            bases.append(frame.base + part.first)
            yield part

    monkeypatch.setattr(Filter, "parts", counted)
    return bases


def test_a_read_stops_when_its_time_is_over():
    clock = TickingClock()
    node, _ = filled(100, clock)
    clock.tick = 0.001
    [batch] = read(node, NOTHING)
    assert batch.full
    assert 1 <= batch.end <= FILTER_SCAN_SECONDS / 0.001 + 1


def test_a_read_stops_after_a_number_of_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 7)
    node, _ = filled(20)
    [batch] = read(node, NOTHING)
    assert (batch.full, batch.end) == (True, 7)
    node.turn()
    [rest] = read(node, "amount >= 10", batch.end)
    assert (rest.full, numbers_of(rest)) == (True, [10, 11, 12, 13])


def test_the_readers_of_a_turn_share_what_may_be_examined(monkeypatch: pytest.MonkeyPatch, examined: list[int]):
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 10)
    node, producer = filled(3)
    waiting = [read(node, f"amount = {number % 5}", 3, wait=30.0) for number in range(50)]
    node.turn()
    examined.clear()
    add(node, producer, range(3, 4))
    # Five different filters look at the new frame.
    assert len(examined) <= 5
    add(node, producer, range(4, 40))
    assert len(examined) <= 10
    for _ in range(40):
        node.broker.turn.scans.next_turn()
    assert [numbers_of(each[0]) if each else None for each in waiting[:5]] == [None, None, None, [3], [4]]
    assert sorted(set(examined)) == list(range(3, 40))


def test_readers_with_the_same_filter_examine_a_frame_once(examined: list[int]):
    node, producer = filled(1)
    waiting = [read(node, "amount = 2", 1, wait=30.0) for _ in range(200)]
    examined.clear()
    add(node, producer, range(1, 3))
    assert examined == [1, 2]
    assert [numbers_of(batch) for [batch] in waiting] == [[2]] * 200


def test_a_read_that_finds_no_room_is_answered_in_a_following_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 10)
    node, _ = filled(30)
    first = read(node, NOTHING)
    others = [read(node, f"amount = {number}", 5) for number in range(6, 10)]
    assert first[0].end == 10
    assert not any(others)
    turns = 0
    while not all(others):
        node.broker.turn.scans.next_turn()
        turns += 1
    assert [numbers_of(batch) for [batch] in others] == [[6], [7], [8], [9]]
    assert turns == 4
    node.turn()
    assert not node.partition("orders").readers


def test_a_read_of_expired_rows_ends_at_the_end():
    node, _ = filled(5)
    partition = node.partition("orders")
    partition.start = 5
    [batch] = read(node, NOTHING)
    assert (batch.end, batch.full, batch.damaged) == (5, False, [(0, 5)])


def test_a_read_names_the_rows_that_are_expired_or_damaged(monkeypatch: pytest.MonkeyPatch):
    node, _ = filled(10)
    partition = node.partition("orders")
    partition.start = 2
    shipped = Partition.frame

    def damaged(self: Partition, log: Log, record: Record, trusted: bool) -> FrameView | None:
        return None if record.base == 6 else shipped(self, log, record, trusted)

    monkeypatch.setattr(Partition, "frame", damaged)
    for where, numbers in (("amount > 0", [2, 3, 4, 5, 7, 8, 9]), ("amount = 8", [8])):
        [batch] = read(node, where)
        assert (numbers_of(batch), batch.end, batch.damaged) == (numbers, 10, [(0, 2), (6, 7)])
        node.turn()


def test_a_budget_is_renewed():
    begun: list[int] = []
    budget = scan_budget.ScanBudget(ManualClock().monotonic)
    budget.on_begin = lambda: begun.append(1)
    for _ in range(2):
        assert budget.has_room()
        budget.spend(scan_budget.FILTER_SCAN_COUNT - 1, 0)
        assert budget.has_room()
        budget.spend(1, 0)
        assert not budget.has_room()
        budget.renew()
    assert budget.has_room()
    budget.spend(0, scan_budget.FILTER_SCAN_BYTES)
    assert not budget.has_room()
    assert len(begun) == 3


def test_the_rows_of_a_large_frame_are_examined_once(examined: list[int], monkeypatch: pytest.MonkeyPatch):
    node, producer = Node(message_segment_size=1 << 24), Producer(7)
    count = 20_000
    headers = [encode({"amount": number}) for number in range(count)]
    node.submit(producer.frame("orders", *[b"%d" % number for number in range(count)], headers=headers, send_time=5))
    node.turn()
    spent: list[int] = []
    spend = scan_budget.ScanBudget.spend

    def counted(self: scan_budget.ScanBudget, rows: int, size: int) -> None:
        spent.append(rows)
        spend(self, rows, size)

    monkeypatch.setattr(scan_budget.ScanBudget, "spend", counted)
    at = 0
    while at < count:
        [batch] = read(node, "amount >= 0", at, count=500)
        assert numbers_of(batch) == list(range(at, at + 500))
        at = batch.end
        node.turn()
    assert sum(spent) == count


def test_a_frame_that_takes_long_is_examined_in_several_turns():
    clock = TickingClock()
    node, producer = Node(clock=clock, message_segment_size=1 << 24), Producer(7)
    count = 20_000
    headers = [encode({"amount": number}) for number in range(count)]
    node.submit(producer.frame("orders", *[b"%d" % number for number in range(count)], headers=headers, send_time=5))
    node.turn()
    clock.tick = 0.015
    answers = read(node, f"{' OR '.join(['amount < 0'] * 150)} OR amount = 19000", wait=30.0)
    turns = 1
    while not answers:
        node.broker.turn.scans.next_turn()
        turns += 1
    assert numbers_of(answers[0]) == [19_000]
    assert answers[0].end > 19_000
    assert turns >= 3
