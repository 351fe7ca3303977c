"""Lag and ``lost`` of ordered groups: exact where possible, otherwise marked as estimates (R21)."""

from __future__ import annotations

import pytest

from plait.broker.groups.ordered import row_reader
from plait.broker.partitions import sealing
from plait.broker.views import group_view
from plait.model.logical_partitions import lp_of_key
from plait.model.settings import SubjectSettings
from plait.wire.admin.subjects import GroupInfo
from tests.broker.ordered_node import GROUP, SUBJECT, Owner, keyed
from tests.support.broker_node import Node, Producer

#: Keys of the lower and of the upper half of the logical partitions.
KEYS = [f"k{n}" for n in range(40)]
LOWER = [key for key in KEYS if lp_of_key(key) < 512]
UPPER = [key for key in KEYS if lp_of_key(key) >= 512]


def half(node: Node) -> None:
    """A partition that takes the lower half of the logical partitions."""
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 512)], 1, SubjectSettings(order="strict"))
    node.turn()


def send(node: Node, producer: Producer, keys: list[str]) -> None:
    for key in keys:
        keyed(node, producer, [(key, key.encode())])


def view(node: Node, *, counted: bool = True) -> GroupInfo:
    return group_view(node.group(SUBJECT, GROUP), counted=counted)


def test_a_partition_whose_own_rows_are_all_acked_has_no_lag() -> None:
    node, producer = Node(), Producer(1)
    half(node)
    owner = Owner(node, "a")
    send(node, producer, LOWER)
    # It asks for the LPs that the route leads to this partition.
    owner.lease([(0, 512, 1)])
    for counted in (True, False):
        assert (view(node, counted=counted).lag, view(node, counted=counted).estimated) == (len(LOWER), False)
    owner.pull_all()
    owner.ack(*owner.rows)
    for counted in (True, False):
        assert (view(node, counted=counted).lag, view(node, counted=counted).estimated) == (0, False)


def test_rows_of_moved_lps_are_no_lag_once_they_are_done() -> None:
    node, producer = Node(), Producer(1)
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 1024)], 1, SubjectSettings(order="strict"))
    owner = Owner(node, "a")
    send(node, producer, KEYS)
    owner.lease([(0, 1024, 1)])
    owner.pull_all()
    owner.ack(*owner.rows)
    sealing.seal(node.broker, SUBJECT, [(512, 1024)], 2, lambda _: None)
    node.turn()
    # The other LPs stay in this partition, and no consumer asks for the moved ones.
    owner.lease([(0, 512, 1)])
    send(node, producer, LOWER)
    assert (view(node).lag, view(node).estimated) == (len(LOWER), False)
    owner.pull_all()
    owner.ack(*owner.rows)
    assert (view(node).lag, view(node).estimated) == (0, False)


def test_the_lag_of_two_owners_is_counted_by_keys_or_marked_as_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    node, producer = Node(), Producer(1)
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 1024)], 1, SubjectSettings(order="strict"))
    lower, upper = Owner(node, "a"), Owner(node, "b")
    lower.lease([(0, 512, 1)])
    upper.lease([(512, 1024, 2)])
    send(node, producer, KEYS)
    lower.pull_all()
    lower.ack(*lower.rows)
    assert (view(node).lag, view(node).estimated) == (len(UPPER), False)
    upper.pull_all()
    found = view(node)
    assert (found.lag, found.unacked, found.estimated) == (len(UPPER), len(UPPER), False)
    assert {each.client: each.held for each in found.consumers} == {"a": 0, "b": len(UPPER)}
    # A listing of all groups reads no rows; nor does a description if there are too many.
    assert view(node, counted=False).estimated
    monkeypatch.setattr("plait.broker.views.LAG_COUNTED_MAX", 3)
    assert view(node).estimated
    assert abs(view(node).lag - len(UPPER)) < len(KEYS)


@pytest.mark.parametrize("counted", [True, False])
def test_lost_counts_only_rows_that_the_group_had_not_done(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted:
        monkeypatch.setattr("plait.broker.groups.ordered.ordered_group.LOST_COUNTED_MAX", 0)
    node, producer = Node(retention_seconds=10.0), Producer(1)
    half(node)
    owner = Owner(node, "a")
    send(node, producer, LOWER)
    owner.lease([(0, 512, 1)])
    owner.pull_all()
    owner.ack(*owner.rows)
    node.clock.advance(60)
    send(node, producer, LOWER[:1])
    node.retention.run()
    node.turn()
    assert (view(node).lost, view(node).lost_estimated) == (0, False)
    assert (node.killed().group(SUBJECT, GROUP).lost_count, node.partition(SUBJECT).start) == (0, len(LOWER))
    # The LPs from 256 on have no owner.
    owner.lease([(0, 256, 2)])
    missed = [key for key in LOWER if lp_of_key(key) >= 256]
    send(node, producer, LOWER)
    owner.pull_all()
    owner.ack(*owner.rows)
    node.clock.advance(60)
    send(node, producer, LOWER[:1])
    node.retention.run()
    node.turn()
    # The row that was sent before retention ran.
    first = LOWER[0] in missed
    found = view(node)
    if counted:
        assert (found.lost, found.lost_estimated) == (len(missed) + first, False)
    else:
        assert found.lost > 0
        assert found.lost_estimated
    for again in (node.killed(), node.restart()):
        group = again.group(SUBJECT, GROUP)
        assert (group.lost_count, group.lost_estimated) == (found.lost, found.lost_estimated)


def test_the_limits_fit_in_a_turn() -> None:
    assert row_reader.LAG_COUNTED_MAX <= row_reader.LOST_COUNTED_MAX <= 1_000_000
