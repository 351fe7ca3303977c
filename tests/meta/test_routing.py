"""Changes of the number of partitions, one broker order at a time."""

from __future__ import annotations

import pytest

from plait.errors import InvalidArgument, NoBroker
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.route_changes import Drop
from plait.meta.service import MetaService
from plait.model.logical_partitions import lp_set
from plait.model.route import current, openings, spans, target
from tests.meta.support import ALL, converge, expire, place, places, register, subject_names


def test_new_partitions_are_made_before_any_lp_moves(spread: MetaService):
    spread.routing.retarget("s", 3)
    assert places(spread, "s") == ["s@g1", "s@g2", "s@g3"]
    assert spread.routing.moves() == []
    (make,) = spread.routing.makes()
    assert (str(make.place), make.lps) == ("s@g3", [])
    spread.routing.made(make)
    assert {str(move.place) for move in spread.routing.moves("s")} == {"s@g1", "s@g2"}


def test_a_route_waits_for_the_partitions_of_a_new_subject_but_not_for_added_ones(service: MetaService):
    register(service, "g2", "g3")
    service.subjects.create("s", groups=["g1", "g2"])
    assert service.routing.unmade("s") == service.routing.makes("s") != []
    converge(service)
    service.routing.retarget("s", 3)
    assert service.routing.makes("s")
    assert service.routing.unmade("s") == []


def test_a_moved_lp_is_opened_in_its_new_partition(spread: MetaService):
    spread.routing.retarget("s", 3)
    spread.routing.made(spread.routing.makes()[0])
    move = spread.routing.moves()[0]
    before = spread.routing.view("s").route
    spread.routing.sealed(move, [(first, end, 42) for first, end in move.lps])
    after = spread.routing.view("s").route
    assert after.version == before.version + 1
    lp = move.lps[0][0]
    assert [(str(after.partitions[span.partition]), span.fence) for span in spans(after, lp)] == [
        (str(move.place), 42),
        ("s@g3", None),
    ]
    (make,) = spread.routing.makes()
    assert (str(make.place), make.lps) == ("s@g3", move.lps)
    converge(spread)
    assert spread.routing.makes() == spread.routing.moves() == []
    route = spread.routing.view("s").route
    assert (current(route) == target(route)).all()


def test_lps_of_an_unreachable_broker_group_stay_until_it_can_be_reached(spread: MetaService):
    spread.routing.retarget("s", 4)
    converge(spread, without=["g2"])
    route = spread.routing.view("s").route
    assert {str(move.place) for move in spread.routing.moves()} == {"s@g2"}
    at_g2 = route.partitions.index(place("s@g2"))
    assert (current(route) == at_g2).sum() == LOGICAL_PARTITIONS // 2
    converge(spread)
    route = spread.routing.view("s").route
    assert (current(route) == at_g2).sum() == LOGICAL_PARTITIONS // 4


def test_fewer_partitions_leave_the_others_listed_while_they_drain(spread: MetaService):
    spread.routing.retarget("s", 1)
    converge(spread)
    assert places(spread, "s") == ["s@g1", "s@g2"]
    assert openings(spread.routing.view("s").route)[0] == ALL
    expire(spread, "s", "s@g2", 10)
    assert places(spread, "s") == ["s@g1"]
    (drop,) = spread.routing.drops()
    assert str(drop.place) == "s@g2"
    spread.routing.dropped(drop)
    # The name is free again.
    spread.routing.retarget("s", [place("s@g1"), place("s@g2")])
    converge(spread)
    assert places(spread, "s") == ["s@g1", "s@g2"]


def give_up(service: MetaService) -> Drop:
    """The order to drop ``s@g2``, which no LP leads to any more."""
    service.routing.retarget("s", [place("s@g1")])
    converge(service)
    for each in ("s@g1", "s@g2"):
        expire(service, "s", each, 10)
    (drop,) = service.routing.drops()
    return drop


def test_a_partition_that_is_made_again_gets_a_higher_version_than_the_order_to_drop_it(spread: MetaService):
    drop = give_up(spread)
    assert drop.version == spread.routing.view("s").route.version
    spread.routing.dropped(drop)
    spread.routing.retarget("s", [place("s@g1"), place("s@g2")])
    (make,) = spread.routing.makes()
    assert (make.place, make.version > drop.version) == (drop.place, True)


def test_a_late_answer_to_an_earlier_drop_is_ignored(spread: MetaService):
    late = give_up(spread)
    spread.routing.dropped(late)
    spread.routing.retarget("s", [place("s@g1"), place("s@g2")])
    converge(spread)
    drop = give_up(spread)
    spread.routing.dropped(late)
    assert spread.routing.drops() == [drop]
    spread.routing.dropped(drop)
    assert spread.routing.drops() == []


def test_a_draining_partition_is_reused_before_another_is_made(spread: MetaService):
    spread.routing.retarget("s", 1)
    converge(spread)
    spread.brokers.wish("g3", "R")
    spread.routing.retarget("s", 2)
    converge(spread)
    assert places(spread, "s") == ["s@g1", "s@g2"]


def test_partitions_can_be_named(spread: MetaService):
    spread.routing.retarget("s", [place("s@g1"), place("other@g3")])
    converge(spread)
    assert places(spread, "s") == ["s@g1", "s@g2", "other@g3"]
    with pytest.raises(InvalidArgument, match="no broker group 'g9'"):
        spread.routing.retarget("s", [place("s@g9")])
    with pytest.raises(InvalidArgument, match="named twice"):
        spread.routing.retarget("s", [place("s@g1"), place("s@g1")])
    with pytest.raises(InvalidArgument, match="1025 partitions"):
        spread.routing.retarget("s", 1025)


def test_a_partition_of_another_subject_is_refused(spread: MetaService):
    spread.subjects.create("t", groups=["g3"])
    with pytest.raises(InvalidArgument, match="t@g3 belongs to subject 't'"):
        spread.routing.retarget("s", [place("s@g1"), place("t@g3")])


def test_without_a_broker_no_partition_is_added(spread: MetaService):
    for group in ("g1", "g2", "g3"):
        spread.brokers.wish(group, "R")
    with pytest.raises(NoBroker, match="more partitions of subject 's'"):
        spread.routing.retarget("s", 3)
    spread.routing.retarget("s", 1)


def test_a_repeated_or_late_report_changes_nothing(spread: MetaService):
    spread.routing.retarget("s", 3)
    spread.routing.made(spread.routing.makes()[0])
    move = spread.routing.moves()[0]
    fences = [(first, end, 42) for first, end in move.lps]
    spread.routing.sealed(move, fences)
    version = spread.routing.view("s").route.version
    spread.routing.sealed(move, fences)
    assert spread.routing.view("s").route.version == version
    (make,) = spread.routing.makes()
    spread.subjects.delete("s")
    spread.routing.sealed(move, fences)
    spread.routing.made(make)
    assert subject_names(spread) == []
    assert len(spread.routing.drops()) == 3


def test_a_subject_can_have_a_thousand_partitions(spread: MetaService):
    spread.routing.retarget("s", LOGICAL_PARTITIONS)
    assert len(spread.routing.makes()) == LOGICAL_PARTITIONS - 2
    route = spread.routing.view("s").route
    assert sorted(target(route).tolist()) == list(range(LOGICAL_PARTITIONS))
    assert not lp_set(openings(route)[5]).any()
