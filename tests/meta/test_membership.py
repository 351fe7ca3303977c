"""Members of groups: the share that each receives, and the loss of silent members."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.clock import ManualClock
from plait.errors import GroupMismatch, GroupNotFound, InvalidName, LimitExceeded, SubjectNotFound
from plait.limits import LOGICAL_PARTITIONS, MetaLimits
from plait.meta.members.joining import Joining
from plait.meta.service import MetaService
from tests.meta.support import Stores, join, lps, pass_time, register, settle, share


def test_the_only_member_gets_every_lp(subject: MetaService):
    first = join(subject, "c1")
    assert (share(first).strategy, share(first).lps) == ("exclusive", [])
    assert subject.step().clients == {"c1"}
    settle(subject)
    reply = join(subject, "c1")
    assert reply.seen > first.seen
    ((first_lp, end, _),) = share(reply).lps
    assert (first_lp, end) == (0, LOGICAL_PARTITIONS)
    assert reply.routes == {"s": subject.routing.view("s").route.version}
    assert reply.refused == {}


def test_an_unordered_group_is_shared(subject: MetaService):
    reply = join(subject, "c1", ordered=False)
    assert share(reply) == ("s", "g", "shared", [])
    assert not subject.step().more
    view = subject.allocator.view("s", "g")
    assert (view.strategy, view.epoch, view.members) == ("shared", 0, {"c1": []})


def test_a_heartbeat_names_all_groups_of_a_client(subject: MetaService):
    both = subject.members.heartbeat("c1", [("s", "g", True), ("s", "h", True)])
    assert [each.group for each in both.shares] == ["g", "h"]
    one = subject.members.heartbeat("c1", [("s", "h", True)])
    assert [each.group for each in one.shares] == ["h"]
    settle(subject)
    assert subject.allocator.view("s", "g").members == {}


def test_a_member_with_another_mode_is_refused_with_both_values(subject: MetaService):
    join(subject, "c1", ordered=True)
    reply = subject.members.heartbeat("c2", [("s", "g", False), ("s", "h", False)])
    error = reply.refused["s", "g"]
    assert isinstance(error, GroupMismatch)
    assert "ordered=True" in error.message
    assert "ordered=False" in error.message
    assert [each.group for each in reply.shares] == ["h"]


def test_affinity_is_a_mode_of_its_own_and_has_shares(subject: MetaService):
    member, place = [("s", "g", True)], [("s", "g")]
    assert subject.members.heartbeat("c1", member, affinity=place).refused == {}
    settle(subject)
    assert lps(share(subject.members.heartbeat("c1", member, affinity=place)).lps) == LOGICAL_PARTITIONS
    error = subject.members.heartbeat("c2", member).refused["s", "g"]
    assert isinstance(error, GroupMismatch)
    assert "affinity='key'" in error.message
    assert "ordered=True" in error.message
    assert ("s", "g") in subject.members.heartbeat("c1", member).refused
    settle(subject)
    assert subject.allocator.view("s", "g").members == {}


def test_each_invalid_membership_is_refused_by_itself(subject: MetaService):
    reply = subject.members.heartbeat("c1", [("nowhere", "g", True), ("s", "bad name", True), ("s", "g", True)])
    assert isinstance(reply.refused["nowhere", "g"], SubjectNotFound)
    assert isinstance(reply.refused["s", "bad name"], InvalidName)
    assert [each.group for each in reply.shares] == ["g"]
    with pytest.raises(InvalidName, match="client name"):
        subject.members.heartbeat("a b", [])
    with pytest.raises(GroupNotFound, match="'unknown' has never consumed subject 's'"):
        subject.allocator.view("s", "unknown")


def test_limits_hold(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(groups=2, members_per_group=1, groups_per_client=3))
    register(service, "g1")
    service.subjects.create("s")
    reply = service.members.heartbeat("c1", [("s", "a", False), ("s", "b", False), ("s", "c", False)])
    assert {type(error) for error in reply.refused.values()} == {LimitExceeded}
    assert "group limit reached (2 per cluster" in reply.refused["s", "c"].args[0]
    assert reply.refused["s", "c"].details == {"subject": "s", "group": "c", "limit": "groups", "value": 2}
    assert (
        "(1 per group, limit `members_per_group`)"
        in service.members.heartbeat("c2", [("s", "a", False)]).refused["s", "a"].args[0]
    )
    with pytest.raises(LimitExceeded, match=r"4 groups \(limit 3"):
        service.members.heartbeat("c1", [("s", name, False) for name in "abcd"])


def test_a_counter_that_a_meta_server_raises_is_no_sign_of_life_to_itself(subject: MetaService, clock: ManualClock):
    join(subject, "c1")
    pass_time(clock, 3, subject)
    # The counter is raised a second later.
    join(subject, "c1")
    pass_time(clock, 9, subject)
    assert subject.allocator.view("s", "g").members.keys() == {"c1"}
    pass_time(clock, 1, subject)
    assert subject.allocator.view("s", "g").members == {}


def test_a_client_of_another_meta_server_is_not_lost(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    first.subjects.create("s")
    join(first, "c1")
    join(first, "gone")
    pass_time(clock, 1, first, second)
    before = first.allocator.view("s", "g").members["c1"]
    for _ in range(30):
        assert join(second, "c1").refused == {}
        pass_time(clock, 1, first, second)
    assert first.allocator.view("s", "g").members.keys() == {"c1"}
    assert set(before) < set(first.allocator.view("s", "g").members["c1"])


def test_clients_of_a_dead_meta_server_are_lost_unless_they_move_to_another(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    first.subjects.create("s")
    join(first, "c1")
    join(first, "c2")
    pass_time(clock, 3, first, second)
    for _ in range(15):
        join(second, "c2")
        pass_time(clock, 1, second)
    assert second.allocator.view("s", "g").members.keys() == {"c2"}


def test_many_clients_are_checked_page_by_page(stores: Stores, clock: ManualClock):
    limits = MetaLimits(page=7)
    first, second = MetaService(stores(), clock, limits), MetaService(stores(), clock, limits)
    register(first, "g1")
    first.subjects.create("s")
    clients = [f"c{number:02}" for number in range(40)]
    for _ in range(14):
        for client in clients[:25] if clock.monotonic() > 1003 else clients:
            join(first, client)
        pass_time(clock, 1, first, second)
    assert second.allocator.view("s", "g").members.keys() == set(clients[:25])
    pass_time(clock, 12, second)
    assert second.allocator.view("s", "g").members == {}


def test_allocations_are_written_many_at_a_time(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(write_groups=4))
    register(service, "g1")
    for number in range(10):
        service.subjects.create(f"s{number}")
    service.step()
    memberships = [(f"s{number}", "g", True) for number in range(10)]
    service.members.heartbeat("c1", memberships)
    written = []
    while service.step().more:
        if service.allocator.writing is not None:
            written.append(len(service.allocator.writing.made))
    assert written == [4, 4, 2]
    assert all(lps(each.lps) == LOGICAL_PARTITIONS for each in service.members.heartbeat("c1", memberships).shares)


def test_a_step_ends_when_its_time_is_used_up(stores: Stores):
    class Slow(ManualClock):
        """Each reading of the clock takes time."""

        def monotonic(self) -> float:
            self.advance(0.001)
            return super().monotonic()

    service = MetaService(stores(), Slow(), MetaLimits(slice_seconds=0.0025))
    register(service, "g1")
    for number in range(9):
        service.subjects.create(f"s{number}")
    service.members.heartbeat("c1", [(f"s{number}", "g", True) for number in range(9)])
    service.tick()
    computed = []
    while service.step().more and service.allocator.writing is None:
        computed.append(len(service.allocator._made.made))
    assert computed == [3, 6]
    assert service.allocator.writing is not None
    assert len(service.allocator.writing.made) == 9


def test_a_client_receives_only_what_is_new_to_it(subject: MetaService):
    both = [("s", "g", True), ("s", "h", True)]
    subject.members.heartbeat("c1", both)
    settle(subject)
    first = subject.members.heartbeat("c1", both)
    assert [each.group for each in first.shares] == ["g", "h"]
    again = subject.members.heartbeat("c1", both, seen=first.seen)
    assert (again.seen, again.shares, again.routes) == (first.seen, [], first.routes)
    join(subject, "c2", group="h")
    settle(subject)
    later = subject.members.heartbeat("c1", both, seen=first.seen)
    assert [each.group for each in later.shares] == ["h"]
    assert subject.members.known("c1", first.seen) == later
    assert [each.group for each in subject.members.known("c1").shares] == ["g", "h"]


def test_silence_counts_from_the_last_heartbeat_not_from_the_last_check(subject: MetaService, clock: ManualClock):
    join(subject, "c1")
    settle(subject)
    subject.tick()
    clock.advance(0.9)
    join(subject, "c1")
    for _ in range(9):
        pass_time(clock, 1, subject)
    clock.advance(0.9)
    subject.tick()
    assert subject.members.next_loss == pytest.approx(0.1)
    assert subject.allocator.view("s", "g").members.keys() == {"c1"}
    clock.advance(0.1)
    subject.tick()
    assert subject.allocator.view("s", "g").members == {}
    assert subject.members.next_loss == math.inf


def test_no_client_is_lost_because_the_meta_server_paused(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits.of_lease(2.0))
    register(service, "g1")
    service.subjects.create("s")
    join(service, "c1")
    join(service, "c2")
    pass_time(clock, 1, service)
    clock.advance(60.0)
    # The heartbeat of one of them arrives first.
    join(service, "c1")
    service.tick()
    settle(service)
    assert service.allocator.view("s", "g").members.keys() == {"c1", "c2"}


def test_a_repeated_heartbeat_does_not_touch_the_database(subject: MetaService, monkeypatch: pytest.MonkeyPatch):
    join(subject, "c1")
    settle(subject)
    database = subject._core.store.database
    monkeypatch.setattr(database, "reading", None)
    monkeypatch.setattr(database, "writing", None)
    assert lps(share(join(subject, "c1")).lps) == LOGICAL_PARTITIONS


def test_a_restarted_meta_server_knows_the_allocation(subject: MetaService, stores: Stores, clock: ManualClock):
    join(subject, "c1")
    join(subject, "c2")
    settle(subject)
    other = MetaService(stores(), clock)
    assert other.allocator.view("s", "g") == subject.allocator.view("s", "g")
    assert share(join(other, "c1")) == share(join(subject, "c1"))
    assert not other.step().more


def test_clients_that_are_lost_together_are_removed_in_steps_limited_by_memberships(stores: Stores, clock: ManualClock):
    """One client of a hundred groups counts as much as a hundred clients of one group."""
    store = stores()
    service = MetaService(store, clock, MetaLimits(write_members=6))
    register(service, "g1")
    service.subjects.create("s")
    groups = [("s", f"g{number}", True) for number in range(4)]
    for client in ("c1", "c2", "c3", "c4", "c5"):
        service.members.heartbeat(client, groups)
    settle(service)
    for _ in range(9):
        clock.advance(1.0)
        service.tick()
        settle(service)
    clock.advance(1.0)
    left = [len(service.allocator.view("s", "g0").members)]
    more = service.tick().more
    while more:
        left.append(len(service.allocator.view("s", "g0").members))
        more = service.step().more
    left.append(len(service.allocator.view("s", "g0").members))
    assert sorted(set(left), reverse=True) == [5, 3, 1, 0]
    assert left == sorted(left, reverse=True)


def test_joining_a_group_while_another_meta_server_deletes_its_subject_is_refused_without_endless_retries(
    subject: MetaService, stores: Stores, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    join(subject, "c1")
    settle(subject)
    other = MetaService(stores(), clock)
    other.tick()
    founded = Joining.join

    def late(joining: Joining, *arguments: Any) -> Any:
        subject.subjects.delete("s")
        return founded(joining, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Joining, "join", late)
        join(other, "c2")
    refused = join(other, "c2").refused
    assert [type(error) for error in refused.values()] == [SubjectNotFound]
    assert other._core.mirror.memberships.get("c2") is None
