"""Events and definitions in frames."""

from __future__ import annotations

import re
from pathlib import Path
from struct import calcsize

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.broker.appender import FIRST_FRAMES_BOUND, ActionBuffer
from plait.errors import FrameError
from plait.frame.builder import FrameParts, pack_stamp
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import FRAME_SIZE_MAX
from plait.storage.logs.action_events import ATTEMPT_MAX, EVENT, KINDS, Acked, Action, Event, Pulled, unpack_event
from plait.storage.logs.action_log import (
    DEFINITIONS,
    EVENTS,
    EVENTS_MAX,
    ConsumerDefinition,
    GroupDefinition,
    encode_definitions,
    read_definitions,
    read_events,
)

GROUP = GroupDefinition(3, 1, "billing", 17, False, "at_least_once", 1_700_000_000_000_000)
CONSUMER = ConsumerDefinition(9, 3, "client-1")

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
#: By the struct code of a field.
VALUES = {"H": st.integers(0, 70_000), "?": st.booleans(), "I": U32, "Q": U64, "q": st.integers(-(2**63), 2**63 - 1)}


def fields_of(kind: type[Event]) -> dict[str, tuple[str, str]]:
    """Field of a kind → its struct code, and the field of ``EVENT`` that has the same place."""
    names = {offset: name for name, (_, offset) in (EVENT.fields or {}).items()}
    codes, at = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z?])", kind.layout.format):
        if code != "x":
            codes.append((code, names[at]))
        at += calcsize("<" + count + code)
    assert [name for _, name in codes[:3]] == ["group", "epoch", "action"]
    return dict(zip(kind.__struct_fields__, codes[3:], strict=True))


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(list(KINDS.values())))
    return kind(*[draw(VALUES[code]) for code, _ in fields_of(kind).values()])


def view(frame: FrameParts) -> FrameView:
    return FrameView(frame.tobytes()).verify()


def drain(buffer: ActionBuffer) -> list[FrameView]:
    bound = buffer.size + FIRST_FRAMES_BOUND
    assert buffer.build_frames(40, (12345, 0), 6, 99) == 40 + len(buffer.frames)
    assert buffer.size == sum(frame.size for frame in buffer.frames) <= bound
    return [view(frame) for frame in buffer.frames]


@given(st.lists(st.tuples(events(), U32, U32), min_size=1, max_size=30))
def test_events_read_back_unchanged(written: list[tuple[Event, int, int]]):
    buffer = ActionBuffer()
    for event, group, epoch in written:
        buffer.event(event, group, epoch)
    (frame,) = drain(buffer)
    assert (frame.partition, frame.base, frame.durable, frame.epoch, frame.store_time) == (EVENTS, 40, 12345, 6, 99)
    assert [unpack_event(row) for row in frame.binary(Column.BODY).to_pylist()] == [
        (group, epoch, event) for event, group, epoch in written
    ]
    for row, (event, group, epoch) in zip(read_events(frame), written, strict=True):
        assert (row["group"], row["epoch"], row["action"]) == (group, epoch, event.action)
        stored = {column for _, column in fields_of(type(event)).values()}
        for name, (_, column) in fields_of(type(event)).items():
            assert int(row[column]) % 2**64 == getattr(event, name) % 2**64
        assert not any(
            row[column] for column in ("attempt", "flag", "holder", "start", "end", "value") if column not in stored
        )


def test_each_action_has_one_kind_of_event_and_no_field_has_two_meanings():
    assert set(KINDS) == set(Action)
    places: dict[str, set[str]] = {}
    for kind in KINDS.values():
        for name, (_, column) in fields_of(kind).items():
            places.setdefault(name, set()).add(column)
    # The new cursor of a key takes the place of ``end``, as the key's hash takes that of ``value``.
    assert places.pop("to") == {"end", "value"}
    assert all(len(columns) == 1 for columns in places.values())


def test_the_documentation_has_the_fields_of_an_event_and_every_action():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    types = {"<u2": "u16", "<u4": "u32", "<u8": "u64", "<i8": "i64", "|u1": "u8", "|b1": "u8"}
    fields = ", ".join(f"{name} {types[kind]}" for name, kind in EVENT.descr)
    assert f"**event** has 40 bytes: {fields}." in " ".join(text.split())
    section = text[text.index("### Action log") : text.index("### Consume log")]
    rows = re.findall(r"^\| (\d+) \| ([a-z ]+): ", section, re.MULTILINE)
    assert sorted((int(number), name) for number, name in rows) == [
        (action, action.name.lower().replace("_", " ")) for action in Action
    ]


def test_an_attempt_above_the_largest_number_is_stored_as_that_number():
    buffer = ActionBuffer()
    buffer.event(Pulled(70_000, False, 1, 0, 1), 3, 6)
    (frame,) = drain(buffer)
    assert read_events(frame)["attempt"].tolist() == [ATTEMPT_MAX]


def test_an_unknown_action_is_refused():
    row = np.zeros(1, EVENT)
    row["action"] = 200
    with pytest.raises(FrameError, match="unknown action 200"):
        unpack_event(row.tobytes())


def test_definitions_precede_the_events_that_use_them():
    buffer = ActionBuffer()
    buffer.event(Pulled(1, False, 9, 17, 20), 3, 6)
    buffer.define(GROUP)
    buffer.define(CONSUMER)
    definitions, events = drain(buffer)
    assert (definitions.partition, definitions.base) == (DEFINITIONS, 40)
    assert (events.partition, events.base) == (EVENTS, 41)
    assert read_definitions(definitions) == [GROUP, CONSUMER]


def test_an_empty_buffer_makes_no_frame():
    buffer = ActionBuffer()
    assert not buffer.size
    assert drain(buffer) == []


def test_very_many_events_of_a_turn_make_several_frames():
    buffer = ActionBuffer()
    count = EVENTS_MAX + 7
    for number in range(count):
        buffer.event(Acked(0, False, 2, number, number + 1), 1, 1)
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
