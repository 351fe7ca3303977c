"""Client ids are only names: an ordered consumer gets its rows and locks back only with its session token (R28)."""

from __future__ import annotations

import pytest

from plait.broker.groups.group import proof_of
from plait.errors import GroupBusy, StaleSession
from plait.model.retry_policy import Retry
from tests.broker.ordered_node import GROUP, SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer

ALL = [(0, 1024, 1)]


def handling() -> tuple[Node, Owner]:
    """A consumer that holds a message and has lost its connection."""
    node = Node()
    make_subject(node)
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2")])
    owner = Owner(node, "worker")
    owner.lease(ALL)
    assert [row.body for row in owner.pull()] == [b"1", b"2"]
    node.membership.disconnected(owner.consumer, owner.consumer.session)
    return node, owner


@pytest.mark.parametrize("crash", [False, True])
def test_another_process_under_the_same_client_id_waits_for_the_end_of_the_lease(crash: bool):
    node, before = handling()
    node.later(3.0)
    if crash:
        node = before.node = node.killed()
    after = Owner(node, "worker")
    assert after.lease(ALL).owned == []
    assert after.pull() == []
    if crash:
        # Between the two definitions and the end of the lease.
        node = before.node = after.node = node.killed()
        after.attach()
        assert after.lease(ALL).owned == []
    node.clock.advance(node.broker.limits.lease_seconds - 3.1)
    assert after.lease(ALL).owned == []
    node.later(4.0)
    node.membership.lose_silent()
    node.turn()
    assert after.lease(ALL).owned == [(0, 1024, 1)]
    assert [row.body for row in after.pull()] == [b"1", b"2"]
    assert list(node.group(SUBJECT, GROUP).consumers) == ["worker"]
    assert list(node.killed().group(SUBJECT, GROUP).consumers) == ["worker"]


@pytest.mark.parametrize("crash", [False, True])
def test_the_same_process_continues_at_once_with_its_token(crash: bool):
    node, owner = handling()
    if crash:
        node = owner.node = node.killed()
    owner.attach()
    assert owner.lease().owned == [(0, 1024, 1)]
    assert owner.pull() == []
    assert owner.ack(*owner.rows)
    assert owner.group.floor == 2


def test_a_cleanly_stopped_process_is_not_waited_for():
    node, owner = handling()
    owner.attach()
    node.membership.detach(owner.consumer)
    after = Owner(node, "worker")
    assert after.lease(ALL).owned == [(0, 1024, 1)]


def test_an_expired_lease_is_not_waited_for():
    node, _ = handling()
    node.clock.advance(node.broker.leases.longest)
    after = Owner(node, "worker")
    assert after.lease(ALL).owned == [(0, 1024, 1)]
    assert [row.body for row in after.pull()] == [b"1", b"2"]


def test_the_earlier_process_gets_no_more_rows():
    node, before = handling()
    after = Owner(node, "worker")
    with pytest.raises(StaleSession):
        node.broker.leases.renew([(before.consumer.session, before.token)])
    with pytest.raises(GroupBusy, match="use a different client id in each process"):
        before.attach()
    node.broker.leases.renew([(after.consumer.session, after.token)])
    with pytest.raises(StaleSession):
        node.broker.leases.renew([(after.consumer.session, before.token)])


def test_a_restarted_process_may_use_another_retry_policy():
    node, _ = handling()
    after = Owner(node, "worker", retry=Retry(attempts=3))
    assert after.group.retry == Retry(attempts=3)


def test_only_a_proof_of_the_session_token_is_stored():
    _, owner = handling()
    owner.consumer.proof = proof_of(12345)
    assert owner.consumer.proved_by(12345)
    assert not owner.consumer.proved_by(12346)
    owner.consumer.proof = proof_of(0)
    assert not owner.consumer.proved_by(0)
