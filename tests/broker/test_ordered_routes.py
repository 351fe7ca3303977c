"""Ordered consumers with an older route than the partition knows (R4)."""

from __future__ import annotations

import pytest

from plait.broker.groups.dead_letters import Choice
from plait.broker.partitions import sealing
from plait.broker.partitions.partition import Partition
from plait.broker.partitions.sealing import gone_below
from plait.model.logical_partitions import lp_of_key, lp_set
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from tests.broker.ordered_node import SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024, 1)]
LP = lp_of_key("a")


class Moving:
    """A partition that the LP of a key leaves and returns to."""

    def __init__(self, **settings: object) -> None:
        self.node = Node(**settings)
        make_subject(self.node)
        self.producer = Producer(5)
        self.version = 1
        self.send(b"0")

    def send(self, body: bytes) -> None:
        assert keyed(self.node, self.producer, [("a", body)]).acknowledged

    def seal_lp(self, lp: int = LP) -> None:
        self.version += 1
        sealing.seal(self.node.broker, SUBJECT, [(lp, lp + 1)], self.version, lambda _: None)
        self.node.turn()

    def return_lp(self, lp: int = LP) -> None:
        self.version += 1
        settings = SubjectSettings(order="strict")
        sealing.open_lps(self.node.broker, SUBJECT, SUBJECT, [(lp, lp + 1)], self.version, settings)
        self.node.turn()

    def delivered(self, *routes: int, **settings: object) -> list[bytes]:
        """The bodies that a consumer gets under the last of these routes, after it pulled under the others."""
        owner = Owner(self.node, "c1", **settings)
        rows = []
        for route in routes:
            owner.lease(ALL, route=route)
            rows = owner.pull_all()
        return [row.body for row in rows]


@pytest.mark.parametrize(("route", "expected"), [(1, [b"0"]), (3, [b"0", b"1"]), (5, [b"0", b"1", b"2"])])
@pytest.mark.parametrize("crash", [False, True])
def test_a_consumer_gets_rows_up_to_the_first_return_of_the_lp_that_its_route_does_not_include(
    route: int, expected: list, crash: bool
):
    moving = Moving()
    for body in (b"1", b"2"):
        moving.seal_lp()
        moving.return_lp()
        moving.send(body)
    if crash:
        moving.node = moving.node.killed()
    assert moving.delivered(route) == expected


def test_a_move_of_other_lps_withholds_no_rows():
    moving = Moving()
    moving.seal_lp()
    moving.return_lp()
    moving.send(b"1")
    other = (LP + 1) % 1024
    moving.seal_lp(other)
    moving.return_lp(other)
    assert moving.delivered(3) == [b"0", b"1"]


def test_an_affinity_group_gets_all_rows_with_an_older_route():
    moving = Moving()
    moving.seal_lp()
    moving.return_lp()
    moving.send(b"1")
    assert moving.delivered(1, affinity=True) == [b"0", b"1"]


def test_a_partition_remembers_few_returns_of_an_lp_and_an_old_route_gets_no_extra_rows():
    moving = Moving()
    for number in range(3 * sealing.REOPENED_MAX):
        moving.seal_lp()
        moving.return_lp()
        moving.send(b"%d" % (number + 1))
        # No rows are stored between these two returns.
        moving.seal_lp()
        moving.return_lp()
        moving.seal_lp()
        moving.return_lp()
    assert len(moving.node.partition(SUBJECT).row.reopened) <= sealing.REOPENED_MAX + 1
    assert len(moving.delivered(1, moving.version)) == 3 * sealing.REOPENED_MAX


def test_a_consumer_that_leased_before_the_lp_returned_gets_no_later_rows_until_it_asks_again():
    moving = Moving()
    owner = Owner(moving.node, "c1")
    owner.lease(ALL, route=1)
    moving.seal_lp()
    moving.return_lp()
    moving.send(b"1")
    assert [row.body for row in owner.pull_all()] == [b"0"]
    owner.lease(ALL, route=moving.version)
    assert [row.body for row in owner.pull_all()] == [b"1"]


def test_a_lock_granted_later_has_the_limit_of_its_request():
    moving = Moving()
    first, second = Owner(moving.node, "c1"), Owner(moving.node, "c2")
    first.lease([(0, 1024, 1)], route=1)
    second.lease([(0, 1024, 2)], route=1)
    moving.seal_lp()
    moving.return_lp()
    moving.send(b"1")
    # It holds no rows, so a lock that it no longer wants is granted to the other at once.
    first.lease([], route=1)
    assert [row.body for row in second.pull_all()] == [b"0"]
    second.lease([(0, 1024, 2)], route=moving.version)
    assert [row.body for row in second.pull_all()] == [b"1"]


@pytest.mark.parametrize("crash", [False, True])
def test_a_consumer_that_has_moved_on_is_notified_of_a_letter_resent_in_a_drained_partition(crash: bool):
    """After a crash, the partition has lost the progress of LPs without rows."""
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
        # Wait until the leases from before the crash have ended.
        node.later(30)
    owner.group.revived(0, 1)
    node.turn()
    assert lp_set(owner.lease([]).again)[LP]
    owner.lease([(LP, LP + 1, 1, 3)])
    assert [row.body for row in owner.pull_all()] == [b"1"]
    owner.ack(*owner.rows)
    assert owner.lease().drained == [(LP, LP + 1)]
    assert not lp_set(owner.lease([]).again)[LP]


def test_a_consumer_that_has_moved_on_is_notified_of_acks_lost_in_a_power_failure():
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
    """The partition after retention has deleted all of its rows."""
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
def test_a_partition_stays_in_the_route_while_a_failed_message_of_its_key_is_retained(attempts: int | None):
    """R21: rows of the key in other partitions wait for it, also after retention deleted the rows around it."""
    moving = Moving(retention_seconds=20.0)
    node = moving.node
    owner = Owner(node, "c1", retry=Retry(first=500.0, factor=1.0, jitter=0.0, attempts=attempts))
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    moving.seal_lp()
    moving.return_lp()
    moving.seal_lp(lp_of_key("b"))
    partition = expired(node)
    assert gone_below(node.broker, partition) == -1
    if attempts:
        [cursor] = owner.group.policy.parked()
        assert owner.group.policy.resume(cursor.key, skip=True)
        node.turn()
        assert gone_below(node.broker, partition) == -1, "the letter can be resent"
        purge(node, owner)
    else:
        node.later(500.0)
        owner.lease(ALL)
        owner.ack(*owner.pull_all())
    node.turn()
    assert gone_below(node.broker, partition) == partition.next


def test_a_partition_stays_in_the_route_while_its_dead_letter_can_be_resent():
    """The key has moved to another partition; this one takes other keys and would stay in any case."""
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
