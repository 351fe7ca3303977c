"""Pulls, acks, nacks, suspended pulls and redelivery of shared groups."""

from __future__ import annotations

import random

import numpy as np
import pytest

from plait.broker.views import group_view
from plait.errors import GroupBusy, GroupMismatch, GroupNotFound, InvalidArgument, LimitExceeded
from plait.limits import ServerLimits
from tests.support.broker_node import Node, Producer, Pulled, rows_of

LOST = 6.0


def filled(count: int = 10, **settings: object) -> Node:
    node = Node(**settings)
    for number in range(count):
        node.send("orders", b"%d" % number)
    return node


# --- pulling ------------------------------------------------------------------------------------


def test_sixty_groups_have_separate_progress():
    node = filled(20)
    consumers = [node.attach("orders", f"g{n}") for n in range(60)]
    for number, consumer in enumerate(consumers):
        pulled = node.pull(consumer, 1 + number % 20)
        assert [row.sequence for row in pulled.rows] == list(range(1 + number % 20))
        node.ack(consumer, (0, number % 20))
    again = node.restart()
    for number in range(60):
        group = again.group("orders", f"g{number}")
        assert (group.cursor.floor, group.cursor.next) == (number % 20, 1 + number % 20)
        assert group_view(group).lag == 20 - number % 20


def test_a_pull_stops_at_its_count_and_at_its_size():
    node = Node()
    for _ in range(4):
        node.send("orders", *[b"x" * 100] * 5)
    consumer = node.attach("orders", "g")
    assert node.pull(consumer, 7).ranges == [(0, 7, 1)]
    frame_size = node.partition("orders").consume_log.record(0).size
    assert node.pull(consumer, 1000, 2 * frame_size).ranges == [(7, 15, 1)]
    assert node.pull(consumer, 1000, 1).ranges == [(15, 20, 1)], "one frame is always returned"


def test_the_limits_of_the_server_bound_a_pull():
    node = filled(10, limits=ServerLimits(pull_count=3, pull_bytes=1))
    consumer = node.attach("orders", "g")
    assert node.pull(consumer, 10**9, 10**9).ranges == [(0, 1, 1)]
    assert node.pull(consumer, 0).ranges == [(1, 2, 1)]


def test_returned_rows_are_delivered_before_new_ones():
    node = filled()
    consumer = node.attach("orders", "g")
    node.pull(consumer, 5)
    node.nack(consumer, (1, 3))
    assert node.pull(consumer, 3).ranges == [(1, 3, 2), (5, 6, 1)]
    assert node.group("orders", "g").redelivered_count == 2


# --- suspended pulls ----------------------------------------------------------------------------


def test_a_suspended_pull_ends_at_its_deadline_and_leaves_no_state():
    node = Node()
    consumer = node.attach("orders", "g")
    for _ in range(50):
        pulled = node.pull(consumer, wait=20)
        assert node.broker.next_deadline == pytest.approx(node.clock.monotonic() + 20)
        node.clock.advance(20)
        node.broker.run_timers()
        assert pulled.answers == [None]
        consumer.last_contact = node.clock.monotonic()
    assert node.broker.next_deadline is None
    assert len(consumer.group.waiters) == 0
    node.send("orders", b"a")
    assert node.pull(consumer, wait=20).bodies == [b"a"]


def test_no_pull_is_suspended_longer_than_the_limit_of_the_server():
    node = Node(limits=ServerLimits(pull_wait_seconds=3))
    pulled = node.pull(node.attach("orders", "g"), wait=1000)
    node.clock.advance(3)
    node.broker.run_timers()
    assert pulled.answers == [None]


def test_the_pull_that_was_suspended_first_is_answered_first():
    node = Node()
    consumers = [node.attach("orders", "g", f"c{n}") for n in range(3)]
    waiting = [node.pull(consumer, 1, wait=20) for consumer in consumers]
    node.send("orders", b"a")
    node.send("orders", b"b")
    assert [pulled.answered for pulled in waiting] == [True, True, False]


def test_rows_wake_suspended_pulls_and_reads_of_all_groups():
    node = Node()
    waiting = [node.pull(node.attach("orders", f"g{n}"), wait=20) for n in range(5)]
    reading = node.read("orders", 0, wait=20)
    node.send("orders", b"a")
    assert [pulled.bodies for pulled in waiting] == [[b"a"]] * 5
    assert len(reading.answers) == 1


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("size", [10, 10_000])
def test_a_suspended_pull_gets_the_bytes_that_are_in_the_log(flush: str, size: int):
    node = Node(flush=flush)
    node.send("orders", b"before")
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    for bodies in ([b"a" * size], [b"b" * size, b"c" * size]):
        waiting, reading = node.pull(consumer, wait=20), node.read("orders", node.partition("orders").visible, wait=20)
        node.send("orders", *bodies)
        assert waiting.bodies == bodies
        partition = node.partition("orders")
        assert partition.newest is None, "the memory of the frame is free again"
        stored = partition.read(node.broker.message_log, waiting.rows[0].sequence, partition.visible, 10, 1 << 20)
        assert b"".join(waiting.answers[0].parts) == b"".join(stored.parts) == b"".join(reading.answers[0].parts)
        assert (waiting.answers[0].size, reading.answers[0].end) == (stored.size, stored.end)


