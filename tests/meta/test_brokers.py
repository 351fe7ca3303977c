"""Brokers register, stay alive and are lost; the meta server never compares two clocks."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from plait.clock import ManualClock
from plait.errors import InvalidArgument, InvalidName, NoBroker
from plait.meta.database.store import StoreChange
from plait.meta.service import MetaService
from plait.wire.admin.cluster import State
from tests.meta.support import Stores, join, pass_time, register, settle


def state(service: MetaService, group: str) -> str:
    (view,) = [view for view in service.brokers.views() if view.group == group]
    return view.state


def test_a_silent_broker_is_lost_and_can_return(service: MetaService, clock: ManualClock):
    register(service, "g2")
    service.subjects.create("s", groups=["g2"])
    pass_time(clock, 4, service)
    assert state(service, "g2") == "RW"
    clock.advance(1.0)
    service.tick()
    assert state(service, "g2") == "NRW"
    # Its address stays known, because clients may still reach it.
    assert service.routing.view("s").brokers["g2"] == (["plait://g2:1"], "NRW")
    with pytest.raises(NoBroker):
        service.subjects.create("t", groups=["g2"])
    service.brokers.heartbeat("g2", "g2-1", "RW")
    assert state(service, "g2") == "RW"


def test_another_meta_server_sees_that_a_broker_lives_by_its_counter(stores: Stores, clock: ManualClock):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1", "g2")
    pass_time(clock, 20, first, second, alive=["g1"])
    assert [state(second, group) for group in ("g1", "g2")] == ["RW", "NRW"]


def test_no_broker_is_lost_because_the_meta_server_pauses(service: MetaService, clock: ManualClock):
    register(service, "g2")
    join_all = [("s", "g", True)]
    service.subjects.create("s")
    service.members.heartbeat("c1", join_all)
    clock.advance(1000.0)
    service.tick()
    assert state(service, "g2") == "RW"
    assert service.allocator.view("s", "g").members.keys() == {"c1"}


def test_no_broker_is_lost_because_the_wall_clock_jumps(service: MetaService, clock: ManualClock):
    clock.jump(86_400.0)
    service.tick()
    assert state(service, "g1") == "RW"


@pytest.mark.parametrize(
    ("wished", "reported", "seen"),
    [("RW", "R", "R"), ("R", "RW", "R"), ("W", "R", "NRW"), ("NRW", "RW", "NRW"), ("RW", "RW", "RW"), ("W", "RW", "W")],
)
def test_the_state_of_a_broker_is_what_both_broker_and_operator_allow(
    service: MetaService, wished: State, reported: State, seen: str
):
    service.brokers.wish("g1", wished)
    assert service.brokers.heartbeat("g1", "b1", reported)
    assert state(service, "g1") == seen
    assert service.brokers.views()[0].wished == wished


def test_the_operators_state_survives_a_restart_of_the_broker(service: MetaService):
    service.brokers.wish("g1", "R")
    service.register_broker("g1", "b1", "plait://elsewhere:1", epoch=1)
    view = service.brokers.views()[0]
    assert (view.wished, view.address) == ("R", "plait://elsewhere:1")


def test_a_broker_that_takes_no_sends_gets_no_new_subject(service: MetaService):
    service.brokers.heartbeat("g1", "b1", "R")
    with pytest.raises(NoBroker):
        service.subjects.create("s")


def test_a_second_broker_of_a_group_is_refused_while_the_first_lives(service: MetaService, clock: ManualClock):
    with pytest.raises(InvalidArgument, match=r"'g1' already has broker 'b1' at plait://b1:1"):
        service.register_broker("g1", "b2", "plait://b2:1")
    pass_time(clock, 6, service)
    service.register_broker("g1", "b2", "plait://b2:1")
    assert [view.broker for view in service.brokers.views()] == ["b2"]
    assert not service.brokers.heartbeat("g1", "b1", "RW")


def test_a_meta_server_that_has_just_started_refuses_a_second_broker_too(stores: Stores, clock: ManualClock):
    """It has received no heartbeat of the first broker yet, but another meta server may have."""
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    register(first, "g1")
    with pytest.raises(InvalidArgument, match="'g1' already has broker"):
        second.register_broker("g1", "b2", "plait://b2:1")
    pass_time(clock, 10, first, second, alive=["g1"])
    with pytest.raises(InvalidArgument, match="'g1' already has broker"):
        second.register_broker("g1", "b2", "plait://b2:1")


def test_of_two_brokers_of_a_group_that_register_at_once_one_is_accepted(
    stores: Stores, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    first, second = MetaService(stores(), clock), MetaService(stores(), clock)
    change = second._core.store.change

    def after_another_broker() -> AbstractContextManager[StoreChange]:
        register(first, "g1")
        return change()

    monkeypatch.setattr(second._core.store, "change", after_another_broker)
    with pytest.raises(InvalidArgument, match="'g1' already has broker 'g1-1'"):
        second.register_broker("g1", "b2", "plait://b2:1")
    assert [view.broker for view in second.brokers.views()] == ["g1-1"]
    assert second.brokers.views() == first.brokers.views()


def test_invalid_names_and_states_are_refused(service: MetaService):
    with pytest.raises(InvalidName, match="broker group name"):
        service.register_broker("a b", "b1", "plait://b1:1")
    with pytest.raises(InvalidArgument, match="broker state 'X' is invalid; use one of RW, R, W, NRW"):
        service.brokers.heartbeat("g1", "b1", "X")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no broker group 'g9'"):
        service.brokers.wish("g9", "R")


def test_a_broker_receives_the_lowest_epoch_that_it_may_grant(service: MetaService):
    """Each LP has its own floor: an LP that never moved is still handled under its first epoch."""
    service.subjects.create("s")
    service.subjects.create("t")
    service.members.heartbeat("c1", [("s", "g", True), ("s", "shared", False)])
    settle(service)
    join(service, "c2")
    settle(service)
    registered = service.register_broker("g1", "b1", "plait://b1:1")
    assert registered.cluster == "test"
    ((subject, group, floors),) = registered.floors
    assert (subject, group) == ("s", "g")
    epochs = [epoch for _, _, epoch in floors]
    assert epochs == sorted(set(epochs))
    assert (len(epochs), epochs[-1]) == (2, service.allocator.view("s", "g").epoch)
    assert [(first, end) for first, end, _ in floors] == [(0, 512), (512, 1024)]
    assert service.register_broker("g2", "g2-1", "plait://g2:1").floors == []
