"""Subjects and their routes, as clients and operators see them."""

from __future__ import annotations

import pytest

from plait.clock import ManualClock
from plait.errors import (
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    MetaUnavailable,
    NoBroker,
    SubjectExists,
    SubjectNotFound,
)
from plait.limits import MetaLimits
from plait.meta.database import sweep
from plait.meta.service import MetaService
from plait.model.route import current, spans
from plait.model.settings import SubjectSettings
from plait.wire.admin.cluster import RegisteredPartition
from tests.meta.support import ALL, Stores, converge, join, pass_time, place, places, register, settle, subject_names


def test_a_new_subject_is_on_two_broker_groups(service: MetaService):
    register(service, "g2", "g3")
    view = service.routing.view("orders")
    assert [str(each) for each in view.route.partitions] == ["orders@g1", "orders@g2"]
    assert view.brokers["g2"] == (["plait://g2:1"], "RW")
    assert view.settings == SubjectSettings()
    # The groups with the fewest partitions are next.
    assert places(service, "orders") == ["orders@g1", "orders@g2"]
    assert [each.group for each in service.routing.view("more").route.partitions] == ["g3", "g1"]


def test_with_one_broker_group_a_new_subject_has_one_partition(service: MetaService):
    assert places(service, service.routing.view("orders").route.subject) == ["orders@g1"]


def test_a_missing_subject_that_may_not_be_created_is_not_found(service: MetaService):
    with pytest.raises(SubjectNotFound, match="'orders' does not exist"):
        service.routing.view("orders", create=False)
    with pytest.raises(SubjectNotFound):
        service.routing.retarget("orders", 2)


def test_without_a_broker_no_subject_is_created(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock)
    with pytest.raises(NoBroker, match="'orders'"):
        service.routing.view("orders")
    register(service, "g1")
    assert places(service, service.routing.view("orders").route.subject) == ["orders@g1"]


def test_a_broker_without_a_heartbeat_gets_no_new_subject(stores: Stores, clock: ManualClock):
    """The broker may be long gone: a meta server that has just started does not know yet."""
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    second.tick()
    with pytest.raises(NoBroker):
        second.routing.view("orders")
    pass_time(clock, 2, first, second, alive=["g1"])
    assert second.routing.view("orders").route.partitions == (place("orders@g1"),)


def test_partitions_are_spread_over_the_broker_groups(service: MetaService):
    register(service, "g2")
    service.subjects.create("orders", partitions=5)
    assert places(service, "orders") == ["orders@g1", "orders@g2", "orders#1@g1", "orders#1@g2", "orders#2@g1"]
    service.subjects.create("here", groups=["g2"], partitions=2)
    assert places(service, "here") == ["here@g2", "here#1@g2"]
    service.subjects.create("named", partitions=[place("a@g2"), place("b@g1")])
    assert places(service, "named") == ["a@g2", "b@g1"]


def test_an_invalid_subject_is_refused_with_the_reason(service: MetaService):
    service.subjects.create("orders")
    with pytest.raises(SubjectExists, match="'orders'"):
        service.subjects.create("orders")
    with pytest.raises(InvalidName, match="subject name 'no name'"):
        service.subjects.create("no name")
    with pytest.raises(InvalidArgument, match="0 partitions"):
        service.subjects.create("x", partitions=0)
    with pytest.raises(InvalidArgument, match="1025 partitions"):
        service.subjects.create("x", partitions=1025)
    with pytest.raises(InvalidArgument, match="no broker group 'g9'"):
        service.subjects.create("x", groups=["g9"])
    with pytest.raises(InvalidArgument, match="no broker group 'g9'"):
        service.subjects.create("x", partitions=[place("x@g9")])
    with pytest.raises(InvalidArgument, match=r"orders@g1 belongs to subject 'orders'"):
        service.subjects.create("x", partitions=[place("orders@g1")])
    with pytest.raises(InvalidArgument, match="order is 'loose'"):
        SubjectSettings(order="loose")  # type: ignore[arg-type]
    assert subject_names(service) == ["orders"]


def test_the_number_of_subjects_is_limited(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(subjects=2))
    register(service, "g1")
    service.subjects.create("a")
    service.subjects.create("b")
    with pytest.raises(LimitExceeded, match=r"subject limit reached \(2 per cluster"):
        service.subjects.create("c")