def test_a_suspended_pull_gets_no_more_rows_than_it_asked_for():
    node = Node()
    pulls = [node.pull(node.attach("orders", f"g{count}"), count, wait=20) for count in (1, 2, 3)]
    reading = node.read("orders", 0, count=2, wait=20)
    node.send("orders", b"a", b"b", b"c")
    assert [pulled.bodies for pulled in pulls] == [[b"a"], [b"a", b"b"], [b"a", b"b", b"c"]]
    assert [row.body for row in rows_of(reading.answers[0].parts)] == [b"a", b"b"]


def test_a_suspended_pull_gets_all_frames_of_a_turn():
    node, producer = Node(), Producer(9)
    waiting = node.pull(node.attach("orders", "g"), wait=20)
    sent = [producer.frame("orders", b"a"), producer.frame("orders", b"b", keys=[b"k"], key_hashes=np.ones(1, "u8"))]
    for each in sent:
        node.submit(each)
    node.turn()
    assert waiting.bodies == [b"a", b"b"]


def test_a_consumer_with_too_many_open_ranges_gets_no_new_rows_and_delays_no_other():
    node = filled(20, limits=ServerLimits(consumer_ranges=2))
    one, two = node.attach("orders", "g", "c1"), node.attach("orders", "g", "c2")
    node.pull(one, 5)
    node.ack(one, (1, 2), (3, 4))
    assert node.pull(one).ranges == []
    stuck = node.pull(one, 5, wait=20)
    assert not stuck.answered
    assert node.pull(two, 5).ranges == [(5, 10, 1)], "other consumers are not delayed"
    node.ack(one, (0, 1), (2, 3))
    assert stuck.ranges == [(10, 15, 1)], "it continues when it is below the limit"


def test_suspended_pulls_after_a_blocked_one_are_answered():
    node = filled(4, limits=ServerLimits(consumer_ranges=1))
    one, two = node.attach("orders", "g", "c1"), node.attach("orders", "g", "c2")
    node.pull(one)
    stuck, waiting = node.pull(one, wait=20), node.pull(two, wait=20)
    node.send("orders", b"new")
    assert not stuck.answered
    assert waiting.bodies == [b"new"]


# --- acks and nacks -----------------------------------------------------------------------------


def test_an_ack_is_answered_after_its_event_was_written():
    node = filled(3)
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    answered: list[bool] = []
    written = node.broker.action_log.written
    node.broker.ack(consumer, [(0, 3, node.broker.turn.epoch)], lambda: answered.append(True))
    assert answered == []
    node.commit()
    assert answered == [True]
    assert node.broker.action_log.written > written


def test_rows_are_delivered_before_their_event_is_written_only_if_a_crash_may_redeliver_them():
    node = filled(3)
    least = node.attach("orders", "least")
    most = node.attach("orders", "most", delivery="at_most_once")
    first, once = Pulled(), Pulled()
    written = node.broker.action_log.written
    node.broker.pull(least, 10, 1 << 20, 0, first.answer)
    node.broker.pull(most, 10, 1 << 20, 0, once.answer)
    assert node.broker.action_log.written == written
    assert first.ranges == [(0, 3, 1)]
    assert not once.answered
    node = node.killed()
    again = node.pull(node.attach("orders", "least"))
    assert again.bodies == first.bodies


@pytest.mark.parametrize("ranges", [(7, 3), (3, 3), (-5, -1), (100, 200), (1 << 62, 1 << 63)])
def test_invalid_ranges_change_nothing(ranges: tuple[int, int]):
    node = filled(5)
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    assert node.ack(consumer, ranges) == [True]
    assert node.nack(consumer, ranges) == [True]
    log = consumer.group.cursor
    assert (log.next, list(log.returned), log.held_count) == (5, [], 5)


# --- attaching and detaching --------------------------------------------------------------------


def test_a_silent_consumer_is_lost_and_its_rows_are_redelivered_at_once():
    node = filled(4)
    one, two = node.attach("orders", "g", "c1"), node.attach("orders", "g", "c2")
    node.pull(one)
    waiting = node.pull(two, wait=60)
    node.clock.advance(4)
    node.contact(two)
    node.clock.advance(2)
    assert node.membership.lose_silent() == [(one, 4)]
    assert waiting.ranges == [(0, 4, 2)]
    assert list(node.broker.sessions) == [two.session]


