"""Delayed messages are delivered exactly once and never early, from the log and from buckets."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from plait.broker.schedule import delayed_requests, upcoming
from plait.broker.schedule.due_delivery import TURN_SECONDS
from plait.broker.schedule.due_rows import DELIVER_SIZE_MAX
from plait.broker.schedule.upcoming import WINDOW_MICROS
from plait.errors import DiskFull, FrameError, InvalidArgument, LimitExceeded, SubjectNotFound
from plait.frame.columns import Column
from plait.limits import MIB, ServerLimits
from plait.model.retry_policy import WAIT_SECONDS_MAX
from tests.broker.schedule_node import (
    SECOND,
    delay,
    delayed_frame,
    delivered,
    delivered_frames,
    later,
    run_due,
    schedules,
    submit,
)
from tests.support.broker_node import Node, Producer


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def producer() -> Producer:
    return Producer(7)


def test_the_deadline_is_the_next_due_time(node: Node, producer: Producer) -> None:
    now, monotonic = node.clock.now(), node.clock.monotonic()
    assert node.broker.next_deadline is None
    delay(node, producer, now + 3600 * SECOND, b"far")
    assert node.broker.next_deadline == pytest.approx(monotonic + 3600 - WINDOW_MICROS / 2 / SECOND)
    delay(node, producer, now + SECOND // 5, b"near")
    run_due(node)
    assert node.broker.next_deadline == pytest.approx(monotonic + 0.2)


def test_consumers_are_woken_and_get_the_message_with_its_id(node: Node, producer: Producer) -> None:
    consumer = node.attach("orders", "g")
    delay(node, producer, node.clock.now() + SECOND, b"a", b"b")
    pulled = node.pull(consumer, wait=30)
    assert not pulled.answered
    later(node, 1)
    assert [(row.producer, row.number, row.body) for row in pulled.rows] == [(7, 1, b"a"), (7, 2, b"b")]


def test_a_delayed_message_keeps_all_its_columns(node: Node, producer: Producer) -> None:
    now = node.clock.now()
    columns = {
        "keys": ["k1", "k2"],
        "key_hashes": np.array([5, 6], np.uint64),
        "tags": [b"\x1fnew\x1f", b""],
        "headers": [b"\x81\xa1a\x01", b""],
        "send_time": now - 5,
    }
    delay(node, producer, [now + 2 * SECOND, now + SECOND], b"x" * 5000, b"y" * 5000, compression="zstd", **columns)
    delay(node, producer, now + SECOND, b"plain")
    for step in range(2):
        if step:
            node.checkpoint()
        later(node, 1)
    frames = delivered_frames(node)
    rows = [
        (body[:5], key, hashed, tags, headers, sent)
        for frame in frames
        for body, key, hashed, tags, headers, sent in zip(
            frame.binary(Column.BODY).to_pylist(),
            frame.binary(Column.KEY).to_pylist() if frame.has(Column.KEY) else [b""],
            frame.fixed(Column.KEY_HASH).tolist() if frame.has(Column.KEY_HASH) else [None],
            frame.binary(Column.TAGS).to_pylist() if frame.has(Column.TAGS) else [b""],
            frame.binary(Column.HEADERS).to_pylist() if frame.has(Column.HEADERS) else [b""],
            frame.fixed(Column.SEND_TIME).tolist() if frame.has(Column.SEND_TIME) else [None],
            strict=True,
        )
    ]
    assert rows[0] == (b"yyyyy", b"k2", 6, b"", b"", now - 5)
    assert rows[1][0] == b"plain"
    assert rows[1][1] == b""
    assert rows[1][5] is None
    assert rows[2] == (b"xxxxx", b"k1", 5, b"\x1fnew\x1f", b"\x81\xa1a\x01", now - 5)


def test_a_resend_schedules_nothing_twice(node: Node, producer: Producer) -> None:
    sent = delayed_frame(producer, node.clock.now() + SECOND, b"a")
    submit(node, sent)
    node.turn()
    again = submit(node, sent)
    node.turn()
    assert again.sequence == 0
    assert schedules(node).count == 1
    later(node, 1)
    assert delivered(node) == [b"a"]


# --- refusals -----------------------------------------------------------------------------------


def test_impossible_due_times_and_wrong_partitions_are_refused(node: Node, producer: Producer) -> None:
    plain = node.submit(delayed_frame(producer, node.clock.now(), b"x"))
    assert isinstance(plain.error, FrameError)
    timeless = submit(node, Producer(8).frame("orders", b"x"))
    assert isinstance(timeless.error, FrameError)
    far = int(WAIT_SECONDS_MAX * SECOND)
    too_far = submit(node, delayed_frame(Producer(9), node.clock.now() + far + 61 * SECOND, b"x"))
    assert isinstance(too_far.error, InvalidArgument)
    node.turn()
    assert schedules(node).count == 0
    assert delay(node, Producer(10), node.clock.now() + far, b"two years") == 0


def test_an_unknown_subject_has_no_schedule(node: Node) -> None:
    with pytest.raises(SubjectNotFound):
        delayed_requests.cancel(node.broker, "unknown", 0, 5)


# --- cancel and reschedule ------------------------------------------------------------------------


def test_the_number_of_remembered_cancelled_messages_is_limited(producer: Producer) -> None:
    node = Node(limits=ServerLimits(schedule_settled=3))
    due = node.clock.now() + 3600 * SECOND
    delay(node, producer, due, *[b"%d" % i for i in range(6)])
    for number in range(2):
        # Unbucketed rows do not count.
        assert delayed_requests.cancel(node.broker, "orders", number, due)
    node.checkpoint()
    for number in range(2, 5):
        assert delayed_requests.cancel(node.broker, "orders", number, due)
    with pytest.raises(LimitExceeded):
        delayed_requests.cancel(node.broker, "orders", 5, due)
    node.turn()
    later(node, 3600)
    assert delivered(node) == [b"5"]


# --- crashes ----------------------------------------------------------------------------------------


def test_a_full_disk_delays_delivery_and_loses_nothing(producer: Producer) -> None:
    node = Node()
    delay(node, producer, node.clock.now() + SECOND, *[bytes([65 + i]) * 700 for i in range(20)])
    node.disk.fail("create", path="message/*", times=None, error=28)
    later(node, 1)
    first = len(delivered(node))
    assert first < 20
    assert node.broker.turn.failed is None
    assert schedules(node).count == 20 - first
    assert node.broker.next_deadline == pytest.approx(node.clock.monotonic() + 1)
    node.disk._faults.clear()
    later(node, 1)
    assert [body[:1] for body in delivered(node)] == [bytes([65 + i]) for i in range(20)]
    assert schedules(node).count == 0


def test_nothing_is_delivered_below_the_watermark(producer: Producer) -> None:
    node = Node(disk_free_min=1)
    delay(node, producer, node.clock.now() + SECOND, b"a")
    capacity, node.disk.capacity = node.disk.capacity, 0
    node.broker.turn.check_space()
    later(node, 5)
    assert delivered(node) == []
    with pytest.raises(DiskFull):
        delayed_requests.reschedule(node.broker, "orders", 0, node.clock.now() - 4 * SECOND, node.clock.now())
    node.disk.capacity = capacity
    node.broker.turn.check_space()
    later(node, 5)
    assert delivered(node) == [b"a"]


def test_a_full_window_does_not_keep_the_loop_busy(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcoming, "LOAD_MAX", 5)
    node = Node()
    due = node.clock.now() + SECOND
    delay(node, producer, [due + 10 * i for i in range(40)], *[b"x"] * 40)
    node.checkpoint()
    later(node, 0.9)
    deadline = node.broker.next_deadline
    assert deadline == pytest.approx(node.clock.monotonic() + 0.1)
    later(node, 0.1)
    assert len(delivered(node)) == 1
    later(node, 0.001)
    assert len(delivered(node)) == 40


def bytes_of_turns(node: Node, *subjects: str) -> list[int]:
    """The bytes that each turn delivers until no row is due."""
    sizes, before = [], 0
    while True:
        node.clock.advance(TURN_SECONDS)
        node.broker.run_timers()
        if not node.broker.due_delivery.ready:
            return sizes
        node.turn()
        total = sum(node.partition(subject).size for subject in subjects)
        sizes.append(total - before)
        before = total


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_turn_delivers_a_limited_number_of_bytes_over_all_subjects(bucketed: bool) -> None:
    node = Node(message_segment_size=32 * MIB)
    subjects = [f"s{index}" for index in range(6)]
    now = node.clock.now()
    for index, subject in enumerate(subjects):
        due = [now + SECOND + 10 * row + index for row in range(4)]
        delay(node, Producer(index + 1), due, *[b"x" * MIB] * 4, subject=subject)
    if bucketed:
        node.checkpoint()
    node.clock.advance(2)
    sizes = bytes_of_turns(node, *subjects)
    assert len(sizes) >= 3
    assert sum(sizes) > 24 * MIB
    assert max(sizes) < DELIVER_SIZE_MAX + 10_000
    assert schedules(node).count == 0


def test_a_turn_counts_headers_and_delivers_at_least_one_large_message(producer: Producer) -> None:
    node = Node(message_segment_size=32 * MIB)
    due = node.clock.now() + SECOND
    delay(node, producer, due, *[b""] * 200, headers=[msgspec.msgpack.encode({"h": "x" * 60_000})] * 200)
    delay(node, producer, due, b"x" * 16 * MIB)
    node.clock.advance(2)
    sizes = bytes_of_turns(node, "orders")
    assert len(sizes) == 3
    assert sizes[0] < DELIVER_SIZE_MAX + 100_000
    assert sizes[2] > 16 * MIB
    assert len(delivered(node)) == 201


def test_the_oldest_due_rows_are_delivered_first_when_not_all_fit() -> None:
    node = Node(message_segment_size=32 * MIB)
    now = node.clock.now()
    for subject, producer, offset in (("late", Producer(1), 5), ("early", Producer(2), 0)):
        delay(node, producer, [now + SECOND + offset + row for row in range(4)], *[b"x" * 3 * MIB] * 4, subject=subject)
    node.clock.advance(2)
    orders = []
    for _ in range(3):
        node.clock.advance(TURN_SECONDS)
        node.broker.run_timers()
        node.turn()
        orders.append((len(delivered(node, "early")), len(delivered(node, "late"))))
    assert orders == [(2, 0), (4, 0), (4, 2)]


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_clock_that_was_ahead_for_a_while_has_no_lasting_effect(
    node: Node, producer: Producer, bucketed: bool
) -> None:
    """Otherwise the window would load rows too early, by as much as the clock was ahead."""
    now = node.clock.now()
    delay(node, producer, [now + 7200 * SECOND, now + 9000 * SECOND], b"a", b"b")
    node.checkpoint()
    node.clock.jump(7200)
    run_due(node)
    assert delivered(node) == [b"a"]
    node.clock.jump(-7200)
    run_due(node)
    delay(node, producer, [now + (3600 + row) * SECOND for row in range(100)], *[b"%d" % row for row in range(100)])
    delay(node, producer, node.clock.now() + 1, b"soon")
    assert delayed_requests.cancel(node.broker, "orders", 3, now + 3601 * SECOND)
    if bucketed:
        node.checkpoint()
    assert len(schedules(node).window) <= 1
    later(node, 1)
    assert delivered(node) == [b"a", b"soon"]
    later(node, 3700)
    assert delivered(node) == [b"a", b"soon", *[b"%d" % row for row in range(100) if row != 1]]
    later(node, 9000)
    assert delivered(node)[-1] == b"b"
    assert schedules(node).count == 0