def test_settings_are_stored_and_sent_to_brokers(service: MetaService):
    strict = SubjectSettings(order="strict", retention_seconds=60.0)
    service.subjects.create("orders", strict)
    (make,) = service.routing.makes()
    assert make.settings == strict
    assert make.lps == ALL
    service.routing.made(make)
    assert service.routing.makes() == []
    service.subjects.update("orders", {"retention_seconds": None})
    (again,) = service.routing.makes()
    assert again.settings == SubjectSettings(order="strict")
    assert again.version == make.version + 1
    # The reply to the earlier broker order does not count for the new settings.
    service.routing.made(make)
    assert service.routing.makes() == [again]
    service.routing.made(again)
    service.subjects.update("orders", {"retention_seconds": None})
    assert service.routing.makes() == []


def test_a_deleted_subject_is_gone_with_its_groups(service: MetaService):
    service.subjects.create("s")
    converge(service)
    join(service, "c1")
    settle(service)
    service.subjects.delete("s")
    assert subject_names(service) == []
    with pytest.raises(SubjectNotFound):
        service.routing.view("s", create=False)
    reply = join(service, "c1")
    assert isinstance(reply.refused["s", "g"], SubjectNotFound)
    assert reply.shares == []
    (drop,) = service.routing.drops()
    assert (drop.subject, str(drop.place)) == ("s", "s@g1")
    service.routing.dropped(drop)
    assert service.routing.drops() == []


def test_a_recreated_subject_has_higher_versions_and_epochs(service: MetaService):
    service.subjects.create("s")
    join(service, "c1")
    settle(service)
    before, epoch = service.routing.view("s").route.version, service.allocator.view("s", "g").epoch
    service.subjects.delete("s")
    again = service.routing.view("s").route
    assert again.version > before
    # The old partition has not been dropped yet, so its name is taken.
    assert again.partitions == (place("s#1@g1"),)
    join(service, "c1")
    settle(service)
    assert service.allocator.view("s", "g").epoch > epoch


def test_an_unknown_subject_of_a_registering_broker_is_taken_over(service: MetaService):
    settings = SubjectSettings(retention_seconds=5.0)
    facts = [
        RegisteredPartition("old", "old", settings, created=77),
        RegisteredPartition("s#1", "s"),
        RegisteredPartition("s", "s"),
    ]
    registered = service.register_broker("g2", "g2-1", "plait://g2:1", partitions=facts)
    assert registered.unrouted == ["s#1"]
    assert service.routing.view("old").settings == settings
    assert places(service, "old") == ["old@g2"]
    assert service._core.mirror.subjects["old"].created == 77
    assert spans(service.routing.view("old").route, 1023)[0].fence is None
    assert (current(service.routing.view("old").route) == 0).all()
    # A subject of the same name on another broker is not merged with it.
    registered = service.register_broker("g3", "g3-1", "plait://g3:1", partitions=[RegisteredPartition("old", "old")])
    assert registered.unrouted == ["old"]
    assert places(service, "old") == ["old@g2"]
    # A subject that was taken over stays known.
    assert service.register_broker("g2", "g2-1", "plait://g2:1", partitions=facts).unrouted == ["s#1"]


def test_a_deleted_subject_does_not_return_with_its_broker(service: MetaService):
    service.subjects.create("s")
    converge(service)
    service.subjects.delete("s")
    service.register_broker("g1", "b1", "plait://b1:1", partitions=[RegisteredPartition("s", "s")])
    assert subject_names(service) == []
    assert len(service.routing.drops()) == 1


def test_a_meta_server_with_a_lost_database_gives_out_higher_numbers_than_brokers_know(service: MetaService):
    service.register_broker("g2", "g2-1", "plait://g2:1", partitions=[RegisteredPartition("s", "s", newest=5_000)])
    assert service.routing.view("s").route.version > 5_000
    join(service, "c1")
    settle(service)
    assert service.allocator.view("s", "g").epoch > 5_000


def test_a_lost_route_is_rebuilt_from_the_partitions_of_the_brokers(service: MetaService):
    """s@g2 had all LPs and was sealed for [512, 1024) at sequence 6. Route version 9 opened [768, 1024) in s@g2 again,
    from sequence 8 on. s@g3, which had [512, 1024) in between, was sealed for [768, 1024) at sequence 3. A catalog
    keeps only the last seal of an LP, so the first span of [768, 1024) ends at 8.
    """
    left = RegisteredPartition(
        "s", "s", route=9, lps=[(0, 512), (768, 1024)], fences=[(512, 768, 6)], reopened=[(768, 1024, 8, 9)], created=5
    )
    right = RegisteredPartition("s", "s", route=8, lps=[(512, 768)], fences=[(768, 1024, 3)], created=7)
    assert service.register_broker("g2", "g2-1", "plait://g2:1", partitions=[left]).unrouted == ["s"]
    with pytest.raises(NoBroker, match=r"route of subject 's' was lost, .* on broker group g2 take 768 of 1024"):
        service.routing.view("s")
    with pytest.raises(SubjectNotFound):
        service.routing.view("s", create=False)
    assert service.register_broker("g3", "g3-1", "plait://g3:1", partitions=[right]).unrouted == []
    route = service.routing.view("s").route
    found = [
        (each.first, each.end, [(str(route.partitions[span.partition]), span.fence) for span in each.spans])
        for each in route.histories
    ]
    assert found == [
        (0, 512, [("s@g2", None)]),
        (512, 768, [("s@g2", 6), ("s@g3", None)]),
        (768, 1024, [("s@g2", 8), ("s@g3", 3), ("s@g2", None)]),
    ]


