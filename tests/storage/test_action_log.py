"""Events and definitions in frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.frame.builder import FrameParts
from plait.frame.header import pack_stamp
from plait.frame.view import FrameView
from plait.limits import FRAME_SIZE_MAX
from plait.storage.logs.action_log import (
    DEFINITIONS,
    EVENTS,
    EVENTS_MAX,
    Action,
    ActionBuffer,
    ConsumerDefinition,
    GroupDefinition,
    encode_definitions,
    read_definitions,
    read_events,
)

GROUP = GroupDefinition(3, 1, "billing", 17, False, "at_least_once", 1_700_000_000_000_000)
CONSUMER = ConsumerDefinition(9, 3, "client-1")

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
EVENT_VALUES = st.tuples(
    st.sampled_from(Action), U32, U32, U64, U64, st.integers(0, 70_000), U32, st.integers(0, 2**62)
)


def view(frame: FrameParts) -> FrameView:
    return FrameView(frame.tobytes()).verify()


def drain(buffer: ActionBuffer) -> list[FrameView]:
    bound = buffer.size_bound
    buffer.build_frames(40, (12345, 0), 6, 99)
    frames = buffer.drain()
    assert sum(frame.size for frame in frames) <= bound
    assert not buffer.count
    return [view(frame) for frame in frames]


@given(st.lists(EVENT_VALUES, min_size=1, max_size=30))
def test_events_read_back_unchanged(events: list[tuple[Action, int, int, int, int, int, int, int]]):
    buffer = ActionBuffer()
    for event in events:
        buffer.event(*event)
    (frame,) = drain(buffer)
    assert (frame.partition, frame.base, frame.durable, frame.epoch, frame.store_time) == (EVENTS, 40, 12345, 6, 99)
    expected = [
        (action, 0, min(attempt, 65535), group, consumer, epoch, start, end, time)
        for action, group, consumer, start, end, attempt, epoch, time in events
    ]
    assert read_events(frame).tolist() == expected


def test_definitions_precede_the_events_that_use_them():
    buffer = ActionBuffer()
    buffer.event(Action.PULL, 3, 9, 17, 20, 1, 6, 5)
    buffer.define(GROUP)
    buffer.define(CONSUMER)
    definitions, events = drain(buffer)
    assert (definitions.partition, definitions.base) == (DEFINITIONS, 40)
    assert (events.partition, events.base) == (EVENTS, 41)
    assert read_definitions(definitions) == [GROUP, CONSUMER]


def test_an_empty_buffer_makes_no_frame():
    buffer = ActionBuffer()
    assert not buffer.count
    assert drain(buffer) == []


def test_very_many_events_of_a_turn_make_several_frames():
    buffer = ActionBuffer()
    count = EVENTS_MAX + 7
    for number in range(count):
        buffer.event(Action.ACK, 1, 2, number, number + 1, 0, 1, 5)
    frames = drain(buffer)
    assert [frame.base for frame in frames] == [40, 41]
    assert all(frame.size < FRAME_SIZE_MAX for frame in frames)
    assert sum(len(read_events(frame)) for frame in frames) == count
    assert read_events(frames[-1])["start"].tolist() == list(range(EVENTS_MAX, count))


def test_a_segment_header_has_all_definitions_and_the_end_of_the_segment_before():
    definitions = [ConsumerDefinition(number, 3, f"client-{number}") for number in range(12_000)]
    pages = encode_definitions(definitions)
    stamps = [pack_stamp(DEFINITIONS, number, 3, 1, 2) for number in (7, 8, 9)]
    frames = [page.frame(7 + number, 4096, stamps[number]) for number, page in enumerate(pages)]
    assert [(f.producer, f.previous, f.base) for f in map(view, frames)] == [(0, 4096, 7), (0, 4096, 8), (0, 4096, 9)]
    assert [d for frame in frames for d in read_definitions(view(frame))] == definitions
    assert encode_definitions([]) == []
