"""Ordered consumers that go by an older route than a partition has heard of (R4)."""

from __future__ import annotations

import pytest

from plait.broker.groups.dead_letters import Choice
from plait.broker.partitions import sealing
from plait.broker.partitions.finished import gone_below
from plait.broker.partitions.partition import Partition
from plait.model.logical_partitions import lp_of_key, lp_set
from plait.model.retry_policy import Retry
from plait.storage.catalog import SubjectSettings
from tests.broker.ordered_node import SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024, 1)]
LP = lp_of_key("a")


class Moving:
    """A partition that the key's logical partition leaves and comes back to."""

    def __init__(self, **settings: object) -> None:
        self.node = Node(**settings)
        make_subject(self.node)
        self.producer = Producer(5)
        self.version = 1
        self.send(b"0")

    def send(self, body: bytes) -> None:
        assert keyed(self.node, self.producer, [("a", body)]).acknowledged

    def leave(self, lp: int = LP) -> None:
        self.version += 1
        sealing.seal(self.node.broker, SUBJECT, [(lp, lp + 1)], self.version, lambda _: None)
        self.node.turn()

    def come_back(self, lp: int = LP) -> None:
        self.version += 1
        settings = SubjectSettings(order="strict")
        sealing.open_lps(self.node.broker, SUBJECT, SUBJECT, [(lp, lp + 1)], self.version, settings)
        self.node.turn()

    def handed(self, *routes: int, **settings: object) -> list[bytes]:
        """What somebody gets who goes by a route, and then by the next."""
        owner = Owner(self.node, "c1", **settings)
        rows = []
        for route in routes:
            owner.lease(ALL, route=route)
            rows = owner.pull_all()
        return [row.body for row in rows]


@pytest.mark.parametrize(("route", "handed"), [(1, [b"0"]), (3, [b"0", b"1"]), (5, [b"0", b"1", b"2"])])
@pytest.mark.parametrize("crash", [False, True])
def test_of_several_ways_back_the_first_that_a_route_does_not_know_counts(route: int, handed: list, crash: bool):
    moving = Moving()
    for body in (b"1", b"2"):
        moving.leave()
        moving.come_back()
        moving.send(body)
    if crash:
        moving.node = moving.node.killed()
    assert moving.handed(route) == handed


def test_a_move_of_others_withholds_nothing():
    moving = Moving()
    moving.leave()
    moving.come_back()
    moving.send(b"1")
    other = (LP + 1) % 1024
    moving.leave(other)
    moving.come_back(other)
    assert moving.handed(3) == [b"0", b"1"]


def test_affinity_is_handed_all_there_is():
    moving = Moving()
    moving.leave()
    moving.come_back()
    moving.send(b"1")
    assert moving.handed(1, affinity=True) == [b"0", b"1"]


def test_of_many_ways_back_few_are_told_apart_and_an_old_route_gets_no_more_for_it():
    moving = Moving()
    for number in range(3 * sealing.REOPENED_MAX):
        moving.leave()
        moving.come_back()
        moving.send(b"%d" % (number + 1))
        # Nothing lies between these two.
        moving.leave()
        moving.come_back()
        moving.leave()
        moving.come_back()
    assert len(moving.node.partition(SUBJECT).row.reopened) <= sealing.REOPENED_MAX + 1
    assert len(moving.handed(1, moving.version)) == 3 * sealing.REOPENED_MAX


def test_who_asked_before_the_way_back_gets_nothing_behind_it_until_it_asks_again():
    moving = Moving()
    owner = Owner(moving.node, "c1")
    owner.lease(ALL, route=1)
    moving.leave()
    moving.come_back()
    moving.send(b"1")
    assert [row.body for row in owner.pull_all()] == [b"0"]
    owner.lease(ALL, route=moving.version)
    assert [row.body for row in owner.pull_all()] == [b"1"]


def test_a_lock_that_comes_later_goes_as_far_as_it_was_asked_for_before():
    moving = Moving()
    first, second = Owner(moving.node, "c1"), Owner(moving.node, "c2")
    first.lease([(0, 1024, 1)], route=1)
    second.lease([(0, 1024, 2)], route=1)
    moving.leave()
    moving.come_back()
    moving.send(b"1")
    # It has nothing in hands: what it wants no more is the other's at once.
    first.lease([], route=1)
    assert [row.body for row in second.pull_all()] == [b"0"]
    second.lease([(0, 1024, 2)], route=moving.version)
    assert [row.body for row in second.pull_all()] == [b"1"]