def test_missing_parts_of_a_lost_route_can_be_given_up(service: MetaService):
    service.register_broker("g2", "g2-1", "plait://g2:1", partitions=[RegisteredPartition("s", "s", lps=[(0, 512)])])
    service.subjects.create("s")
    assert service.routing.view("s").route.partitions


@pytest.mark.parametrize(
    "facts",
    [
        RegisteredPartition("s", "s", lps=[(0, 1025)]),
        RegisteredPartition("s", "s", lps=[(5, 5)]),
        RegisteredPartition("s", "s", fences=[(0, 5, -1)]),
        RegisteredPartition("s", "s", reopened=[(0, 5, 1, 2**63)]),
        RegisteredPartition("s", "s", lps=[(0, 1)] * 20_000),
    ],
)
def test_invalid_runs_are_refused(service: MetaService, facts: RegisteredPartition):
    with pytest.raises(InvalidArgument, match=r"partition 's'.* runs? of logical partitions"):
        service.register_broker("g2", "g2-1", "plait://g2:1", partitions=[facts])
    assert subject_names(service) == []


def test_many_subjects_are_taken_over(service: MetaService):
    facts = [RegisteredPartition(f"s{number}", f"s{number}") for number in range(2_500)]
    assert service.register_broker("g2", "g2-1", "plait://g2:1", partitions=facts).unrouted == []
    assert len(subject_names(service)) == 2_500


def test_a_deleted_subject_is_removed_from_the_database_eventually(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(clean_seconds=10.0))
    register(service, "g1")
    service.subjects.create("s")
    service.subjects.create("t")
    join(service, "c1")
    settle(service)
    late = MetaService(stores(), clock)
    assert subject_names(late) == ["s", "t"]
    service.subjects.delete("s")
    service.routing.dropped(service.routing.drops()[0])
    pass_time(clock, 60, service, alive=["g1"])
    rows = stores().news(-1).rows
    assert {type(row).__name__ for row in rows} == {"BrokerRow", "SubjectRow", "RouteRow", "PartitionAssignment"}
    assert len(rows) == 4
    assert places(service, "t") == ["t@g1"]
    # A meta server that has not read the deletion yet ends with the same state.
    assert subject_names(late) == ["t"]
    late.members.heartbeat("c1", [("s", "g", True)])


def test_departed_members_are_removed_faster_than_they_accumulate(
    stores: Stores, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep, "ROWS_MAX", 3)
    service = MetaService(stores(), clock, MetaLimits(clean_seconds=10.0))
    register(service, "g1")
    service.subjects.create("s")
    for number in range(40):
        join(service, f"c{number}")
    for number in range(40):
        leave = service.members.leave(f"c{number}")
        service.members.leaving.carry_out(leave)
        service.members.left(leave)
    settle(service)
    assert len([row for row in stores().news(-1).rows if type(row).__name__ == "MemberRow"]) == 40
    pass_time(clock, 45, service, alive=["g1"])
    assert [row for row in stores().news(-1).rows if type(row).__name__ == "MemberRow"] == []


def test_routes_are_answered_while_the_database_is_down(
    stores: Stores, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    store = stores()
    service = MetaService(store, clock, MetaLimits())
    register(service, "g1")
    before = service.routing.view("orders")
    service.subjects.create("old")
    service.subjects.delete("old")

    def down(_: int) -> None:
        raise MetaUnavailable("the database is down")

    with monkeypatch.context() as patch:
        patch.setattr(store, "news", down)
        for create in (True, False):
            assert service.routing.view("orders", create=create) == before
            for unknown in ("another", "old"):
                with pytest.raises(MetaUnavailable, match="is down"):
                    service.routing.view(unknown, create=create)
    service.tick()
    assert service.routing.view("another").route.subject == "another"
