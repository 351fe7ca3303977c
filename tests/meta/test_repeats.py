"""Heartbeats that say what the one before said are answered by any thread, and count as much as all others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.clock import ManualClock
from plait.errors import MetaUnavailable
from plait.limits import LOGICAL_PARTITIONS, MetaLimits
from plait.meta.database.mirror import Mirror
from plait.meta.database.schema import MemberRow, TableRow
from plait.meta.service import MetaService
from plait.meta.views import HeartbeatView
from tests.meta.support import Stores, join, lps, pass_time, register, settle, share


@pytest.fixture
def subject(service: MetaService) -> MetaService:
    service.create_subject("s")
    return service


def beat(service: MetaService, client: str, seen: int = 0, group: str = "g") -> HeartbeatView:
    return service.beat_client(client, [("s", group, True)], seen=seen)


def repeat(service: MetaService, client: str, seen: int, group: str = "g") -> HeartbeatView | None:
    return service.repeat_client(client, [("s", group, True)], (), seen)


def settled(service: MetaService, client: str) -> int:
    """It is a member, and has heard all there is."""
    join(service, client)
    settle(service)
    return beat(service, client).seen


def test_it_is_answered_as_by_a_decision(subject: MetaService):
    subject.beat_client("c1", [("s", "g", True), ("s", "h", False)])
    settle(subject)
    members = [("s", "g", True), ("s", "h", False)]
    seen = subject.beat_client("c1", members).seen
    answer = subject.beat_client("c1", members, seen=seen)
    assert [each.group for each in answer.shares] == ["h"]
    assert subject.repeat_client("c1", list(members), (), seen) == answer


def test_who_says_or_has_heard_something_else_is_decided_about(subject: MetaService):
    seen = settled(subject, "c1")
    assert repeat(subject, "c1", seen) is not None
    assert repeat(subject, "c2", seen) is None
    assert repeat(subject, "c1", seen, "h") is None
    assert repeat(subject, "c1", 0) is None
    assert subject.repeat_client("c1", [("s", "g", True)], [("s", "g")], seen) is None


def test_news_is_told_as_by_a_decision(subject: MetaService):
    seen = settled(subject, "c1")
    settled(subject, "c2")
    told = repeat(subject, "c1", seen)
    assert told is not None
    assert lps(share(told).lps) == LOGICAL_PARTITIONS // 2
    assert told == beat(subject, "c1", seen)
    again = repeat(subject, "c1", told.seen)
    assert again is not None
    assert (again.seen, again.shares) == (told.seen, [])
    subject.beat_client("c2", [], leaving=True)
    settle(subject)
    told = repeat(subject, "c1", told.seen)
    assert told is not None
    assert lps(share(told).lps) == LOGICAL_PARTITIONS


def test_who_has_heard_more_than_there_is_hears_all(subject: MetaService):
    seen = settled(subject, "c1")
    told = repeat(subject, "c1", seen + 1)
    assert told is not None
    assert (told.seen, lps(share(told).lps)) == (seen, LOGICAL_PARTITIONS)


def test_who_waited_for_news_and_has_heard_it_repeats(subject: MetaService):
    seen = settled(subject, "c1")
    settled(subject, "c2")
    told = subject.client_news("c1", seen)
    assert told == subject.client("c1", seen)
    assert told is not None
    assert told.seen > seen
    assert repeat(subject, "c1", told.seen) is not None


def in_another_thread(ask: Callable[[], HeartbeatView | None]) -> HeartbeatView | None:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


def test_no_part_of_a_change_is_told_and_what_is_known_already_is(
    subject: MetaService, monkeypatch: pytest.MonkeyPatch
):
    seen = settled(subject, "c1")
    settled(subject, "c2")
    newer = settled(subject, "c3")
    apply = Mirror._apply
    told: list[HeartbeatView | None] = []

    def watched(mirror: Mirror, row: TableRow) -> None:
        apply(mirror, row)
        told.append(in_another_thread(lambda: repeat(subject, "c1", seen)))
        told.append(in_another_thread(lambda: subject.client_news("c1", seen)))
        if isinstance(row, MemberRow):
            assert in_another_thread(lambda: repeat(subject, "c3", newer)) is not None

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_apply", watched)
        settled(subject, "c4")
    assert set(told) == {None}
    assert len(told) >= 4
    answer = in_another_thread(lambda: repeat(subject, "c1", seen))
    assert answer is not None
    assert lps(share(answer).lps) == LOGICAL_PARTITIONS // 4


def test_what_another_meta_server_allocated_is_unpacked_by_a_decision(subject: MetaService, stores: Stores):
    seen = settled(subject, "c1")
    other = MetaService(stores(), subject._core.clock)
    settled(other, "c2")
    subject.tick()
    assert repeat(subject, "c1", seen) is None
    assert subject.client_news("c1", seen) is None
    told = beat(subject, "c1", seen)
    assert lps(share(told).lps) == LOGICAL_PARTITIONS // 2
    assert repeat(subject, "c1", seen) == told


def test_a_new_route_is_news(subject: MetaService):
    seen = settled(subject, "c1")
    register(subject, "g2")
    version = subject.expand("s", 2).version
    subject.step()
    told = repeat(subject, "c1", seen)
    assert told is not None
    assert told.seen > seen
    assert (told.shares, told.routes) == ([], {"s": version})


def test_what_members_of_other_groups_do_is_no_news(subject: MetaService):
    join(subject, "c2", group="h")
    seen = settled(subject, "c1")
    join(subject, "c3", group="h")
    settle(subject)
    assert repeat(subject, "c1", seen) is not None


def test_nor_is_a_group_that_is_founded_or_deleted_elsewhere(subject: MetaService):
    seen = settled(subject, "c1")
    subject.create_subject("t")
    join(subject, "c2", subject="t", group="h")
    assert repeat(subject, "c1", seen) is not None
    subject.delete_subject("t")
    assert repeat(subject, "c1", seen) is not None


def test_what_this_server_allocated_needs_no_decision_even_if_others_changed_something_meanwhile(
    subject: MetaService, stores: Stores
):
    seen = settled(subject, "c1")
    join(subject, "c2")
    while subject.writing is None:
        subject.step()
    register(MetaService(stores(), subject._core.clock), "g2")
    subject.step()
    told = repeat(subject, "c1", seen)
    assert told is not None
    assert lps(share(told).lps) == LOGICAL_PARTITIONS // 2


def test_a_meta_server_that_starts_anew_and_another_one_decide(
    subject: MetaService, stores: Stores, clock: ManualClock
):
    seen = settled(subject, "c1")
    other = MetaService(stores(), clock)
    other.tick()
    assert repeat(other, "c1", seen) is None
    assert beat(other, "c1", seen).shares == []
    assert repeat(other, "c1", seen) is not None


def test_a_client_that_left_or_was_given_up_elsewhere_is_a_member_again(
    subject: MetaService, stores: Stores, clock: ManualClock
):
    seen = settled(subject, "c1")
    other = MetaService(stores(), clock)
    other.tick()
    other.beat_client("c1", [], leaving=True)
    subject.tick()
    assert repeat(subject, "c1", seen) is None
    beat(subject, "c1", seen)
    settle(subject)
    assert lps(subject.allocation("s", "g").members["c1"]) == LOGICAL_PARTITIONS
    seen = beat(subject, "c1").seen
    subject.beat_client("c1", [], leaving=True)
    assert repeat(subject, "c1", seen) is None


def test_who_repeats_is_not_lost_and_is_lost_a_lease_after_the_last_time(subject: MetaService, clock: ManualClock):
    seen = settled(subject, "c1")
    for _ in range(30):
        assert repeat(subject, "c1", seen) is not None
        pass_time(clock, 1, subject)
    subject.tick()
    clock.advance(0.75)
    assert repeat(subject, "c1", seen) is not None
    clock.advance(0.25)
    pass_time(clock, 9, subject)
    clock.advance(0.5)
    subject.tick()
    assert subject.next_loss() == pytest.approx(0.25)
    assert subject.allocation("s", "g").members.keys() == {"c1"}
    clock.advance(0.25)
    subject.tick()
    assert subject.allocation("s", "g").members == {}
    assert repeat(subject, "c1", seen) is None


def test_who_repeats_keeps_nobody_else_alive(subject: MetaService, clock: ManualClock):
    join(subject, "c2")
    seen = settled(subject, "c1")
    for _ in range(9):
        repeat(subject, "c1", seen)
        pass_time(clock, 1, subject)
    assert subject.allocation("s", "g").members.keys() == {"c1", "c2"}
    repeat(subject, "c1", seen)
    pass_time(clock, 1, subject)
    assert subject.allocation("s", "g").members.keys() == {"c1"}


def test_other_meta_servers_hear_of_it(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    first.create_subject("s")
    seen = settled(second, "c1")
    for _ in range(30):
        assert repeat(second, "c1", seen) is not None
        pass_time(clock, 1, second, first)
    assert first.allocation("s", "g").members.keys() == {"c1"}


def test_nobody_is_lost_because_the_meta_server_stood_still_while_others_repeated(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits.of_lease(2.0))
    register(service, "g1")
    service.create_subject("s")
    join(service, "c2")
    seen = settled(service, "c1")
    pass_time(clock, 1, service)
    for _ in range(6):
        repeat(service, "c1", seen)
        clock.advance(0.5)
    service.tick()
    settle(service)
    assert service.allocation("s", "g").members.keys() == {"c1", "c2"}


def test_a_meta_server_that_stands_still_does_not_go_on_answering(subject: MetaService, clock: ManualClock):
    seen = settled(subject, "c1")
    clock.advance(2.0)
    assert repeat(subject, "c1", seen) is not None
    clock.advance(0.1)
    assert repeat(subject, "c1", seen) is None
    subject.tick()
    assert repeat(subject, "c1", seen) is not None


def test_nor_does_one_whose_database_is_down(subject: MetaService, monkeypatch: pytest.MonkeyPatch):
    seen = settled(subject, "c1")

    def down(_: int) -> None:
        raise MetaUnavailable("the database is down")

    with monkeypatch.context() as patch:
        patch.setattr(subject._core.store, "news", down)
        with pytest.raises(MetaUnavailable, match="is down"):
            subject.tick()
    assert repeat(subject, "c1", seen) is None
    subject.tick()
    assert repeat(subject, "c1", seen) is not None