@pytest.mark.parametrize("crash", [False, True])
def test_a_letter_that_is_sent_again_where_everything_was_done_is_told_to_who_has_moved_on(crash: bool):
    """After a crash the partition does not know any more how far it had come where there were no rows of the key."""
    node = Node()
    make_subject(node, order="best_tried")
    keyed(node, Producer(5), [("a", b"1"), ("b", b"2"), ("b", b"3")])
    sealing.seal(node.broker, SUBJECT, [(0, 1024)], 2, lambda _: None)
    node.turn()
    owner, other = Owner(node, "c1", retry=Retry(attempts=1)), Owner(node, "c2")
    owner.lease([(LP, LP + 1, 1, 3)])
    other.lease([(0, LP, 1, 3), (LP + 1, 1024, 1, 3)])
    owner.pull_all()
    other.pull_all()
    owner.nack(owner.first_of("a"), None)
    other.ack(*other.rows)
    leased = owner.lease()
    assert (leased.drained, leased.again) == ([(LP, LP + 1)], [])
    owner.lease([])
    if crash:
        node = owner.node = node.killed()
        owner.attach()
        # Until others that had locks must have been heard of.
        node.later(30)
    assert owner.group.revived(0, 1, node.broker) == 1
    node.turn()
    assert lp_set(owner.lease([]).again)[LP]
    owner.lease([(LP, LP + 1, 1, 3)])
    assert [row.body for row in owner.pull_all()] == [b"1"]
    owner.ack(*owner.rows)
    assert owner.lease().drained == [(LP, LP + 1)]
    assert not lp_set(owner.lease([]).again)[LP]


def test_what_a_loss_of_power_took_back_is_told_to_who_has_moved_on():
    node = Node()
    make_subject(node)
    keyed(node, Producer(5), [("a", b"1")])
    sealing.seal(node.broker, SUBJECT, [(0, 1024)], 2, lambda _: None)
    node.turn()
    node.sync()
    owner = Owner(node, "c1")
    owner.lease([(0, 1024, 1, 1)])
    owner.pull_all()
    owner.ack(*owner.rows)
    assert owner.lease().drained == [(0, 1024)]
    owner.lease([])
    node = owner.node = node.power_lost()
    owner.attach()
    assert owner.lease([]).again == [(0, 1024)]


def expired(node: Node) -> Partition:
    """The partition once retention has taken all its rows."""
    node.clock.advance(60.0)
    for _ in range(2):
        node.retention.run()
        node.turn()
        node.sync()
    partition = node.partition(SUBJECT)
    assert partition.start == partition.next
    return partition


def purge(node: Node, owner: Owner) -> None:
    letters = node.broker.dead_letters
    found, _ = letters.page(owner.group, Choice(), -1, 10)
    assert letters.purge(owner.group, found) == 1
    node.turn()


@pytest.mark.parametrize("attempts", [1, None], ids=["parked", "waiting"])
def test_a_route_keeps_where_a_key_was_while_its_failed_message_is_kept_beyond_retention(attempts: int | None):
    """R21: its rows in other partitions wait for that message, also when retention took the rows around it."""
    moving = Moving(retention_seconds=20.0)
    node = moving.node
    owner = Owner(node, "c1", retry=Retry(first=500.0, factor=1.0, jitter=0.0, attempts=attempts))
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    moving.leave()
    moving.come_back()
    moving.leave(lp_of_key("b"))
    partition = expired(node)
    assert gone_below(node.broker, partition) == -1
    if attempts:
        [strand] = owner.group.parked()
        assert owner.group.resume(strand.key, node.broker, skip=True)
        node.turn()
        assert gone_below(node.broker, partition) == -1, "the letter can be sent again"
        purge(node, owner)
    else:
        node.later(500.0)
        owner.lease(ALL)
        owner.ack(*owner.pull_all())
    node.turn()
    assert gone_below(node.broker, partition) == partition.next


def test_a_route_keeps_where_a_dead_letter_was_while_it_can_be_sent_again():
    """Its key went on elsewhere; the partition takes other keys, so it stays without that as well."""
    node = Node(retention_seconds=20.0)
    make_subject(node, order="best_tried")
    keyed(node, Producer(5), [("a", b"1"), ("b", b"2")])
    owner = Owner(node, "c1", retry=Retry(attempts=1))
    owner.lease(ALL)
    owner.pull_all()
    owner.nack(owner.first_of("a"), None)
    owner.ack(*(row for row in owner.rows if row.body == b"2"))
    sealing.seal(node.broker, SUBJECT, [(LP, LP + 1)], 2, lambda _: None)
    node.turn()
    partition = expired(node)
    assert gone_below(node.broker, partition) == -1
    purge(node, owner)
    assert gone_below(node.broker, partition) == partition.next
