"""Rewinds of groups at one broker: what comes again, what stays, what is skipped, and what a preview says."""

from __future__ import annotations

import pytest

from plait.errors import GroupBusy
from plait.model.retry_policy import Retry
from tests.broker.ordered_node import GROUP, SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

RETRY = Retry(steps=(60.0,), jitter=0, attempts=2)


def consumed() -> Node:
    """Ten messages, one each second: 0 and 1 are acked, 2 failed, 3 is dead, 4 and 5 are held, 6 and 7 are acked."""
    node = Node()
    for number in range(10):
        node.send("orders", b"%d" % number)
        node.clock.advance(1)
    consumer = node.attach("orders", "g", retry=RETRY)
    node.pull(consumer, 8)
    node.ack(consumer, (0, 2), (6, 8))
    node.nack(consumer, (2, 3), delay=600.0)
    node.nack(consumer, (3, 4), reject=True)
    node.membership.disconnected(consumer, consumer.session)
    return node


def all_bodies(node: Node) -> list[bytes]:
    """Handle all messages."""
    consumer = node.attach("orders", "g", "other", retry=RETRY)
    found: list[bytes] = []
    while (pulled := node.pull(consumer, 100)).ranges:
        found += pulled.bodies
        node.ack(consumer, *((row.sequence, row.sequence + 1, row.epoch) for row in pulled.rows))
    node.membership.detach(consumer)
    node.turn()
    return found


@pytest.mark.parametrize("end", ["turn", "killed", "restart", "checkpoint"])
def test_a_rewind_brings_everything_again_and_forgets_nothing_that_is_not_handled(end: str):
    node = consumed()
    found = node.membership.rewind("orders", "g", ["sequence", 5])
    assert (found.before, found.position, found.again, found.handled) == (8, 5, 3, 2)
    assert (found.open, found.skipped, found.held, found.waiting) == (2, 0, 2, 1)
    assert (found.dead_again, found.dead_left) == (0, 1)
    node.turn()
    if end == "checkpoint":
        node.checkpoint()
        end = "killed"
    node = node if end == "turn" else getattr(node, end)()
    # 4 was held below the position; 2 waits for its retry.
    assert all_bodies(node) == [b"4", b"5", b"6", b"7", b"8", b"9"]
    node.later(700.0)
    assert all_bodies(node) == [b"2"]


def test_a_rewind_that_skips_delivers_nothing_before_its_position():
    node = consumed()
    found = node.membership.rewind("orders", "g", ["sequence", 7], skipping=True)
    assert (found.again, found.handled, found.open, found.skipped, found.dead_left) == (1, 1, 0, 3, 1)
    node.turn()
    node = node.killed()
    assert all_bodies(node) == [b"7", b"8", b"9"]
    assert node.group("orders", "g").failures.dead.count == 1


def test_a_dead_letter_from_the_position_on_is_a_message_again():
    node = consumed()
    found = node.membership.rewind("orders", "g", "earliest")
    assert (found.again, found.handled, found.dead_again, found.dead_left) == (8, 4, 1, 0)
    node.turn()
    for again in (node, node.killed()):
        assert again.group("orders", "g").failures.dead.count == 0
        assert all_bodies(again) == [b"%d" % number for number in range(10)]


def test_a_preview_says_from_when_to_when_and_changes_nothing():
    node = consumed()
    time = node.clock.now()
    found = node.membership.rewind("orders", "g", ["time", time - 5_000_000], preview=True)
    assert (found.position, found.again, found.first, found.last) == (5, 3, time - 5_000_000, time - 3_000_000)
    assert node.group("orders", "g").cursor.next == 8
    later = node.membership.rewind("orders", "g", "latest", preview=True)
    assert (later.again, later.open, later.first, later.last) == (0, 5, None, None)


@pytest.mark.parametrize(
    ("start", "gone", "at_most"),
    [(["sequence", 3], -3, False), ("earliest", 0, False), (["time", 0], 0, True), ("latest", None, False)],
)
def test_messages_that_retention_removed_are_counted(start: object, gone: int | None, at_most: bool):
    node = Node(retention_seconds=10.0)
    consumer = node.attach("orders", "g")
    for _ in range(40):
        node.send("orders", b"x" * 1000)
        node.clock.advance(1)
    node.pull(consumer, 100)
    node.ack(consumer, (0, 40))
    node.membership.detach(consumer)
    node.retention.run()
    node.turn()
    first = node.partition("orders").start
    assert first > 20
    found = node.membership.rewind("orders", "g", start)
    assert found.gone == (0 if gone is None else first + gone)
    assert found.gone_at_most == at_most
    assert found.position == (40 if start == "latest" else first)


# --- ordered groups -------------------------------------------------------------------------------


def stopped(node: Node, *owners: Owner) -> None:
    for owner in owners:
        node.membership.detach(owner.consumer)
    node.turn()


def test_a_key_that_an_earlier_message_parks_stays_parked_and_a_later_one_is_resumed():
    node, producer = Node(), Producer(5)
    make_subject(node)
    owner = Owner(node, "c1", retry=Retry(attempts=1))
    owner.lease([(0, 1024, 1)])
    keyed(node, producer, [("a", b"a0"), ("b", b"b1"), ("a", b"a2"), ("b", b"b3"), ("c", b"c4")])
    owner.pull()
    for key in ("a", "c"):
        owner.nack(owner.first_of(key))
    assert owner.ack(owner.first_of("b"))
    owner.nack(owner.first_of("b"))
    stopped(node, owner)
    found = node.membership.rewind(SUBJECT, GROUP, ["sequence", 1])
    # The letters b3 and c4 are messages again; a0 stays a letter and holds back a2.
    assert (found.resumed, found.dead_again, found.dead_left) == (2, 2, 1)
    assert (found.again, found.handled) == (4, 1)
    node.turn()
    for again in (node, node.killed()):
        again.later(20)
        after = Owner(again, "c2", retry=Retry(attempts=1))
        after.lease([(0, 1024, 2)])
        assert [row.body for row in after.pull_all()] == [b"b1", b"b3", b"c4"]
        assert len(after.group.policy.parked()) == 1
        stopped(again, after)


def test_locks_whose_lease_runs_prevent_a_rewind():
    node = Node()
    make_subject(node)
    owner = Owner(node, "c1")
    owner.lease([(0, 1024, 1)])
    keyed(node, Producer(5), [("a", b"a0"), ("a", b"a1")])
    owner.pull()
    node.membership.disconnected(owner.consumer, owner.consumer.session)
    with pytest.raises(GroupBusy, match=r"'c1' .* may handle messages until its lease ends in 10.5 s; try again then"):
        node.membership.rewind(SUBJECT, GROUP, "earliest", preview=True)
    node.later(11.0)
    node.membership.lose_silent()
    assert node.membership.rewind(SUBJECT, GROUP, "earliest").again == 2
