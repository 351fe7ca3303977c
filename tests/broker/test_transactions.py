"""Half messages: invisible until the commit, published once, deleted by a rollback; checks, limits, and restarts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from plait.broker.config import BrokerConfig
from plait.broker.transactions.half_publisher import FRAME_COST, PUBLISH_SIZE_MAX
from plait.errors import (
    FrameError,
    InvalidArgument,
    LimitExceeded,
    OutOfSequence,
    StaleRoute,
    TransactionDecided,
    TransactionIncomplete,
    TransactionNotFound,
)
from plait.frame.builder import build_frame
from plait.frame.header import FLAG_UNSEQUENCED
from plait.limits import ServerLimits
from tests.broker.schedule_node import delivered, later, run_due
from tests.broker.transaction_node import Tx, begun, decide, poll
from tests.support.broker_node import NO_WATERMARKS, SMALL_SEGMENTS, Node, Producer, Sent


@pytest.fixture(params=["async", "sync"])
def node(request: pytest.FixtureRequest) -> Node:
    return Node(flush=request.param)


def limited(**limits: float) -> Node:
    return Node(config=BrokerConfig(**SMALL_SEGMENTS, **NO_WATERMARKS, limits=ServerLimits(**limits)))


# --- decisions ------------------------------------------------------------------------------------


def test_half_messages_are_invisible_until_the_commit(node: Node):
    tx = begun(node)
    assert tx.send(node, "orders", b"a").sequence is None
    tx.send(node, "bills", b"b")
    later(node, 60)
    assert delivered(node) == delivered(node, "bills") == []
    assert node.broker.schedules.count == 0
    decide(node, tx, commit=True, rows=2)
    assert delivered(node) == [b"a"]
    assert delivered(node, "bills") == [b"b"]


def test_rolled_back_messages_never_appear(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    decide(node, tx, commit=False)
    later(node, 100_000)
    node = node.restart()
    later(node, 100_000)
    assert delivered(node) == []
    assert node.broker.transactions.table.rows == node.broker.transactions.table.size == 0


def test_a_decision_is_idempotent_and_cannot_be_changed(node: Node):
    tx, other = begun(node, 7), begun(node, 8)
    tx.send(node, "orders", b"a")
    other.send(node, "orders", b"b")
    decide(node, tx, commit=True)
    decide(node, tx, commit=True)
    decide(node, other, commit=False)
    for _ in range(2):
        with pytest.raises(TransactionDecided, match="7 was committed before, which is final; begin another one"):
            node.broker.transactions.decide(7, commit=False)
        with pytest.raises(TransactionDecided, match="was rolled back before") as caught:
            node.broker.transactions.decide(8, commit=True)
        assert caught.value.details == {"transaction": "0000000000000008", "outcome": "rolled back"}
        node = node.restart()
    assert delivered(node) == [b"a"]


def test_a_second_decision_in_the_turn_of_the_first_is_refused(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node.broker.transactions.decide(7, commit=True)
    node.broker.transactions.decide(7, commit=True)
    with pytest.raises(TransactionDecided):
        node.broker.transactions.decide(7, commit=False)


def test_a_forgotten_transaction_has_an_error_of_its_own():
    node = limited(transactions_remembered=2)
    for number in range(1, 5):
        tx = begun(node, number)
        tx.send(node, "orders", b"%d" % number)
        decide(node, tx, commit=True)
    with pytest.raises(TransactionNotFound, match="decided long ago, or no message of it is stored"):
        node.broker.transactions.decide(1, commit=True)
    with pytest.raises(TransactionNotFound):
        node.broker.transactions.decide(99, commit=False)
    assert delivered(node) == [b"1", b"2", b"3", b"4"]


def test_a_late_half_message_of_a_decided_transaction_is_refused(node: Node):
    tx = begun(node)
    sent = tx.send(node, "orders", b"a")
    decide(node, tx, commit=True)
    assert isinstance(tx.submit(node, sent).error, TransactionDecided)
    assert isinstance(tx.submit(node, tx.frame(node, "orders", b"b")).error, TransactionDecided)
    assert delivered(node) == [b"a"]


def test_a_half_message_needs_a_transaction_that_was_begun(node: Node):
    tx = Tx(7)
    assert isinstance(tx.submit(node, tx.frame(node, "orders", b"a")).error, TransactionNotFound)
    begun(node, 8, "one")
    with pytest.raises(InvalidArgument, match="exists already"):
        begun(node, 8, "two")


def test_an_incomplete_transaction_is_not_committed(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    with pytest.raises(TransactionIncomplete, match="has 1 messages here, not 2"):
        node.broker.transactions.decide(7, commit=True, rows=2)
    decide(node, tx, commit=False)
    assert delivered(node) == []


def test_a_transaction_without_messages_can_be_decided(node: Node):
    decide(node, begun(node, 7), commit=True)
    decide(node, begun(node, 8), commit=False)
    assert not node.broker.transactions.table.live


# --- frames ---------------------------------------------------------------------------------------


def test_a_resent_frame_is_stored_once(node: Node):
    tx = begun(node)
    first = tx.send(node, "orders", b"a")
    tx.send(node, "orders", b"b")
    assert tx.submit(node, first).acknowledged or not first.answers[1:]
    node.turn()
    decide(node, tx, commit=True, rows=2)
    assert delivered(node) == [b"a", b"b"]


def test_a_frame_after_a_gap_is_refused(node: Node):
    tx = begun(node)
    tx.frame(node, "orders", b"lost")
    error = tx.submit(node, tx.frame(node, "orders", b"b")).error
    assert isinstance(error, OutOfSequence)
    assert error.details["last"] == 0


def test_a_frame_that_overlaps_stored_rows_is_refused(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a", b"b")
    tx.next = 2
    assert isinstance(tx.submit(node, tx.frame(node, "orders", b"other", b"c")).error, OutOfSequence)
    decide(node, tx, commit=True, rows=2)
    assert delivered(node) == [b"a", b"b"]


def test_other_frames_do_not_enter_a_half_partition(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    half = node.broker.transactions.partition_of("orders")
    now = node.clock.now()
    frames = [
        build_frame([b"x"], producer=7, first=2, previous=1, flags=FLAG_UNSEQUENCED, note=b"shop"),
        build_frame([b"x"], producer=7, first=2, previous=1, deliver_at=now, note=b"shop"),
        build_frame([b"x"], producer=7, first=2, previous=1, deliver_at=now, flags=FLAG_UNSEQUENCED, note=b"other"),
        build_frame([b"x"], producer=7, first=2, previous=1, deliver_at=now, flags=FLAG_UNSEQUENCED, note=b"%x"),
        build_frame([b"x"], producer=7, first=2, previous=1, deliver_at=now, flags=FLAG_UNSEQUENCED, note=b"\xff"),
        build_frame([b"x"], producer=7, first=2, previous=1, deliver_at=now),
        build_frame([b"x"], producer=7, first=2, previous=1),
    ]
    for parts in frames:
        sent = Sent("orders", parts.tobytes(), [b"x"])
        with pytest.raises(FrameError):
            node.broker.submit(half, sent.view, sent.answer)
    other = Sent("orders", frames[2].tobytes(), [b"x"])
    with pytest.raises(FrameError, match="belongs to producer group 'shop', and this frame names 'other'"):
        node.broker.submit(half, other.view, other.answer)
    good = Sent("orders", frames[1].tobytes(), [b"x"])
    with pytest.raises(FrameError):
        node.broker.submit(node.partition("orders"), good.view, good.answer)


def test_a_partition_that_takes_no_messages_takes_no_half_messages(node: Node):
    tx, late = begun(node, 7), begun(node, 8)
    tx.send(node, "orders", b"a")
    node.partition("orders").accepts = np.zeros(1024, bool)
    assert isinstance(late.submit(node, late.frame(node, "orders", b"b")).error, StaleRoute)


# --- order and delays -----------------------------------------------------------------------------


def test_messages_keep_their_order_and_their_ids(node: Node):
    tx = begun(node)
    for body in (b"a", b"b", b"c"):
        tx.send(node, "orders", body)
    decide(node, tx, commit=True)
    rows = node.stored("orders")
    assert [(row.producer, row.number, row.body) for row in rows] == [(7, 1, b"a"), (7, 2, b"b"), (7, 3, b"c")]


def test_a_committed_message_with_a_delay_waits_for_its_due_time(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"later", delay=100)
    tx.send(node, "orders", b"now")
    decide(node, tx, commit=True)
    assert delivered(node) == [b"now"]
    assert node.broker.schedules.count == 1
    later(node, 101)
    assert delivered(node) == [b"now", b"later"]


def test_a_delayed_message_that_is_committed_late_is_due_at_once(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a", delay=10)
    later(node, 100)
    assert delivered(node) == []
    decide(node, tx, commit=True)
    assert delivered(node) == [b"a"]


# --- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_open_transaction_survives_a_crash(node: Node, checkpoint: bool):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    if checkpoint:
        node.checkpoint()
    node = node.killed()
    tx.send(node, "orders", b"b")
    node = node.killed()
    decide(node, tx, commit=True, rows=2)
    node = node.killed()
    run_due(node)
    assert delivered(node) == [b"a", b"b"]


def test_a_commit_survives_a_crash_before_anything_is_published(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node.broker.half_publisher._held_until = node.clock.monotonic() + 1e9
    node.broker.transactions.decide(7, commit=True)
    node.broker.half_publisher.ready = False
    node.turn()
    node = node.killed()
    assert delivered(node) == []
    run_due(node)
    run_due(node)
    assert delivered(node) == [b"a"]


def test_a_copy_proves_the_commit_after_its_event_was_lost():
    node = Node(flush="async")
    tx = begun(node)
    tx.send(node, "orders", b"a")
    tx.send(node, "bills", b"b")
    node.sync()
    node.broker.transactions.decide(7, commit=True)
    node.turn()
    # The message log reaches the disk, the action log does not.
    node.broker.message_log.begin_sync().run()
    node = node.power_lost("none", random.Random(1))
    run_due(node)
    run_due(node)
    assert delivered(node) == [b"a"]
    assert delivered(node, "bills") == [b"b"]
    with pytest.raises(TransactionDecided):
        node.broker.transactions.decide(7, commit=False)


def test_without_a_checkpoint_open_transactions_wait_for_an_operator():
    node = Node()
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node = node.restart()
    for name in [name for name in node.disk.list("checkpoints") if name.startswith("manifest-")]:
        node.disk.flip_bit(f"checkpoints/{name}", 20, 3)
    node = node.killed()
    node.clock.advance(1000)
    node.broker.run_timers()
    assert poll(node).answers == []
    assert "is parked, because its decision may be lost" in " ".join(node.broker.schedules.notices)
    decide(node, tx, commit=True)
    assert delivered(node) == [b"a"]


# --- subjects and space ---------------------------------------------------------------------------


def test_deleting_a_subject_deletes_its_half_messages(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    tx.send(node, "bills", b"b")
    node.broker.delete_subject("orders")
    node.turn()
    assert node.broker.transactions.table.rows == 1
    node = node.restart()
    decide(node, tx, commit=True, rows=2)
    assert delivered(node, "bills") == [b"b"]
    assert delivered(node) == []


def test_a_subject_that_is_deleted_during_a_checkpoint_is_not_published(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    tx.send(node, "bills", b"b")
    node.broker.snapshots.begin()
    node.broker.delete_subject("orders")
    node.turn()
    work = node.broker.snapshots.work
    assert work is not None
    work.copy_all().run()
    node.broker.snapshots.end(work)
    node = node.killed()
    decide(node, tx, commit=True)
    assert delivered(node, "bills") == [b"b"]
    assert not node.broker.transactions.table.live


def test_a_full_disk_delays_publishing_and_loses_nothing(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node.broker.turn.low_space = "the disk is full"
    decide(node, tx, commit=True)
    assert delivered(node) == []
    node.broker.turn.low_space = ""
    later(node, 2)
    run_due(node)
    assert delivered(node) == [b"a"]


def test_half_messages_outlive_retention_and_do_not_hold_the_log():
    node = Node(retention_seconds=100.0)
    tx = begun(node)
    tx.send(node, "orders", b"parked for long")
    producer = Producer(1)
    for _ in range(30):
        for _ in range(4):
            assert node.send("others", b"x" * 3000, producer=producer).acknowledged
        node.clock.advance(90)
        node.checkpoint()
        node.retention.run()
        node.turn()
    assert node.broker.message_log.start > 250_000
    assert node.broker.message_log.end - node.broker.message_log.start < 200_000
    node = node.killed()
    decide(node, tx, commit=True, rows=1)
    assert delivered(node) == [b"parked for long"]


def test_a_moved_half_message_is_found_behind_later_ones_without_a_checkpoint():
    node = Node(retention_seconds=100.0)
    tx = begun(node)
    tx.send(node, "orders", b"a")
    assert node.send("others", b"x" * 100_000).acknowledged
    tx.send(node, "orders", b"b")
    first = node.broker.message_log.segments[1].base
    assert node.broker.half_publisher.move(first)
    node.turn()
    node.broker.message_log.remove_before(first)
    for name in [name for name in node.disk.list("checkpoints") if name.startswith("manifest-")]:
        node.disk.flip_bit(f"checkpoints/{name}", 20, 3)
    node = node.killed()
    decide(node, tx, commit=True, rows=2)
    assert delivered(node) == [b"a", b"b"]


# --- limits ---------------------------------------------------------------------------------------


def test_a_turn_publishes_and_moves_a_limited_number_of_frames():
    node = Node(retention_seconds=100.0)
    most = PUBLISH_SIZE_MAX // FRAME_COST + 1
    bodies = [b"%d" % number for number in range(3 * most)]
    tx = begun(node)
    for body in bodies:
        tx.submit(node, tx.frame(node, "orders", body))
    node.turn()
    half, end = node.broker.transactions.partition_of("orders"), node.broker.message_log.end
    turns = 0
    while node.broker.half_publisher.move(end):
        moved = half.next - (turns + 3) * most
        assert 0 < moved <= most
        node.turn()
        turns += 1
    assert turns >= 3
    node.broker.transactions.decide(tx.id, commit=True)
    waiting = [node.broker.transactions.table.rows]
    while waiting[-1]:
        node.turn()
        waiting.append(node.broker.transactions.table.rows)
    assert all(0 < before - after <= most for before, after in itertools.pairwise(waiting))
    run_due(node)
    assert delivered(node) == bodies


def test_a_full_table_refuses_to_begin():
    node = limited(transactions=2)
    begun(node, 1)
    begun(node, 2)
    with pytest.raises(LimitExceeded, match="limit `transactions` of the broker: 2") as caught:
        begun(node, 3)
    assert caught.value.details["limit"] == "transactions"
    node.broker.transactions.decide(1, commit=False)
    begun(node, 3)


@pytest.mark.parametrize(
    ("limit", "value"), [("transaction_rows", 2), ("transaction_bytes", 400), ("half_rows", 2), ("half_bytes", 400)]
)
def test_a_transaction_has_limits(limit: str, value: int):
    node = limited(**{limit: value})
    tx = begun(node)
    tx.send(node, "orders", b"a")
    tx.send(node, "orders", b"b")
    error = tx.submit(node, tx.frame(node, "orders", b"c")).error
    assert isinstance(error, LimitExceeded)
    assert error.details["limit"] == limit
    decide(node, tx, commit=True, rows=2)
    assert delivered(node) == [b"a", b"b"]


def test_too_many_parked_transactions_refuse_to_begin():
    node = limited(transactions_parked=1, transaction_checks=0)
    begun(node, 1).send(node, "orders", b"a")
    later(node, 7)
    with pytest.raises(LimitExceeded) as caught:
        begun(node, 2)
    assert caught.value.details["limit"] == "transactions_parked"


# --- checks ---------------------------------------------------------------------------------------


def test_a_producer_of_the_group_is_asked_after_six_seconds(node: Node):
    begun(node, 7).send(node, "orders", b"a")
    begun(node, 8, "other").send(node, "orders", b"b")
    waiting = poll(node)
    node.later(5.9)
    assert waiting.answers == []
    node.later(0.2)
    assert waiting.answers == [[7]]


def test_checks_repeat_every_thirty_seconds_and_end_with_parking(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    times = []
    node.later(5)
    for second in range(5, 600):
        waiting = poll(node, 0.5)
        node.later(1)
        if waiting.answers[0]:
            times.append(second + 1)
    assert times == [6 + 30 * number for number in range(15)]
    assert [each.state for each in node.broker.transactions.table.live.values()] == ["parked"]
    node = node.restart()
    assert [(each.state, each.checks) for each in node.broker.transactions.table.live.values()] == [("parked", 15)]
    decide(node, tx, commit=True)
    assert delivered(node) == [b"a"]


def test_a_check_waits_for_a_producer_and_counts_only_then(node: Node):
    begun(node).send(node, "orders", b"a")
    node.later(10_000)
    [transaction] = node.broker.transactions.table.live.values()
    assert transaction.checks == 0
    assert poll(node, gone=True).answers == []
    assert transaction.checks == 0
    assert poll(node).answers == [[7]]
    assert transaction.checks == 1
    assert poll(node, 0.5).answers == []


def test_a_producer_that_left_does_not_swallow_a_check(node: Node):
    begun(node).send(node, "orders", b"a")
    left, stays = poll(node, gone=True), poll(node)
    node.later(7)
    assert left.answers == []
    assert stays.answers == [[7]]


def test_each_check_goes_to_one_producer(node: Node):
    begun(node, 7).send(node, "orders", b"a")
    one, two = poll(node), poll(node)
    node.later(7)
    assert (one.answers, two.answers) == ([[7]], [])
    begun(node, 8).send(node, "orders", b"a")
    node.later(7)
    assert two.answers == [[8]]


def test_a_poll_ends_after_its_wait(node: Node):
    waiting = poll(node, 5.0)
    node.later(5.1)
    assert waiting.answers == [[]]


def test_a_decided_transaction_is_not_checked(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node.later(7)
    decide(node, tx, commit=True)
    assert poll(node).answers == []


def test_a_restart_starts_the_intervals_again(node: Node):
    begun(node).send(node, "orders", b"a")
    node.later(5)
    node = node.killed()
    waiting = poll(node)
    node.later(5.9)
    assert waiting.answers == []
    node.later(0.2)
    assert waiting.answers == [[7]]


def test_a_new_message_starts_the_first_interval_again(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node.later(5)
    tx.send(node, "orders", b"b")
    waiting = poll(node)
    node.later(5)
    assert waiting.answers == []
    node.later(1.1)
    assert waiting.answers == [[7]]


def test_a_new_message_ends_the_wait_for_a_producer(node: Node):
    tx = begun(node)
    tx.send(node, "orders", b"a")
    node.later(100)
    tx.send(node, "orders", b"b")
    waiting = poll(node)
    assert waiting.answers == []
    node.later(6.1)
    assert waiting.answers == [[7]]


def test_a_transaction_without_messages_is_forgotten(node: Node):
    begun(node)
    node.later(7)
    assert not node.broker.transactions.table.live