def test_a_lost_connection_returns_no_rows_before_the_consumer_is_lost():
    node = filled(4)
    one, two = node.attach("orders", "g", "c1"), node.attach("orders", "g", "c2")
    node.pull(one)
    waiting = node.pull(one, wait=60)
    node.membership.disconnected(one, one.session)
    assert node.pull(two).ranges == []
    node.send("orders", b"new")
    assert not waiting.answered, "its pull ended with the connection"
    assert node.pull(two).bodies == [b"new"]
    node.clock.advance(LOST)
    node.contact(two)
    node.membership.lose_silent()
    assert node.pull(two).ranges == [(0, 4, 2)]


def test_a_client_that_is_attached_cannot_be_attached_twice():
    node = filled(1)
    consumer = node.attach("orders", "g")
    with pytest.raises(GroupBusy, match="'c1' is already attached to group 'g' of 'orders'"):
        node.attach("orders", "g")
    node.membership.disconnected(consumer, consumer.session)
    assert node.attach("orders", "g") is consumer


def test_members_of_a_group_agree_on_its_delivery():
    node = filled(1)
    node.attach("orders", "g", "c1")
    with pytest.raises(GroupMismatch, match="delivery='at_least_once', this member asks for 'at_most_once'"):
        node.attach("orders", "g", "c2", delivery="at_most_once")


def test_the_number_of_groups_is_limited():
    node = Node(limits=ServerLimits(groups=2))
    node.attach("orders", "g1")
    node.attach("orders", "g2")
    with pytest.raises(LimitExceeded, match="group limit reached \\(2 per broker"):
        node.attach("orders", "g3")


def test_lost_consumers_and_idle_broadcast_groups_are_forgotten():
    node = filled(3)
    shared = node.attach("orders", "g", "c1")
    broadcast = node.attach("orders", None, "b1", start="earliest")
    node.pull(shared)
    node.clock.advance(LOST)
    node.membership.lose_silent()
    assert shared.group.consumers == broadcast.group.consumers == {}
    assert node.forget_idle() == 0
    node.clock.advance(2 * 86400 + 1)
    assert node.forget_idle() == 1
    node.turn()
    assert shared.group.consumers == {}
    assert set(node.partition("orders").groups) == {"g"}
    assert broadcast.session not in node.broker.sessions
    again = node.killed()
    assert set(again.partition("orders").groups) == {"g"}
    assert again.group("orders", "g").consumers == {}
    assert len(again.broker.catalog.groups) == 1
    assert again.pull(again.attach("orders", "g", "c9")).ranges == [(0, 3, 2)]


# --- broadcast ----------------------------------------------------------------------------------


def test_every_broadcast_consumer_gets_all_rows_from_its_attachment_on():
    node = filled(3)
    consumers = [node.attach("orders", None, f"b{n}") for n in range(3)]
    node.send("orders", b"new")
    for consumer in consumers:
        assert node.pull(consumer).bodies == [b"new"]


def test_a_broadcast_consumer_that_returns_continues_after_its_last_ack():
    node = filled(10)
    consumer = node.attach("orders", None, "b1", start="earliest")
    node.pull(consumer)
    node.ack(consumer, (0, 3), (5, 6))
    events = node.broker.action_log.written
    node.pull(consumer)
    assert node.broker.action_log.written == events, "pulls are not logged"
    for again in (node.killed(), node.power_lost("all")):
        back = again.attach("orders", None, "b1")
        assert [r[:2] for r in again.pull(back).ranges] == [(3, 5), (6, 10)]


# --- start positions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, 0),
        ("earliest", 0),
        ("latest", 10),
        (["sequence", 4], 4),
        (["sequence", 99], 10),
        (["time", 0], 0),
        (["time", 1_700_000_005_000_000], 5),
        (["time", 1_800_000_000_000_000], 10),
    ],
)
def test_a_group_starts_at_the_given_position(start: object, expected: int):
    node = Node()
    for number in range(10):
        node.send("orders", b"%d" % number)
        node.clock.advance(1)
    assert node.attach("orders", "g", start=start).group.cursor.next == expected
    other = node.attach("orders", "h", start="latest" if start == "earliest" else "earliest")
    node.membership.detach(other)
    assert node.membership.rewind("orders", "h", start or "earliest", skipping=True).position == expected
    node.turn()
    assert node.killed().group("orders", "h").cursor.next == expected


@pytest.mark.parametrize("start", ["middle", ["sequence", -1], ["sequence", "x"], ["time"], 7, {"a": 1}])
def test_an_invalid_start_position_is_refused(start: object):
    with pytest.raises(InvalidArgument, match="is not valid; use 'earliest', 'latest', a sequence or a time"):
        Node().attach("orders", "g", start=start)


