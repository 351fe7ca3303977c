"""Paused groups at one broker: nothing is delivered, and everything else continues."""

from __future__ import annotations

import pytest

from plait.errors import LimitExceeded
from plait.limits import PAUSED_GROUPS_MAX
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings, with_pause
from tests.broker.ordered_node import GROUP, SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

RETRY = Retry(steps=(2.0,), jitter=0)


def pause(node: Node, group: str = "g", subject: str = "orders", *, paused: bool = True) -> None:
    settings = node.partition(subject).row.settings
    changed = with_pause(settings, group, node.clock.now() if paused else 0)
    node.broker.catalog.update_subject(subject, changed)
    node.turn()


def test_a_paused_group_delivers_nothing_and_takes_acks_and_retries():
    node = Node()
    consumer, other = node.attach("orders", "g", retry=RETRY), node.attach("orders", "other")
    node.send("orders", *[b"%d" % number for number in range(6)])
    assert node.pull(consumer, 4).bodies == [b"0", b"1", b"2", b"3"]
    since = node.clock.now()
    pause(node)
    assert node.pull(consumer).ranges == []
    assert node.ack(consumer, (0, 2))
    node.nack(consumer, (2, 3))
    node.later(10.0)
    node.contact(consumer)
    assert node.pull(consumer).ranges == []
    assert node.pull(other).bodies == [b"%d" % number for number in range(6)]
    # A second pause changes nothing.
    pause(node)
    assert node.group("orders", "g").paused == since
    pause(node, paused=False)
    assert node.pull(consumer).bodies == [b"2", b"4", b"5"]


def test_a_pause_answers_suspended_pulls_and_a_resume_serves_them():
    node = Node()
    consumer = node.attach("orders", "g")
    waiting = node.pull(consumer, wait=30)
    pause(node)
    assert (waiting.answered, waiting.bodies) == (True, [])
    waiting = node.pull(consumer, wait=30)
    node.send("orders", b"new")
    assert not waiting.answered
    pause(node, paused=False)
    assert waiting.bodies == [b"new"]


@pytest.mark.parametrize("end", ["killed", "restart", "power_lost"])
def test_a_pause_outlasts_a_restart(end: str):
    node = Node(flush="sync")
    node.send("orders", b"a")
    node.membership.detach(node.attach("orders", "g"))
    pause(node)
    node.checkpoint()
    for _ in range(2):
        node = getattr(node, end)()
        assert node.pull(node.attach("orders", "g")).ranges == []
    pause(node, paused=False)
    node = getattr(node, end)()
    assert node.pull(node.attach("orders", "g")).bodies == [b"a"]


def test_a_group_that_begins_in_a_partition_whose_settings_pause_it_is_paused():
    node = Node()
    node.broker.create_subject("orders", SubjectSettings(paused={"g": 5}))
    node.send("orders", b"a")
    assert node.pull(node.attach("orders", "g")).ranges == []
    assert node.pull(node.attach("orders", "h")).bodies == [b"a"]


def test_a_paused_broadcast_group_is_not_forgotten():
    node = Node()
    names = [consumer.group.name for consumer in (node.attach("orders", None, "a"), node.attach("orders", None, "b"))]
    for consumer in [node.group("orders", name).consumers[client] for name, client in zip(names, "ab", strict=True)]:
        node.membership.detach(consumer)
    pause(node, names[0])
    node.clock.advance(3 * 86_400.0)
    list(node.membership.forget_idle_steps())
    assert list(node.partition("orders").groups) == names[:1]


def test_locks_move_while_an_ordered_group_is_paused():
    node, producer = Node(), Producer(5)
    make_subject(node)
    first = Owner(node, "c1")
    first.lease([(0, 1024, 1)])
    keyed(node, producer, [("a", b"a0"), ("a", b"a1"), ("b", b"b0")])
    first.pull(1)
    pause(node, GROUP, SUBJECT)
    keyed(node, producer, [("a", b"a2")])
    second = Owner(node, "c2")
    second.lease([(0, 1024, 2)])
    first.lease([])
    for row in list(first.rows):
        assert first.ack(row)
    first.lease([])
    second.lease()
    assert sum(second.group.locks.owner == second.consumer.id) == 1024
    assert second.pull() == []
    pause(node, GROUP, SUBJECT, paused=False)
    assert [row.body for row in second.pull_all()][-1] == b"a2"


def test_the_number_of_paused_groups_is_limited():
    settings = SubjectSettings(paused={f"g{number}": 1 for number in range(PAUSED_GROUPS_MAX)})
    assert with_pause(settings, "g5", 9) == settings
    with pytest.raises(LimitExceeded, match="1000 groups of the subject are paused"):
        with_pause(settings, "more", 9)
    assert len(with_pause(settings, "g5", 0).paused) == PAUSED_GROUPS_MAX - 1
