"""Retries of failed messages: when they are redelivered, and that only an ack prevents it."""

from __future__ import annotations

import pytest

from plait.broker.groups.group import AttachedConsumer
from plait.broker.groups.waking import STALE_MAX
from plait.errors import GroupBusy, GroupMismatch
from plait.limits import ServerLimits
from plait.model.retry_policy import Retry
from plait.storage.ranges import DueRanges
from tests.support.broker_node import Node

FIVE = Retry.constant(5, attempts=None)


def failed(node: Node, count: int = 3, *, delay: float | None = None) -> AttachedConsumer:
    """A consumer with the policy ``FIVE`` that nacked the first ``count`` rows."""
    node.send("orders", *(b"%d" % n for n in range(count)))
    consumer = node.attach("orders", "g", retry=FIVE)
    assert node.pull(consumer).ranges == [(0, count, 1)]
    node.nack(consumer, (0, count), delay=delay)
    return consumer


def test_a_due_retry_wakes_a_suspended_pull():
    node = Node()
    consumer = failed(node)
    pulled = node.pull(consumer, wait=30.0)
    due = node.broker.next_deadline
    assert due is not None
    assert 5 <= due - node.clock.monotonic() <= 5.1
    node.later(5.1)
    assert pulled.ranges == [(0, 3, 2)]


def test_a_clock_set_forward_makes_retries_due_and_one_set_back_delays_them():
    node = Node()
    consumer = failed(node)
    node.clock.jump(-3600)
    node.later(6)
    assert node.pull(consumer).ranges == []
    node.clock.jump(+3600)
    node.later(0)
    assert node.pull(consumer).ranges == [(0, 3, 2)]


def test_too_many_waiting_retries_hold_back_new_rows():
    node = Node(limits=ServerLimits(retry_ranges=3))
    node.send("orders", *[b"x"] * 10)
    consumer = node.attach("orders", "g", retry=FIVE)
    for sequence in (0, 1, 2):
        assert node.pull(consumer, 1).ranges == [(sequence, sequence + 1, 1)]
        # Different due times, so that the ranges are not merged.
        node.nack(consumer, (sequence, sequence + 1), delay=10.0 + sequence)
    assert node.pull(consumer).ranges == []
    node.later(10.5)
    assert node.pull(consumer, 1).ranges == [(0, 1, 2)]
    assert node.pull(consumer).ranges == [(3, 10, 1)]


def test_a_rewind_that_skips_forgets_waiting_retries():
    node = Node()
    consumer = failed(node)
    node.membership.detach(consumer)
    node.membership.rewind("orders", "g", "latest", skipping=True)
    node.turn()
    node.later(6)
    assert node.pull(node.attach("orders", "g")).ranges == []


def test_a_deleted_subject_has_no_due_retries():
    node = Node()
    failed(node)
    node.broker.delete_subject("orders")
    node.turn()
    node.later(6)
    assert node.broker.next_deadline is None


def test_waiting_rows_that_retention_deletes_are_counted_as_lost():
    node = Node()
    consumer = failed(node)
    partition = node.partition("orders")
    partition.start = 2
    node.later(6)
    assert node.pull(consumer).ranges == [(2, 3, 2)]
    assert node.group("orders", "g").lost_count == 2


# --- scattered rows -----------------------------------------------------------------------------------------------


def scattered(node: Node, count: int = 100) -> AttachedConsumer:
    """A consumer whose group has a due retry for every other row of one frame."""
    node.send("orders", *(b"%d" % n for n in range(count)))
    consumer = node.attach("orders", "g", retry=FIVE)
    node.pull(consumer)
    node.nack(consumer, *((n, n + 1) for n in range(0, count, 2)), delay=None)
    node.ack(consumer, *((n, n + 1) for n in range(1, count, 2)))
    node.later(6)
    return consumer


def test_scattered_rows_of_one_frame_are_delivered_as_one_frame():
    node = Node()
    pulled = node.pull(scattered(node))
    assert pulled.ranges == [(n, n + 1, 2) for n in range(0, 100, 2)]
    assert pulled.counts == [50]
    assert pulled.bodies == [b"%d" % n for n in range(0, 100, 2)]
    assert node.killed().group("orders", "g").cursor.held_count == 50


