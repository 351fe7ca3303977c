"""Sends are stored, joined, answered once, and idempotent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import (
    FrameError,
    LimitExceeded,
    OutOfSequence,
    ReadOnly,
    SubjectExists,
    SubjectNotFound,
    UnknownProducer,
)
from plait.frame.builder import build_frame
from plait.frame.coalesce import coalesce
from plait.frame.view import FrameView
from plait.limits import ServerLimits
from plait.model.settings import SubjectSettings
from tests.support.broker_node import Node, Producer, Sent

# --- storing ------------------------------------------------------------------------------------


def test_a_send_is_answered_once_and_not_before_the_turn_ends():
    node = Node()
    sent = node.submit(Producer(5).frame("orders", b"a"))
    assert sent.answers == []
    node.turn()
    node.turn()
    assert sent.answers == [(0, None)]


def test_small_frames_of_one_turn_are_stored_as_one():
    node = Node()
    producers = [Producer(number) for number in range(10, 15)]
    sends = [node.submit(producer.frame("orders", f"{producer.id}".encode())) for producer in producers]
    node.turn()
    assert [sent.sequence for sent in sends] == [0, 1, 2, 3, 4]
    assert len(node.partition("orders").consume_log) == 1
    assert [(row.producer, row.number) for row in node.stored("orders")] == [(p.id, 1) for p in producers]


def test_joined_frames_are_stored_recognized_or_refused_separately():
    node = Node()
    one, two = Producer(1), Producer(2)
    first = one.frame("orders", b"1a")
    early = one.frame("orders", b"1b")
    late = one.frame("orders", b"1c")
    other = two.frame("orders", b"2a")
    answers = [node.submit(sent) for sent in (first, late, other, early)]
    again = node.submit(Sent("orders", first.data, first.bodies))
    node.turn()
    assert [sent.acknowledged for sent in answers] == [True, False, True, True]
    assert isinstance(late.error, OutOfSequence)
    assert late.error.details["last"] == 1
    assert again.sequence == first.sequence == 0
    assert node.bodies("orders") == [b"1a", b"2a", b"1b"]


def test_joined_frames_that_grow_still_fit_their_reserved_space():
    """A time that is stored once for all rows of a frame is repeated for each row when frames are joined."""
    node = Node()
    producers = [Producer(number) for number in range(1, 5)]
    for turn in range(6):
        for producer in producers:
            node.submit(producer.frame("orders", *[b"%d" % turn] * 40, send_time=node.clock.now()))
        node.turn()
        for segment in node.broker.message_log.segments:
            assert segment.file.size == segment.size
    assert len(node.bodies("orders")) == 6 * 4 * 40
    assert len(node.killed().bodies("orders")) == 6 * 4 * 40


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 4),
            st.integers(0, 300),
            st.booleans(),
            st.sampled_from(["join", "turn"]),
        ),
        max_size=30,
    )
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_joined_every_producers_rows_stay_whole_and_in_order(
    frames: list[tuple[int, int, int, bool, str]],
):
    node = Node()
    producers = [Producer(number) for number in range(1, 5)]
    sends: list[Sent] = []
    for who, count, size, timed, then in frames:
        producer = producers[who]
        bodies = [b"%d/%d:" % (producer.id, producer.next + row) + b"x" * size for row in range(count)]
        columns = {"send_time": 7} if timed else {}
        sends.append(node.submit(producer.frame("orders", *bodies, **columns)))
        if then == "turn":
            node.turn()
    node.turn()
    rows = node.stored("orders")
    assert len(rows) == sum(count for _, count, *_ in frames)
    for sent in sends:
        assert sent.sequence is not None
        stored = rows[sent.sequence : sent.sequence + len(sent.bodies)]
        assert [row.body for row in stored] == sent.bodies
        assert [row.producer for row in stored] == [sent.view.producer] * len(sent.bodies)
    assert node.killed().stored("orders") == rows


# --- idempotence --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["restart", "killed", "power_lost"])
def test_a_resend_after_a_restart_stores_nothing(end: str):
    node = Node(flush="sync")
    producer = Producer(9)
    sends = [node.send("orders", b"%d" % n, producer=producer) for n in range(5)]
    node.checkpoint()
    sends += [node.send("orders", b"%d" % n, producer=producer) for n in range(5, 10)]
    again = getattr(node, end)()
    for sent in sends:
        resent = again.submit(Sent("orders", sent.data, sent.bodies))
        again.turn()
        assert resent.sequence == sent.sequence
    assert again.bodies("orders") == [b"%d" % n for n in range(10)]
    assert again.send("orders", b"next", producer=producer).sequence == 10


def test_a_forgotten_producer_gets_a_distinct_error():
    node = Node()
    producer = Producer(9)
    node.send("orders", b"a", producer=producer)
    node.clock.advance(8 * 86400)
    node.broker.producers.forget(node.clock.now())
    sent = node.send("orders", b"b", producer=producer)
    assert isinstance(sent.error, UnknownProducer)
    assert "may or may not be stored" in sent.error.message
    assert node.send("orders", b"b", producer=Producer(10)).acknowledged


def test_oneway_rows_are_stored_without_idempotence():
    node = Node()
    producer = Producer(9)
    for _ in range(2):
        sent = producer.oneway("orders", b"a")
        node.broker.submit(node.partition("orders"), sent.view, None)
    node.turn()
    assert node.bodies("orders") == [b"a", b"a"]
    assert len(node.broker.producers) == 0
    assert node.killed().bodies("orders") == [b"a", b"a"]


def test_unsequenced_rows_are_refused_unless_they_are_sent_oneway():
    node = Node()
    sent = node.submit(Producer(9).oneway("orders", b"a"))
    node.turn()
    assert isinstance(sent.error, FrameError)
    assert node.bodies("orders") == []


# --- refusals -----------------------------------------------------------------------------------


def test_a_frame_that_does_not_verify_is_refused_and_nothing_is_stored():
    node = Node()
    data = bytearray(Producer(1).frame("orders", b"hello").data)
    data[-8] ^= 1
    with pytest.raises(FrameError):
        node.broker.submit(node.partition("orders"), FrameView(data), None)
    node.turn()
    assert node.bodies("orders") == []


def test_a_producer_cannot_send_rows_of_another_producer():
    node = Node()
    frames = [FrameView(build_frame([b"x"], producer=n, first=1).tobytes()) for n in (1, 2)]
    joined = FrameView(coalesce(frames).tobytes())
    with pytest.raises(FrameError, match="only brokers add them"):
        node.broker.submit(node.partition("orders"), joined, None)


def test_a_read_only_broker_refuses_sends_and_serves_pulls():
    node = Node()
    node.send("orders", b"a")
    node.broker.turn.read_only = True
    assert isinstance(node.send("orders", b"b").error, ReadOnly)
    assert node.pull(node.attach("orders", "g")).bodies == [b"a"]


# --- subjects -----------------------------------------------------------------------------------


def test_subjects_are_created_by_the_first_send_or_only_explicitly():
    assert Node().send("new", b"a").acknowledged
    node = Node(auto_create=False)
    with pytest.raises(SubjectNotFound, match="'new' does not exist; create it with 'plait subject create new'"):
        node.partition("new")
    node.broker.create_subject("new")
    assert node.send("new", b"a").acknowledged
    with pytest.raises(SubjectExists, match="'new' exists already"):
        node.broker.create_subject("new")


def test_the_number_of_subjects_is_limited():
    node = Node(limits=ServerLimits(subjects=2))
    node.partition("a")
    node.partition("b")
    with pytest.raises(LimitExceeded, match="subject limit reached \\(2 per broker"):
        node.partition("c")


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
@pytest.mark.parametrize("end", ["restart", "killed", "power_lost"])
def test_a_subject_and_its_settings_survive_any_end(end: str, checkpoints: int):
    node = Node(flush="sync")
    node.broker.create_subject("plain")
    node.broker.create_subject("kept", SubjectSettings(retention_seconds=5.0))
    if checkpoints:
        node.checkpoint()
    node.broker.catalog.update_subject("kept", SubjectSettings(retention_seconds=7.0))
    node.broker.create_subject("gone")
    node.send("gone", b"a")
    node.broker.delete_subject("gone")
    node.turn()
    for _ in range(checkpoints):
        node = getattr(node, end)()
    node = getattr(node, end)()
    assert set(node.broker.subjects) == {"plain", "kept"}
    assert node.partition("kept").row.settings == SubjectSettings(retention_seconds=7.0)
    assert node.send("plain", b"a", producer=Producer(3)).sequence == 0
    assert node.power_lost().bodies("plain") == [b"a"]


def test_a_subject_created_again_after_its_deletion_is_a_new_one():
    node = Node(flush="sync")
    consumer = node.attach("orders", "g")
    node.send("orders", b"old")
    waiting = node.pull(node.attach("orders", "other", start="latest"), wait=30)
    reading = node.read("orders", 1, wait=30)
    old = node.partition("orders").id
    node.broker.delete_subject("orders")
    assert waiting.answers == [None]
    assert [batch.count for batch in reading.answers] == [0]
    assert consumer.session not in node.broker.sessions
    assert node.send("orders", b"new").acknowledged is False, "its producer has sent to another partition before"
    assert node.send("orders", b"new", producer=Producer(77)).sequence == 0
    assert node.partition("orders").id != old
    again = node.power_lost()
    assert again.bodies("orders") == [b"new"]
    assert again.partition("orders").groups == {}
    assert len(again.broker.catalog.groups) == 0


# --- readers ------------------------------------------------------------------------------------


def test_the_first_row_wakes_a_waiting_read_once():
    node = Node()
    node.send("orders", b"a")
    reading = node.read("orders", 1, wait=10)
    assert reading.answers == []
    node.send("orders", b"b")
    assert [batch is not None and batch.end for batch in reading.answers] == [2]
    node.clock.advance(20)
    node.broker.run_timers()
    node.send("orders", b"c")
    assert len(reading.answers) == 1


def test_a_waiting_read_is_answered_once_at_its_deadline():
    node = Node()
    reading = node.read("orders", 0, wait=10)
    node.clock.advance(10)
    node.broker.run_timers()
    assert [batch.count for batch in reading.answers] == [0]
    node.send("orders", b"a")
    assert [batch.count for batch in reading.answers] == [0]
    assert node.partition("orders").readers == {}
