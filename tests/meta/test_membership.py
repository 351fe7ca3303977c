"""Members of groups: what each is told to do, and what becomes of those who fall silent."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.clock import ManualClock
from plait.errors import GroupMismatch, GroupNotFound, InvalidName, LimitExceeded, SubjectNotFound
from plait.limits import LOGICAL_PARTITIONS, MetaLimits
from plait.meta.members.membership import Members
from plait.meta.service import MetaService
from tests.meta.support import Stores, join, lps, pass_time, register, settle, share


@pytest.fixture
def subject(service: MetaService) -> MetaService:
    service.create_subject("s")
    return service


def test_the_only_member_gets_everything(subject: MetaService):
    first = join(subject, "c1")
    assert (share(first).strategy, share(first).lps) == ("exclusive", [])
    assert subject.step().clients == {"c1"}
    settle(subject)
    beaten = join(subject, "c1")
    assert beaten.seen > first.seen
    ((first_lp, end, _),) = share(beaten).lps
    assert (first_lp, end) == (0, LOGICAL_PARTITIONS)
    assert beaten.routes == {"s": subject.route("s").route.version}
    assert beaten.refused == {}


def test_nothing_new_means_the_same_number(subject: MetaService):
    join(subject, "c1")
    settle(subject)
    before = join(subject, "c1")
    assert join(subject, "c1") == before
    assert not subject.tick().clients
    join(subject, "c2")
    settle(subject)
    assert join(subject, "c1").seen > before.seen


def test_who_has_heard_of_more_than_the_database_has_is_told_everything(subject: MetaService):
    join(subject, "c1")
    settle(subject)
    told = join(subject, "c1")
    # As after the database was restored from a copy.
    assert subject.beat_client("c1", [("s", "g", True)], seen=told.seen + 1) == told
    assert subject.beat_client("c1", [("s", "g", True)], seen=told.seen).shares == []


def test_a_new_route_is_news_to_members(subject: MetaService):
    before = join(subject, "c1")
    settle(subject)
    register(subject, "g2")
    subject.expand("s", 2)
    assert subject.step().clients == {"c1"}
    after = join(subject, "c1")
    assert after.seen > before.seen
    assert after.routes["s"] == before.routes["s"] + 1


def test_an_unordered_group_is_shared(subject: MetaService):
    beaten = join(subject, "c1", ordered=False)
    assert share(beaten) == ("s", "g", "shared", [])
    assert not subject.step().more
    view = subject.allocation("s", "g")
    assert (view.strategy, view.epoch, view.members) == ("shared", 0, {"c1": []})


def test_members_that_join_and_leave_move_only_what_must(subject: MetaService):
    for client in ("c1", "c2", "c3"):
        join(subject, client)
    settle(subject)
    before = subject.allocation("s", "g").members
    assert sorted(lps(runs) for runs in before.values()) == [341, 341, 342]
    assert subject.beat_client("c2", [], leaving=True).shares == []
    settle(subject)
    after = subject.allocation("s", "g").members
    assert after.keys() == {"c1", "c3"}
    for client in after:
        assert set(before[client]) <= set(after[client])


def test_a_heartbeat_names_all_groups_of_a_client(subject: MetaService):
    both = subject.beat_client("c1", [("s", "g", True), ("s", "h", True)])
    assert [each.group for each in both.shares] == ["g", "h"]
    one = subject.beat_client("c1", [("s", "h", True)])
    assert [each.group for each in one.shares] == ["h"]
    settle(subject)
    assert subject.allocation("s", "g").members == {}


def test_a_member_that_differs_is_refused_with_both_values(subject: MetaService):
    join(subject, "c1", ordered=True)
    beaten = subject.beat_client("c2", [("s", "g", False), ("s", "h", False)])
    error = beaten.refused["s", "g"]
    assert isinstance(error, GroupMismatch)
    assert "ordered=True" in error.message
    assert "ordered=False" in error.message
    assert [each.group for each in beaten.shares] == ["h"]


def test_affinity_is_a_kind_of_its_own_that_has_shares_too(subject: MetaService):
    member, place = [("s", "g", True)], [("s", "g")]
    assert subject.beat_client("c1", member, affinity=place).refused == {}
    settle(subject)
    assert lps(share(subject.beat_client("c1", member, affinity=place)).lps) == LOGICAL_PARTITIONS
    error = subject.beat_client("c2", member).refused["s", "g"]
    assert isinstance(error, GroupMismatch)
    assert "affinity='key'" in error.message
    assert "ordered=True" in error.message
    assert ("s", "g") in subject.beat_client("c1", member).refused
    settle(subject)
    assert subject.allocation("s", "g").members == {}


def test_a_member_that_changes_its_mind_is_out(subject: MetaService):
    join(subject, "c1", ordered=True)
    settle(subject)
    assert ("s", "g") in join(subject, "c1", ordered=False).refused
    settle(subject)
    assert subject.allocation("s", "g").members == {}


def test_what_cannot_be_a_membership_is_refused_by_itself(subject: MetaService):
    beaten = subject.beat_client("c1", [("nowhere", "g", True), ("s", "bad name", True), ("s", "g", True)])
    assert isinstance(beaten.refused["nowhere", "g"], SubjectNotFound)
    assert isinstance(beaten.refused["s", "bad name"], InvalidName)
    assert [each.group for each in beaten.shares] == ["g"]
    with pytest.raises(InvalidName, match="client name"):
        subject.beat_client("a b", [])
    with pytest.raises(GroupNotFound, match="'nobody' has never consumed subject 's'"):
        subject.allocation("s", "nobody")


def test_limits_hold(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(groups=2, members_per_group=1, groups_per_client=3))
    register(service, "g1")
    service.create_subject("s")
    beaten = service.beat_client("c1", [("s", "a", False), ("s", "b", False), ("s", "c", False)])
    assert {type(error) for error in beaten.refused.values()} == {LimitExceeded}
    assert "2 groups" in beaten.refused["s", "c"].args[0]
    assert beaten.refused["s", "c"].details == {"subject": "s", "group": "c", "limit": "groups", "value": 2}
    assert "its 1 members" in service.beat_client("c2", [("s", "a", False)]).refused["s", "a"].args[0]
    with pytest.raises(LimitExceeded, match="4 groups, the limit is 3"):
        service.beat_client("c1", [("s", name, False) for name in "abcd"])


def test_a_silent_client_is_lost_after_its_lease(subject: MetaService, clock: ManualClock):
    join(subject, "c1")
    join(subject, "c2")
    settle(subject)
    for _ in range(9):
        join(subject, "c1")
        pass_time(clock, 1, subject)
    assert subject.allocation("s", "g").members.keys() == {"c1", "c2"}
    join(subject, "c1")
    pass_time(clock, 1, subject)
    view = subject.allocation("s", "g")
    assert view.members.keys() == {"c1"}
    assert lps(view.members["c1"]) == LOGICAL_PARTITIONS
    # Back again, under a new epoch.
    join(subject, "c2")
    settle(subject)
    (epoch,) = {epoch for _, _, epoch in subject.allocation("s", "g").members["c2"]}
    assert epoch > view.epoch


def test_what_a_meta_server_notes_for_others_is_no_sign_of_life_to_itself(subject: MetaService, clock: ManualClock):
    join(subject, "c1")
    pass_time(clock, 3, subject)
    # Noted a second later.
    join(subject, "c1")
    pass_time(clock, 9, subject)
    assert subject.allocation("s", "g").members.keys() == {"c1"}
    pass_time(clock, 1, subject)
    assert subject.allocation("s", "g").members == {}


def test_a_client_that_talks_to_another_meta_server_is_not_lost(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    first.create_subject("s")
    join(first, "c1")
    join(first, "gone")
    pass_time(clock, 1, first, second)
    before = first.allocation("s", "g").members["c1"]
    for _ in range(30):
        assert join(second, "c1").refused == {}
        pass_time(clock, 1, first, second)
    assert first.allocation("s", "g").members.keys() == {"c1"}
    assert set(before) < set(first.allocation("s", "g").members["c1"])


def test_clients_of_a_meta_server_that_died_are_lost_or_found_elsewhere(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    first.create_subject("s")
    join(first, "c1")
    join(first, "c2")
    pass_time(clock, 3, first, second)
    for _ in range(15):
        join(second, "c2")
        pass_time(clock, 1, second)
    assert second.allocation("s", "g").members.keys() == {"c2"}


def test_many_clients_are_watched_page_by_page(stores: Stores, clock: ManualClock):
    limits = MetaLimits(page=7)
    first, second = MetaService(stores(), clock, limits), MetaService(stores(), clock, limits)
    register(first, "g1")
    first.create_subject("s")
    clients = [f"c{number:02}" for number in range(40)]
    for _ in range(14):
        for client in clients[:25] if clock.monotonic() > 1003 else clients:
            join(first, client)
        pass_time(clock, 1, first, second)
    assert second.allocation("s", "g").members.keys() == set(clients[:25])
    pass_time(clock, 12, second)
    assert second.allocation("s", "g").members == {}


def test_allocations_are_written_many_at_a_time(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(write_groups=4))
    register(service, "g1")
    for number in range(10):
        service.create_subject(f"s{number}")
    service.step()
    memberships = [(f"s{number}", "g", True) for number in range(10)]
    service.beat_client("c1", memberships)
    slices = []
    while True:
        changes = service.step()
        slices.append(len(changes.groups))
        if not changes.more:
            break
    # The groups are founded before the first is computed; what is written is known with the step after.
    assert slices == [10, 4, 4, 2]
    assert all(lps(each.lps) == LOGICAL_PARTITIONS for each in service.beat_client("c1", memberships).shares)


def test_a_slice_ends_when_its_time_is_over(stores: Stores):
    class Slow(ManualClock):
        """Every look at it takes a while."""

        def monotonic(self) -> float:
            self.advance(0.001)
            return super().monotonic()

    service = MetaService(stores(), Slow(), MetaLimits(slice_seconds=0.0025))
    register(service, "g1")
    for number in range(9):
        service.create_subject(f"s{number}")
    service.beat_client("c1", [(f"s{number}", "g", True) for number in range(9)])
    service.tick()
    computed = []
    while service.step().more and service.writing is None:
        computed.append(len(service._allocating._made.made))
    assert computed == [3, 6]
    assert service.writing is not None
    assert len(service.writing.made) == 9


def test_a_client_hears_only_of_what_is_new_to_it(subject: MetaService):
    both = [("s", "g", True), ("s", "h", True)]
    subject.beat_client("c1", both)
    settle(subject)
    first = subject.beat_client("c1", both)
    assert [each.group for each in first.shares] == ["g", "h"]
    again = subject.beat_client("c1", both, seen=first.seen)
    assert (again.seen, again.shares, again.routes) == (first.seen, [], first.routes)
    join(subject, "c2", group="h")
    settle(subject)
    later = subject.beat_client("c1", both, seen=first.seen)
    assert [each.group for each in later.shares] == ["h"]
    assert subject.client("c1", first.seen) == later
    assert [each.group for each in subject.client("c1").shares] == ["g", "h"]


def test_silence_counts_from_the_heartbeat_not_from_when_was_looked_last(subject: MetaService, clock: ManualClock):
    join(subject, "c1")
    settle(subject)
    subject.tick()
    clock.advance(0.9)
    join(subject, "c1")
    for _ in range(9):
        pass_time(clock, 1, subject)
    clock.advance(0.9)
    subject.tick()
    assert subject.next_loss() == pytest.approx(0.1)
    assert subject.allocation("s", "g").members.keys() == {"c1"}
    clock.advance(0.1)
    subject.tick()
    assert subject.allocation("s", "g").members == {}
    assert subject.next_loss() == math.inf


def test_nobody_is_lost_because_the_meta_server_stood_still(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits.of_lease(2.0))
    register(service, "g1")
    service.create_subject("s")
    join(service, "c1")
    join(service, "c2")
    pass_time(clock, 1, service)
    clock.advance(60.0)
    # One of them is heard of first.
    join(service, "c1")
    service.tick()
    settle(service)
    assert service.allocation("s", "g").members.keys() == {"c1", "c2"}


def test_a_heartbeat_that_says_nothing_new_does_not_touch_the_database(
    subject: MetaService, monkeypatch: pytest.MonkeyPatch
):
    join(subject, "c1")
    settle(subject)
    database = subject._core.store.database
    monkeypatch.setattr(database, "reading", None)
    monkeypatch.setattr(database, "writing", None)
    assert lps(share(join(subject, "c1")).lps) == LOGICAL_PARTITIONS


def test_a_meta_server_that_starts_anew_knows_who_has_what(subject: MetaService, stores: Stores, clock: ManualClock):
    join(subject, "c1")
    join(subject, "c2")
    settle(subject)
    other = MetaService(stores(), clock)
    assert other.allocation("s", "g") == subject.allocation("s", "g")
    assert share(join(other, "c1")) == share(join(subject, "c1"))
    assert not other.step().more


def test_clients_that_are_lost_together_are_given_up_by_what_they_are_members_of(stores: Stores, clock: ManualClock):
    """One of a hundred groups is as much to take in as a hundred of one."""
    store = stores()
    service = MetaService(store, clock, MetaLimits(write_members=6))
    register(service, "g1")
    service.create_subject("s")
    groups = [("s", f"g{number}", True) for number in range(4)]
    for client in ("c1", "c2", "c3", "c4", "c5"):
        service.beat_client(client, groups)
    settle(service)
    for _ in range(9):
        clock.advance(1.0)
        service.tick()
        settle(service)
    clock.advance(1.0)
    left = [len(service.allocation("s", "g0").members)]
    more = service.tick().more
    while more:
        left.append(len(service.allocation("s", "g0").members))
        more = service.step().more
    left.append(len(service.allocation("s", "g0").members))
    assert sorted(set(left), reverse=True) == [5, 3, 1, 0]
    assert left == sorted(left, reverse=True)


def test_who_joins_what_another_meta_server_deletes_at_that_moment_is_refused_soon(
    subject: MetaService, stores: Stores, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    join(subject, "c1")
    settle(subject)
    other = MetaService(stores(), clock)
    other.tick()
    founded = Members._join

    def late(members: Members, *arguments: Any) -> Any:
        subject.delete_subject("s")
        return founded(members, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Members, "_join", late)
        join(other, "c2")
    refused = join(other, "c2").refused
    assert [type(error) for error in refused.values()] == [SubjectNotFound]
    assert other._core.mirror.memberships.get("c2") is None