def test_a_pull_gets_as_many_scattered_rows_as_it_asks_for():
    node = Node()
    consumer = scattered(node)
    got: list[tuple[int, int, int]] = []
    for count in (1, 2, 7, 1000):
        pulled = node.pull(consumer, count)
        assert sum(end - start for start, end, _ in pulled.ranges) == min(count, 50 - len(got))
        got += pulled.ranges
    assert got == [(n, n + 1, 2) for n in range(0, 100, 2)]


def test_rows_with_different_attempts_are_delivered_in_separate_ranges():
    node = Node()
    consumer = scattered(node)
    node.pull(consumer, 10)
    node.nack(consumer, *((n, n + 1) for n in range(0, 20, 4)), delay=0.0)
    node.nack(consumer, *((n, n + 1) for n in range(2, 20, 4)), delay=5.0)
    pulled = node.pull(consumer)
    assert sorted(pulled.ranges) == sorted(
        [*((n, n + 1, 3) for n in range(0, 20, 4)), *((n, n + 1, 2) for n in range(20, 100, 2))]
    )
    assert pulled.counts == [5, 40]


def test_damaged_rows_are_skipped_and_counted():
    node = Node()
    consumer = scattered(node)
    path = "message/" + node.disk.list("message")[0]
    data = node.disk.read(path)
    node.disk.flip_bit(path, data.index(b"89"), 1)
    assert node.pull(consumer).ranges == []
    assert node.group("orders", "g").lost_count == 50
    assert node.group("orders", "g").cursor.floor == 100


# --- the group's setting -------------------------------------------------------------------------------------------


def test_the_policy_belongs_to_the_group_and_survives_a_restart():
    node = Node(flush="sync")
    node.attach("orders", "g", retry=FIVE)
    for again in (node, node.killed(), node.power_lost()):
        assert again.group("orders", "g").retry == FIVE
    node = node.restart()
    node.attach("orders", "g", retry=FIVE)
    member = node.attach("orders", "g", "other")
    assert member.group.retry == FIVE, "a member without a policy uses that of the group"
    with pytest.raises(GroupMismatch, match=r"has retry policy 5 s, this member asks for 10 s"):
        node.attach("orders", "g", "third", retry=Retry.constant(10, attempts=None))
    node.attach("orders", "g", "third", retry=FIVE)


def test_a_changed_policy_survives_two_starts():
    node = Node()
    node.membership.detach(node.attach("orders", "g", retry=FIVE))
    node.checkpoint()
    node.attach("orders", "g", "other", retry=Retry.constant(10, attempts=None))
    again = node.killed()
    assert again.group("orders", "g").retry == Retry.constant(10, attempts=None)
    assert again.killed().group("orders", "g").retry == Retry.constant(10, attempts=None)


def test_a_refused_member_changes_nothing():
    node = Node()
    node.attach("orders", "g", retry=FIVE)
    with pytest.raises(GroupBusy):
        node.attach("orders", "g", retry=Retry.constant(10, attempts=None))
    assert node.group("orders", "g").retry == FIVE


# --- cost ---------------------------------------------------------------------------------------------------------


def test_a_group_has_one_entry_in_the_retry_heap():
    node = Node()
    node.send("orders", b"far", b"near")
    consumer = node.attach("orders", "g", retry=FIVE)
    node.pull(consumer)
    node.nack(consumer, (0, 1), delay=86_400.0)
    for _ in range(300):
        node.nack(consumer, (1, 2), delay=1.0)
        node.later(1.1)
        assert node.pull(consumer).ranges[0][:2] == (1, 2)
    assert len(node.broker.retries._heap) <= 2 + STALE_MAX


def test_a_due_time_that_empties_and_fills_again_has_one_entry():
    waiting = DueRanges()
    for _ in range(100):
        waiting.add(0, 1, 1, 50)
        assert waiting.remove(0, 1)
    assert len(waiting._moments) == 1
    waiting.add(0, 1, 1, 50)
    assert waiting.next_due == 50
    waiting.release(50)
    released = waiting.pop_released()
    assert released is not None
    assert list(released) == [(0, 1, 1)]
    assert waiting.pop_released() is None
