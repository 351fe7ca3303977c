"""Invalid requests of ordered members are refused and change nothing; an error in a group affects no other."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from plait.broker.partitions import sealing
from plait.errors import InvalidArgument, LimitExceeded
from plait.limits import NUMBER_MAX, NUMBER_STEP_MAX, ServerLimits
from plait.model.logical_partitions import NO_KEY_HASH
from plait.model.settings import SubjectSettings
from plait.storage.logs.action_events import Event, Held, Moved, Nacked, Parked
from tests.broker.ordered_node import GROUP, NEWEST, SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer
from tests.support.progress import within_cpu_seconds

ALL = [(0, 1024, 1)]
WANT = (0, 1024, 1, 0)
HOSTILE: list[Any] = [
    pytest.param([(0, 1024, 2**62 - 1, 0)], [], [], id="53: largest epoch"),
    pytest.param([(0, 1024, NUMBER_STEP_MAX + 1, 0)], [], [], id="epoch that no meta server assigned"),
    pytest.param([(0, 1024, 0, 0)], [], [], id="no epoch"),
    pytest.param([(0, 1025, 1, 0)], [], [], id="no such logical partition"),
    pytest.param([(0, 1024, 1, -1)], [], [], id="fence before the first row"),
    pytest.param([(0, 1024, 1, 2**63)], [], [], id="fence above the largest sequence"),
    pytest.param([WANT] * 1025, [], [], id="58: more runs than logical partitions"),
    pytest.param([WANT], [-1], [], id="54: parked key -1"),
    pytest.param([WANT], [2**64], [], id="parked key of 65 bits"),
    pytest.param([WANT], [], [-1], id="resumed key -1"),
    pytest.param([WANT], range(10_001), [], id="58: more parked keys than a group may have"),
    pytest.param([WANT], [], range(10_001), id="more resumed keys"),
]


def node_with(**settings: Any) -> Node:
    node = Node(**settings)
    make_subject(node)
    return node


@pytest.mark.parametrize(("wants", "parked", "resumed"), HOSTILE)
def test_an_invalid_lease_request_is_refused_and_changes_nothing(wants: Any, parked: Any, resumed: Any):
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("b", b"2")])
    owner, hostile = Owner(node, "c1"), Owner(node, "c2")
    owner.lease(ALL)
    with within_cpu_seconds(1), pytest.raises(InvalidArgument):
        node.broker.leases.ask(hostile.consumer, wants, list(parked), list(resumed), NEWEST)
    assert [row.body for row in owner.pull()] == [b"1", b"2"]
    assert owner.lease().owned == [(0, 1024, 1)]
    assert not owner.group.policy.parked()
    node = node.killed()
    assert node.group(SUBJECT, GROUP).locks.newest == 1


def test_parked_keys_over_the_limit_of_the_group_are_all_refused():
    node = node_with(limits=ServerLimits(held_keys=3))
    owner = Owner(node, "c1")
    for keys, fits in (([1, 2], True), ([1, 2, 3], True), ([3, 4], False)):
        if fits:
            node.broker.leases.ask(owner.consumer, [WANT], keys, [], NEWEST)
            continue
        with pytest.raises(LimitExceeded, match=r"4 failed or parked keys, above the limit of 3 \(limit `held_keys`\)"):
            node.broker.leases.ask(owner.consumer, [WANT], keys, [], NEWEST)
    assert len(owner.group.policy.parked()) == 3


def test_keys_of_unrequested_lps_and_rows_without_keys_are_not_parked():
    node = node_with()
    owner = Owner(node, "c1")
    node.broker.leases.ask(owner.consumer, [(0, 10, 1, 0), (11, 1024, 1, 0)], [5, 1034, int(NO_KEY_HASH)], [], NEWEST)
    assert [cursor.key for cursor in owner.group.policy.parked()] == [5]


@pytest.mark.parametrize("version", [2**64 - 1, NUMBER_MAX, NUMBER_STEP_MAX + 1, -1])
def test_a_route_that_no_meta_server_assigned_is_refused_and_a_valid_one_is_accepted(version: int):
    node = node_with()
    settings = SubjectSettings(order="strict")
    with pytest.raises(InvalidArgument, match=f"no meta server assigned route {version}"):
        sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 1024)], version, settings)
    with pytest.raises(InvalidArgument):
        sealing.open_lps(node.broker, "new", "new", [(0, 1024)], version, settings)
    with pytest.raises(InvalidArgument):
        sealing.seal(node.broker, SUBJECT, [(0, 1024)], version, lambda _: None)
    with pytest.raises(InvalidArgument):
        sealing.drop(node.broker, SUBJECT, SUBJECT, version)
    sealing.seal(node.broker, SUBJECT, [(0, 1024)], 2, lambda _: None)
    node.turn()
    assert node.killed().partition(SUBJECT).row.route == 2


def test_a_broker_accepts_numbers_that_its_meta_servers_assigned():
    node = node_with()
    node.broker.numbers.learn(2**40)
    owner = Owner(node, "c1")
    assert owner.lease([(0, 1024, 2**40 + 5)]).owned == [(0, 1024, 2**40 + 5)]
    # After a restart the epoch of the lock shows which numbers were assigned.
    node = owner.node = node.killed()
    owner.attach()
    assert owner.lease([(0, 1024, 2**40 + 6)]).owned == [(0, 1024, 2**40 + 6)]


def test_an_error_while_new_rows_are_offered_affects_only_its_group(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    node = node_with()
    owner = Owner(node, "c1")
    owner.lease(ALL)
    broken = node.pull(owner.consumer, wait=10)
    other = node.pull(node.attach(SUBJECT, "shared"), wait=10)

    def defect(*_: Any) -> None:
        raise OverflowError("Python int too large to convert to C long")

    monkeypatch.setattr(owner.group, "serve", defect)
    with caplog.at_level(logging.CRITICAL):
        sent = keyed(node, Producer(5), [("a", b"1")])
    assert sent.acknowledged
    assert broken.answers == [None]
    assert other.bodies == [b"1"]


@pytest.mark.parametrize(
    ("event", "applies"),
    [
        (Moved(1, 2**63, 2**63 + 1, to=-5), True),
        (Held(1, 2**63, to=2**63 + 1, key_hash=2**64 - 5), False),
        (Nacked(1, False, 1, 2**63, 2**63 + 1, due=-5), True),
        (Parked(1, 2**63, 2**63 + 1), True),
    ],
)
def test_an_event_that_cannot_be_applied_is_reported_and_prevents_no_start(event: Event, applies: bool, caplog: Any):
    node = node_with()
    keyed(node, Producer(5), [("a", b"1")])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    group = owner.group
    node.broker.turn.event(group, event)
    node.turn()
    with caplog.at_level(logging.CRITICAL):
        node = owner.node = node.killed()
    owner.attach()
    owner.lease()
    assert [row.body for row in owner.pull()] == [b"1"]
    if not applies:
        [damage] = node.report.damages
        assert (damage.log, damage.kind) == ("action", "damaged")
        assert "cannot be applied" in damage.reason
