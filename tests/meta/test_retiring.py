"""Finished partitions leave the routes, progress reports are stored, and a lost broker group can be given up (R26)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from plait.clock import ManualClock
from plait.errors import InvalidArgument, NoBroker
from plait.limits import LOGICAL_PARTITIONS
from plait.meta import subjects
from plait.meta.service import MetaService
from plait.model import names
from plait.model import route as routes
from plait.model.route import PartitionId
from plait.wire.admin.cluster import PartitionProgress
from plait.wire.admin.subjects import Remembered
from tests.meta.support import converge, expire, pass_time, place, places, progress


def report(
    service: MetaService, name: str, passed: dict[str, list[tuple[int, int, int]]], route: int = 1 << 60
) -> None:
    where = place(name)
    progress(service, where.group, PartitionProgress(where.name, "s", route, passed))


def span_count(service: MetaService) -> int:
    return max(len(history.spans) for history in service.routing.view("s").route.histories)


def test_histories_do_not_grow_while_retention_removes_rows(spread: MetaService) -> None:
    fence = 10
    for _ in range(12):
        for count in (1, 3):
            spread.routing.retarget("s", count)
            converge(spread, fence=fence)
            fence += 10
        for name in places(spread, "s"):
            expire(spread, "s", name, fence)
        for drop in spread.routing.drops():
            spread.routing.dropped(drop)
    assert span_count(spread) == 1
    assert len(places(spread, "s")) == 3


def test_a_span_stays_while_an_older_span_of_another_partition_has_rows(spread: MetaService) -> None:
    spread.routing.retarget("s", [place("s@g2")])
    converge(spread, fence=10)
    spread.routing.retarget("s", [place("s@g3")])
    converge(spread, fence=20)
    expire(spread, "s", "s@g2", 20)
    # Half of the LPs were at g1 before, and g1 reports nothing.
    assert span_count(spread) == 3
    expire(spread, "s", "s@g1", 10)
    assert span_count(spread) == 1
    assert places(spread, "s") == ["s@g3"]


def test_a_partition_that_was_sealed_empty_leaves_the_route(spread: MetaService) -> None:
    spread.routing.retarget("s", [place("s@g1")])
    converge(spread, fence=0)
    assert places(spread, "s") == ["s@g1", "s@g2"]
    # The partition may still have other work, such as delayed messages.
    expire(spread, "s", "s@g2", -1)
    assert places(spread, "s") == ["s@g1", "s@g2"]
    expire(spread, "s", "s@g2", 0)
    assert places(spread, "s") == ["s@g1"]
    assert span_count(spread) == 1


def test_a_route_includes_what_each_group_has_finished(spread: MetaService) -> None:
    spread.routing.retarget("s", [place("s@g1")])
    converge(spread, fence=10)
    assert (spread.routing.view("s").passed, spread.routing.view("s").reported) == ({}, [])
    report(spread, "s@g2", {"a": [(512, 1024, 10)], "b": []})
    found = spread.routing.view("s")
    index = found.route.partitions.index(place("s@g2"))
    assert (found.passed, found.reported) == ({"a": [(index, 512, 1024, 10)], "b": []}, [index])
    # The newest report counts: a group may be unfinished again after dead letters were resent.
    report(spread, "s@g2", {"a": [], "b": []})
    assert spread.routing.view("s").passed == {"a": [], "b": []}


def test_a_report_of_an_earlier_partition_of_the_same_name_is_ignored(spread: MetaService) -> None:
    old = spread.routing.view("s").route.version
    spread.routing.retarget("s", [place("s@g1")])
    converge(spread, fence=10)
    expire(spread, "s", "s@g2", 10)
    (drop,) = spread.routing.drops()
    report(spread, "s@g2", {"a": [(0, 1024, 10)]})
    spread.routing.dropped(drop)
    spread.routing.retarget("s", [place("s@g1"), place("s@g2")])
    report(spread, "s@g2", {"a": [(0, 1024, 10)]})
    assert spread.routing.view("s").passed == {}
    converge(spread, fence=20)
    report(spread, "s@g2", {"a": [(0, 1024, 10)]}, route=old)
    assert spread.routing.view("s").passed == {}


def test_an_unknown_broker_has_to_register(spread: MetaService) -> None:
    assert not spread.retiring.report("g9", "g9-1", [])


# --- giving up ------------------------------------------------------------------------------------


def lose(service: MetaService, clock: ManualClock, *groups: str) -> None:
    """For a while only the brokers of these groups send heartbeats."""
    alive = [(each.group, each.broker) for each in service.brokers.views() if each.group in groups]
    for _ in range(10):
        for group, broker in alive:
            assert service.brokers.heartbeat(group, broker, "RW")
        pass_time(clock, 1, service)


def test_a_live_broker_group_is_not_given_up(spread: MetaService, clock: ManualClock) -> None:
    with pytest.raises(InvalidArgument, match="'g2' is alive; stop its broker first"):
        spread.retiring.forget("g2", lost=True)
    with pytest.raises(InvalidArgument, match="no broker group 'g9'; there are g1, g2, g3"):
        spread.retiring.forget("g9")
    lose(spread, clock, "g1", "g3")
    assert [each.partition for each in spread.retiring.forget("g2", lost=True)] == ["s@g2"]
    assert [broker.group for broker in spread.brokers.views()] == ["g1", "g3"]
    # No broker is left to receive an order to drop.
    assert spread.routing.drops() == []
    converge(spread)
    assert places(spread, "s") == ["s@g1"]
    # The broker group is no longer known.
    with pytest.raises(InvalidArgument, match="there is no broker group 'g2'; there are g1, g3"):
        spread.retiring.forget("g2")
    with pytest.raises(InvalidArgument, match="no broker group 'g2'"):
        spread.routing.retarget("s", [place("s@g1"), place("s#1@g2")])
    assert places(spread, "s") == ["s@g1"]


def test_giving_up_names_what_would_be_lost_first(spread: MetaService, clock: ManualClock) -> None:
    spread.routing.retarget("s", [place("s@g1")])
    converge(spread, fence=10)
    lose(spread, clock, "g1", "g3")
    with pytest.raises(InvalidArgument, match=r"s@g2: group \(not reported\) has not finished 512 .*--lost"):
        spread.retiring.forget("g2")
    report(spread, "s@g2", {"done": [(512, 1024, 10)], "slow": [(600, 1024, 10)]})
    with pytest.raises(InvalidArgument, match="s@g2: group slow has not finished 88 sealed ones"):
        spread.retiring.forget("g2")
    report(spread, "s@g2", {"done": [(512, 1024, 10)], "slow": [(512, 1024, 10)]})
    assert spread.retiring.forget("g2") == []


def test_without_another_broker_group_none_can_be_given_up(service: MetaService, clock: ManualClock) -> None:
    service.subjects.create("s", groups=["g1"])
    converge(service)
    lose(service, clock)
    with pytest.raises(NoBroker, match="no other broker group is available for subject 's'"):
        service.retiring.forget("g1", lost=True)
    assert places(service, "s") == ["s@g1"]


@pytest.mark.parametrize("number", range(20))
def test_a_route_without_a_broker_group_moves_every_lp_to_another(number: int, seed: int) -> None:
    draw = random.Random(seed + number)
    listed = [PartitionId("s", f"g{n}") for n in range(4)]
    route = routes.default_route("s", listed[:2])
    fence = 1
    for _ in range(draw.randrange(6)):
        route = routes.retarget(route, draw.sample(listed, draw.randrange(1, 5)))
        for index, lps in routes.moves(route):
            if draw.random() < 0.7:
                route = routes.sealed(route, route.version, index, [(first, end, fence) for first, end in lps])
                fence += 1
    rest = [each for each in listed if each.group != "g0"]
    after = routes.give_up(route, "g0", draw.sample(rest, draw.randrange(1, 4)))
    assert after.histories[0].first == 0
    assert sum(history.end - history.first for history in after.histories) == LOGICAL_PARTITIONS
    assert all(each.group != "g0" for each in after.partitions)
    for lp in range(0, LOGICAL_PARTITIONS, 37):
        before = [route.partitions[span.partition] for span in routes.spans(route, lp)]
        now = [after.partitions[span.partition] for span in routes.spans(after, lp)]
        kept = [each for each in before if each.group != "g0"]
        assert now[: len(kept)] == kept
        assert len(now) == len(kept) + (before[-1].group == "g0")
        assert routes.spans(after, lp)[-1].fence is None
    shares = np.bincount(routes.target(after), minlength=len(after.partitions))
    assert shares[shares > 0].max() - shares[shares > 0].min() <= 1
    # Later changes continue from this route.
    for index, lps in routes.moves(after):
        after = routes.sealed(after, after.version, index, [(first, end, fence) for first, end in lps])
    assert routes.moves(after) == []


# --- groups of retired partitions ----------------------------------------------------------------


def knows(service: MetaService, name: str, began: dict[str, int], below: int = 0) -> None:
    """The broker of a partition reports its groups, and that rows below a sequence have expired."""
    where = place(name)
    progress(service, where.group, PartitionProgress(where.name, "s", 1 << 60, {}, below, began))


def leave(service: MetaService, name: str, began: dict[str, int]) -> None:
    """A partition with groups leaves the route."""
    others = [place(each) for each in places(service, "s") if each != name]
    service.routing.retarget("s", others)
    converge(service, fence=10)
    knows(service, name, began, 10)
    assert name not in places(service, "s")


def test_the_groups_of_a_retired_partition_are_remembered_until_they_are_deleted(spread: MetaService) -> None:
    version = spread.routing.view("s").route.version
    leave(spread, "s@g2", {"a": version, "b": version + 1})
    assert [spread.retiring.remembered("s", name).began for name in "abc"] == [version, version + 1, None]
    assert spread.retiring.remembered("s", "a").version == spread.routing.view("s").route.version
    assert spread.forget_group("s", "a")
    assert not spread.forget_group("s", "a")
    assert [spread.retiring.remembered("s", name).began for name in "abc"] == [None, version + 1, None]
    assert spread.retiring.remembered("t", "b") == Remembered(0, None)
    spread.subjects.delete("s")
    assert spread.retiring.remembered("s", "b") == Remembered(0, None)
    spread.subjects.create("s")
    assert spread.retiring.remembered("s", "b").began is None


def test_a_group_that_is_deleted_before_its_partition_retires_is_not_remembered(spread: MetaService) -> None:
    spread.routing.retarget("s", [place("s@g1")])
    converge(spread, fence=10)
    spread.routing.retarget("s", [place("s@g3")])
    converge(spread, fence=20)
    # Older rows of other keys have not expired, so the partition stays.
    knows(spread, "s@g1", {"a": 1, "b": 1}, 20)
    assert not spread.forget_group("s", "a")
    knows(spread, "s@g2", {}, 10)
    assert places(spread, "s") == ["s@g3"]
    assert [spread.retiring.remembered("s", name).began for name in "ab"] == [None, 1]


def test_the_groups_of_an_emptied_partition_are_known_without_its_broker(spread: MetaService) -> None:
    spread.routing.retarget("s", [place("s@g1")])
    converge(spread, fence=10)
    # Its rows stay, so the partition stays in the route.
    knows(spread, "s@g2", {"a": 2, "b": 1}, 0)
    assert "s@g2" in places(spread, "s")
    assert [spread.retiring.remembered("s", name).began for name in "abc"] == [2, 1, None]
    assert not spread.forget_group("s", "a")
    assert [spread.retiring.remembered("s", name).began for name in "ab"] == [None, 1]


def test_the_groups_of_a_broker_group_that_is_given_up_are_remembered(spread: MetaService, clock: ManualClock) -> None:
    knows(spread, "s@g2", {"a": 3})
    lose(spread, clock, "g1", "g3")
    spread.retiring.forget("g2", lost=True)
    assert spread.retiring.remembered("s", "a").began == 3


def test_beyond_the_limit_broadcast_groups_are_forgotten_first_then_the_oldest(
    spread: MetaService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subjects, "REMEMBERED_GROUPS_MAX", 3)
    screens = [names.of_group(None, client) for client in ("c1", "c2")]
    leave(spread, "s@g2", dict.fromkeys([screens[0], "a", screens[1]], 1))
    assert caplog.text == ""
    spread.routing.retarget("s", [place("s@g3")])
    converge(spread, fence=20)
    knows(spread, "s@g1", {"b": 1}, 20)
    assert [spread.retiring.remembered("s", name).began for name in ("a", "b", *screens)] == [1, 1, None, 1]
    assert "subject s: its retired partitions knew 4 groups; 3 are remembered" in caplog.text
    spread.routing.retarget("s", [place("s#1@g1")])
    converge(spread, fence=30)
    knows(spread, "s@g3", {"c": 1, "d": 1}, 30)
    assert [spread.retiring.remembered("s", name).began for name in ("a", "b", "c", "d", *screens)] == [
        None,
        1,
        1,
        1,
        None,
        None,
    ]
