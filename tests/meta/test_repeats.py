"""Any thread answers a heartbeat that repeats the one before; it keeps the client alive like any other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.clock import ManualClock
from plait.errors import MetaUnavailable
from plait.limits import LOGICAL_PARTITIONS, MetaLimits
from plait.meta.database.mirror import Mirror
from plait.meta.database.schema import MemberRow, TableRow
from plait.meta.members.shares import HeartbeatView
from plait.meta.service import MetaService
from tests.meta.support import Stores, join, lps, pass_time, register, settle, share


def send_heartbeat(service: MetaService, client: str, seen: int = 0, group: str = "g") -> HeartbeatView:
    return service.members.heartbeat(client, [("s", group, True)], seen=seen)


def repeat(service: MetaService, client: str, seen: int, group: str = "g") -> HeartbeatView | None:
    return service.members.repeat(client, [("s", group, True)], (), seen)


def settled(service: MetaService, client: str) -> int:
    """Let the client join and receive everything; returns the change number it has seen."""
    join(service, client)
    settle(service)
    return send_heartbeat(service, client).seen


def test_a_repeat_gets_the_same_reply_as_from_a_decision(subject: MetaService):
    subject.members.heartbeat("c1", [("s", "g", True), ("s", "h", False)])
    settle(subject)
    members = [("s", "g", True), ("s", "h", False)]
    seen = subject.members.heartbeat("c1", members).seen
    answer = subject.members.heartbeat("c1", members, seen=seen)
    assert [each.group for each in answer.shares] == ["h"]
    assert subject.members.repeat("c1", list(members), (), seen) == answer


def test_a_heartbeat_with_anything_new_needs_a_decision(subject: MetaService):
    seen = settled(subject, "c1")
    assert repeat(subject, "c1", seen) is not None
    assert repeat(subject, "c2", seen) is None
    assert repeat(subject, "c1", seen, "h") is None
    assert repeat(subject, "c1", 0) is None
    assert subject.members.repeat("c1", [("s", "g", True)], [("s", "g")], seen) is None


def test_a_repeat_gets_the_same_news_as_from_a_decision(subject: MetaService):
    seen = settled(subject, "c1")
    settled(subject, "c2")
    reply = repeat(subject, "c1", seen)
    assert reply is not None
    assert lps(share(reply).lps) == LOGICAL_PARTITIONS // 2
    assert reply == send_heartbeat(subject, "c1", seen)
    again = repeat(subject, "c1", reply.seen)
    assert again is not None
    assert (again.seen, again.shares) == (reply.seen, [])
    subject.members.left(subject.members.leave("c2"))
    settle(subject)
    reply = repeat(subject, "c1", reply.seen)
    assert reply is not None
    assert lps(share(reply).lps) == LOGICAL_PARTITIONS


def test_a_client_that_has_seen_more_than_the_database_has_receives_everything(subject: MetaService):
    seen = settled(subject, "c1")
    reply = repeat(subject, "c1", seen + 1)
    assert reply is not None
    assert (reply.seen, lps(share(reply).lps)) == (seen, LOGICAL_PARTITIONS)


def test_a_client_that_received_news_by_waiting_repeats(subject: MetaService):
    seen = settled(subject, "c1")
    settled(subject, "c2")
    reply = subject.members.news("c1", seen)
    assert reply == subject.members.known("c1", seen)
    assert reply is not None
    assert reply.seen > seen
    assert repeat(subject, "c1", reply.seen) is not None


def in_another_thread(ask: Callable[[], HeartbeatView | None]) -> HeartbeatView | None:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


def test_a_repeat_never_returns_part_of_a_change_but_may_return_older_state(
    subject: MetaService, monkeypatch: pytest.MonkeyPatch
):
    seen = settled(subject, "c1")
    settled(subject, "c2")
    newer = settled(subject, "c3")
    apply = Mirror._apply
    replies: list[HeartbeatView | None] = []

    def watched(mirror: Mirror, row: TableRow) -> None:
        apply(mirror, row)
        replies.append(in_another_thread(lambda: repeat(subject, "c1", seen)))
        replies.append(in_another_thread(lambda: subject.members.news("c1", seen)))
        if isinstance(row, MemberRow):
            assert in_another_thread(lambda: repeat(subject, "c3", newer)) is not None

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_apply", watched)
        settled(subject, "c4")
    assert set(replies) == {None}
    assert len(replies) >= 4
    answer = in_another_thread(lambda: repeat(subject, "c1", seen))
    assert answer is not None
    assert lps(share(answer).lps) == LOGICAL_PARTITIONS // 4


def test_an_allocation_of_another_meta_server_is_unpacked_by_a_decision(subject: MetaService, stores: Stores):
    seen = settled(subject, "c1")
    other = MetaService(stores(), subject._core.clock)
    settled(other, "c2")
    subject.tick()
    assert repeat(subject, "c1", seen) is None
    assert subject.members.news("c1", seen) is None
    reply = send_heartbeat(subject, "c1", seen)
    assert lps(share(reply).lps) == LOGICAL_PARTITIONS // 2
    assert repeat(subject, "c1", seen) == reply


def test_a_new_route_is_news(subject: MetaService):
    seen = settled(subject, "c1")
    register(subject, "g2")
    version = subject.routing.retarget("s", 2).version
    subject.step()
    reply = repeat(subject, "c1", seen)
    assert reply is not None
    assert reply.seen > seen
    assert (reply.shares, reply.routes) == ([], {"s": version})


def test_creating_and_deleting_another_group_is_no_news(subject: MetaService):
    seen = settled(subject, "c1")
    subject.subjects.create("t")
    join(subject, "c2", subject="t", group="h")
    assert repeat(subject, "c1", seen) is not None
    subject.subjects.delete("t")
    assert repeat(subject, "c1", seen) is not None


def test_an_own_allocation_needs_no_decision_even_if_another_meta_server_changed_something(
    subject: MetaService, stores: Stores
):
    seen = settled(subject, "c1")
    join(subject, "c2")
    while subject.allocator.writing is None:
        subject.step()
    register(MetaService(stores(), subject._core.clock), "g2")
    subject.step()
    reply = repeat(subject, "c1", seen)
    assert reply is not None
    assert lps(share(reply).lps) == LOGICAL_PARTITIONS // 2


def test_a_new_or_other_meta_server_needs_a_decision_first(subject: MetaService, stores: Stores, clock: ManualClock):
    seen = settled(subject, "c1")
    other = MetaService(stores(), clock)
    other.tick()
    assert repeat(other, "c1", seen) is None
    assert send_heartbeat(other, "c1", seen).shares == []
    assert repeat(other, "c1", seen) is not None


def test_a_client_that_left_or_was_removed_elsewhere_joins_again(
    subject: MetaService, stores: Stores, clock: ManualClock
):
    seen = settled(subject, "c1")
    other = MetaService(stores(), clock)
    other.tick()
    other.members.left(other.members.leave("c1"))
    subject.tick()
    assert repeat(subject, "c1", seen) is None
    send_heartbeat(subject, "c1", seen)
    settle(subject)
    assert lps(subject.allocator.view("s", "g").members["c1"]) == LOGICAL_PARTITIONS
    seen = send_heartbeat(subject, "c1").seen
    subject.members.left(subject.members.leave("c1"))
    assert repeat(subject, "c1", seen) is None


def test_a_repeating_client_is_lost_one_lease_after_its_last_repeat(subject: MetaService, clock: ManualClock):
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
    assert subject.members.next_loss == pytest.approx(0.25)
    assert subject.allocator.view("s", "g").members.keys() == {"c1"}
    clock.advance(0.25)
    subject.tick()
    assert subject.allocator.view("s", "g").members == {}
    assert repeat(subject, "c1", seen) is None


def test_other_meta_servers_see_that_a_repeating_client_lives(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    first.subjects.create("s")
    seen = settled(second, "c1")
    for _ in range(30):
        assert repeat(second, "c1", seen) is not None
        pass_time(clock, 1, second, first)
    assert first.allocator.view("s", "g").members.keys() == {"c1"}


def test_no_client_is_lost_because_the_meta_server_paused_while_another_client_repeated(
    stores: Stores, clock: ManualClock
):
    service = MetaService(stores(), clock, MetaLimits.of_lease(2.0))
    register(service, "g1")
    service.subjects.create("s")
    join(service, "c2")
    seen = settled(service, "c1")
    pass_time(clock, 1, service)
    for _ in range(6):
        repeat(service, "c1", seen)
        clock.advance(0.5)
    service.tick()
    settle(service)
    assert service.allocator.view("s", "g").members.keys() == {"c1", "c2"}


def test_a_stalled_meta_server_stops_answering_repeats(subject: MetaService, clock: ManualClock):
    seen = settled(subject, "c1")
    clock.advance(2.0)
    assert repeat(subject, "c1", seen) is not None
    clock.advance(0.1)
    assert repeat(subject, "c1", seen) is None
    subject.tick()
    assert repeat(subject, "c1", seen) is not None


def test_a_meta_server_without_database_stops_answering_repeats(subject: MetaService, monkeypatch: pytest.MonkeyPatch):
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