def test_a_rewind_needs_an_idle_group_and_forgets_held_rows():
    node = filled(10)
    consumer = node.attach("orders", "g")
    node.pull(consumer, 6)
    node.nack(consumer, (0, 2))
    with pytest.raises(GroupBusy, match="has 1 connected consumer \\(c1\\); stop it first"):
        node.membership.rewind("orders", "g", "earliest")
    node.membership.detach(consumer)
    assert node.membership.rewind("orders", "g", ["sequence", 4], skipping=True).position == 4
    node.turn()
    for again in (node, node.killed()):
        assert again.pull(again.attach("orders", "g")).ranges == [(4, 10, 1)]
    with pytest.raises(GroupNotFound, match="no group 'x'; it has: g"):
        node.membership.rewind("orders", "x", "earliest")


def test_a_deleted_group_starts_again_without_progress():
    node = filled(3)
    consumer = node.attach("orders", "g")
    node.ack(consumer, (0, 3))
    node.membership.remove_group(consumer.group)
    node.turn()
    assert len(node.broker.catalog.groups) == 0
    again = node.killed()
    assert len(again.broker.catalog.groups) == 0
    assert again.pull(again.attach("orders", "g")).ranges == [(0, 3, 1)]


def test_a_reply_with_returned_rows_stays_within_its_limit():
    node = Node()
    producer = Producer(7)
    node.send("orders", b"a" * (3 << 20), producer=producer)
    consumer = node.attach("orders", "g")
    assert node.pull(consumer, size=4 << 20).ranges == [(0, 1, 1)]
    node.send("orders", b"b" * (16 << 20), producer=producer)
    node.nack(consumer, (0, 1))
    assert node.pull(consumer, size=4 << 20).ranges == [(0, 1, 2)]
    assert node.pull(consumer, size=4 << 20).ranges == [(1, 2, 1)]


def test_returned_rows_of_a_large_frame_are_delivered_together():
    node = Node()
    node.send("orders", *(b"%04d" % n * 250 for n in range(1000)), producer=Producer(7))
    consumer = node.attach("orders", "g")
    node.pull(consumer, size=4 << 20)
    node.nack(consumer, *((n, n + 1) for n in range(0, 100, 10)))
    assert [r[:2] for r in node.pull(consumer, size=1 << 20).ranges] == [(n, n + 1) for n in range(0, 100, 10)]


def header_size(node: Node) -> int:
    return sum(frame.size for frame in node.broker.segment_headers.of_action_segment(0))


@pytest.mark.parametrize("ordered", [False, True])
def test_clients_with_ever_new_names_leave_no_state(ordered: bool):
    node = filled(3)
    bare = header_size(node)
    for number in range(200):
        consumer = node.membership.attach("orders", "g", f"c{number:03d}", ordered=ordered)
        node.membership.disconnected(consumer, consumer.session)
    assert header_size(node) > bare + 200 * 10
    node.turn()
    again = node.killed()
    for each in (node, again):
        each.later(60)
        each.membership.lose_silent()
        each.forget_idle()
        each.turn()
        assert each.group("orders", "g").consumers == {}
        assert header_size(each) < bare + 300
        assert not each.killed().group("orders", "g").consumers


def test_consumers_without_a_connection_count_until_they_are_lost():
    node = Node(limits=ServerLimits(consumers=2))
    for client in ("c1", "c2"):
        consumer = node.attach("orders", "g", client)
        node.membership.disconnected(consumer, consumer.session)
    with pytest.raises(LimitExceeded, match=r"consumer limit reached \(2 per broker"):
        node.attach("orders", "g", "c3")
    # A consumer that attaches again is not counted twice.
    node.attach("orders", "g", "c1")
    node.clock.advance(LOST)
    node.membership.lose_silent()
    node.attach("orders", "g", "c3")


@pytest.mark.parametrize("log", ["action", "message"])
def test_a_segment_header_takes_at_most_half_of_its_segment(log: str):
    node = Node(message_segment_size=4096, action_segment_size=4096, limits=ServerLimits(consumers=1000))
    # Random names, which do not compress in a header.
    rng = random.Random(1)
    for _ in range(120):
        if log == "action":
            node.membership.attach("orders", "g", rng.randbytes(40).hex())
        else:
            node.partition(rng.randbytes(40).hex())
        node.turn()
    grown = getattr(node.broker, f"{log}_log")
    before = grown.end
    consumer = node.attach("orders", "g")
    for number in range(100):
        node.send("orders", b"x" * 50, producer=Producer(number + 10))
        node.pull(consumer)
        node.ack(consumer, (number, number + 1))
        grown.prepare_next()
    written = 100 * 400
    assert grown.end - before < 3 * written, "headers are not most of the written bytes"
    head = grown._header_size
    assert head > 4096
    assert all(segment.size >= 2 * head for segment in grown.segments[-1:])
