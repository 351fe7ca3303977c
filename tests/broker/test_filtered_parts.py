"""A large frame and a condition that takes long: groups and queries examine the frame in several turns of the loop."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from plait.broker.groups.group_settings import GroupFilter
from plait.broker.query.search import QueryTerms, Search
from plait.filter.message_filter import Filter, compile_filter
from plait.frame.view import frames_in
from plait.model.filter_terms import FilterTerms
from tests.broker.ordered_node import GROUP, SUBJECT, Owner
from tests.broker.test_filtered_reads import TickingClock
from tests.support.broker_node import Node, Producer, Pulled

encode = msgspec.msgpack.Encoder().encode
COUNT = 20_000
#: 150 comparisons: a part has few thousand rows. Every thousandth row matches.
SLOW = f"{' OR '.join(['amount < 0'] * 150)} OR amount % 1000 = 0"
MATCHING = list(range(0, COUNT, 1000))


class SlowNode(Node):
    """A broker whose budget has room for two parts of a frame in a turn, with one frame of 20,000 rows."""

    def __init__(self) -> None:
        self.ticking = TickingClock()
        super().__init__(clock=self.ticking, message_segment_size=1 << 24)
        headers = [encode({"amount": number}) for number in range(COUNT)]
        self.submit(Producer(7).frame(SUBJECT, *[b"%d" % n for n in range(COUNT)], headers=headers, send_time=5))
        self.turn()

    def wait_for(self, pulled: Pulled) -> int:
        """Turns of the loop until a suspended pull is answered."""
        self.ticking.tick = 0.015
        turns = 0
        while not pulled.answered:
            self.broker.turn.scans.next_turn()
            turns += 1
            assert turns < 100
        self.ticking.tick = 0.0
        return turns


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of rows of each part of a frame that a filter examines."""
    counts: list[int] = []
    of_frame = Filter.parts

    def counted(self: Filter, frame: Any, *rest: Any) -> Any:
        for part in of_frame(self, frame, *rest):
            counts.append(part.last - part.first)
            yield part

    monkeypatch.setattr(Filter, "parts", counted)
    return counts


def begin_pull(node: SlowNode, consumer: Any, count: int) -> Pulled:
    pulled = Pulled()
    node.ticking.tick = 0.015
    node.broker.pull(consumer, count, 1 << 20, 30.0, pulled.answer)
    node.ticking.tick = 0.0
    return pulled


def test_a_shared_group_examines_a_large_frame_in_several_turns(parts: list[int]):
    node = SlowNode()
    consumer = node.attach(SUBJECT, GROUP, "c1", wanted=GroupFilter(FilterTerms(where=SLOW), True))
    seen: list[int] = []
    turns = 0
    while len(seen) < len(MATCHING):
        pulled = begin_pull(node, consumer, 1000)
        assert len(parts) <= 2 * (turns + 1) + 2, "one turn examined more than it may"
        turns += 1 + node.wait_for(pulled)
        seen += [row.sequence for row in pulled.rows]
    assert seen == MATCHING
    assert turns >= 3
    assert sum(parts) == COUNT
    node.turn()
    assert node.group(SUBJECT, GROUP).floor == 0
    for sequence in seen:
        node.ack(consumer, (sequence, sequence + 1))
    while node.group(SUBJECT, GROUP).floor < COUNT:
        node.pull(consumer)
    assert sum(parts) == COUNT


def test_returned_rows_of_a_large_frame_are_examined_in_several_turns(parts: list[int]):
    """Rows that were returned before their first attempt are examined with the filter of that moment."""
    node = SlowNode()
    consumer = node.attach(SUBJECT, GROUP, "c1")
    every_third = [(start, start + 1) for start in range(0, COUNT, 3)]
    pulled = node.pull(consumer, COUNT, 1 << 24)
    assert pulled.ranges == [(0, COUNT, 1)]
    group = node.group(SUBJECT, GROUP)
    node.ack(consumer, *[(start + 1, min(start + 3, COUNT)) for start, _ in every_third if start + 1 < COUNT])
    node.nack(consumer, *every_third, counted=False)
    wanted = GroupFilter(FilterTerms(where=SLOW), version=1)
    node.membership.detach(consumer)
    consumer = node.attach(SUBJECT, GROUP, "c1", wanted=wanted)
    seen: list[int] = []
    turns = 0
    while group.floor < COUNT:
        pulled = begin_pull(node, consumer, 1000)
        turns += 1
        assert len(parts) <= 2 * turns + 2, "one turn examined more than it may"
        while not pulled.answered and group.cursor.returned.length:
            turns += 1
            node.ticking.tick = 0.015
            node.broker.turn.scans.next_turn()
            node.ticking.tick = 0.0
            assert len(parts) <= 2 * turns + 2
        if not pulled.answered:
            break
        seen += [row.sequence for row in pulled.rows]
        node.ack(consumer, *[(row.sequence, row.sequence + 1) for row in pulled.rows])
    assert seen == [number for number in MATCHING if number % 3 == 0]
    assert turns >= 3


def test_an_ordered_group_examines_a_large_frame_in_several_turns(parts: list[int]):
    node = SlowNode()
    owner = Owner(node, "c1", wanted=GroupFilter(FilterTerms(where=SLOW), True))
    owner.lease([(0, 1024, 1)])
    seen: list[int] = []
    turns = 0
    while len(seen) < len(MATCHING):
        pulled = begin_pull(node, owner.consumer, 1000)
        assert len(parts) <= 2 * (turns + 1) + 2, "one turn examined more than it may"
        turns += 1 + node.wait_for(pulled)
        seen += [row.sequence for row in pulled.rows]
    assert seen == MATCHING
    assert turns >= 3
    assert sum(parts) == COUNT


def test_a_query_examines_a_large_frame_in_several_turns(parts: list[int]):
    node = SlowNode()
    broker, partition = node.broker, node.partition(SUBJECT)
    terms = QueryTerms(matching=compile_filter(FilterTerms(where=SLOW)))
    seen: list[int] = []
    start = turns = 0
    node.ticking.tick = 0.015
    while start < COUNT:
        search = Search(partition, broker.message_log, broker.message_index, terms, broker.turn.scans.budget)
        batch = search.run(start, COUNT, 1000, 1 << 20)
        assert batch.next > start
        start, turns = batch.next, turns + 1
        assert len(parts) <= 2 * turns + 2
        seen += [row for frame in frames_in(b"".join(batch.parts)) for row in frame.sequences().tolist()]
        broker.turn.scans.next_turn()
    assert seen == MATCHING
    assert turns >= 3
    assert sum(parts) == COUNT


def test_what_is_kept_of_an_examination_is_no_part_of_the_frame():
    """A bool header as a condition: its column is the mask. The cache must not keep a segment's mapping open."""
    node = Node(message_segment_size=1 << 20)
    headers = [encode({"vip": number % 2 == 0}) for number in range(100)]
    node.submit(Producer(7).frame(SUBJECT, *[b"x"] * 100, headers=headers))
    node.turn()
    consumer = node.attach(SUBJECT, GROUP, "c1", wanted=GroupFilter(FilterTerms(where="vip"), True))
    assert len(node.pull(consumer).rows) == 50
    kept = [facts for facts, _ in node.broker.catalog.known_rows._known.values()]
    assert kept
    arrays = [array for facts in kept for array in (facts if isinstance(facts, tuple) else (facts,))]
    assert all(array.base is None for array in arrays if isinstance(array, np.ndarray))
