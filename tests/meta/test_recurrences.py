"""Recurrences in the meta database: what is refused, catching up, pauses, and two meta servers over one database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from plait.clock import ManualClock
from plait.errors import InvalidArgument, LimitExceeded, RecurrenceExists, RecurrenceNotFound, SubjectNotFound, TooLarge
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import CATCH_UP_MAX, RECURRENCE_BODY_MAX, MetaLimits
from plait.meta.recurring.firings import PAGE, Firings, PendingFrame
from plait.meta.service import MetaService
from plait.model.route import PartitionId
from plait.wire.admin.cluster import PartitionProgress
from plait.wire.admin.recurrences import CreateRecurrence, ListRecurrences, PreviewFirings, SetRecurrence
from tests.meta.support import Stores, converge, places, progress

SECOND = 1_000_000


@pytest.fixture
def ready(subject: MetaService) -> MetaService:
    """A meta server with the subject s, whose partition exists."""
    converge(subject)
    return subject


def wanted(name: str = "r", **fields: Any) -> CreateRecurrence:
    given = {"body": b"x"} | ({"every": 10.0} if "cron" not in fields else {}) | fields
    return CreateRecurrence(name, "s", **given)


def fire(service: MetaService) -> list[PendingFrame]:
    """Decide everything that is due, and confirm it."""
    frames = []
    while True:
        decided = service.firings.decide()
        frames += decided.frames
        service.firings.confirm(decided.frames)
        if not decided.frames and not decided.more:
            return frames


def fired(frames: list[PendingFrame]) -> list[tuple[str, int, int]]:
    """(recurrence, number, due time) of each firing."""
    found = []
    for frame in frames:
        for headers in FrameView(frame.frame).verify().binary(Column.HEADERS).to_pylist():
            values = msgspec.msgpack.decode(headers)
            found.append((values["plait-recurrence"], values["plait-firing"], values["plait-due"]))
    return found


def test_a_recurrence_is_created_once_and_listed(ready: MetaService, clock: ManualClock) -> None:
    recurrences = ready.recurrences
    made = recurrences.create(wanted(key="k", tags=["t"], headers={"n": 1}))
    assert (made.next, made.firings, made.last) == (clock.now() + 10 * SECOND, 0, None)
    clock.advance(1.0)
    assert recurrences.create(wanted(key="k", tags=["t"], headers={"n": 1})) == made
    with pytest.raises(RecurrenceExists, match="another definition"):
        recurrences.create(wanted(body=b"y"))
    with pytest.raises(SubjectNotFound):
        recurrences.create(CreateRecurrence("q", "missing", b"", every=1.0))
    for number in range(5):
        recurrences.create(wanted(f"r{number}"))
    page = recurrences.page(ListRecurrences(limit=4))
    rest = recurrences.page(ListRecurrences(after=page.next or "", limit=4))
    assert [row.name for row in page.rows + rest.rows] == ["r", "r0", "r1", "r2", "r3", "r4"]
    assert rest.next is None
    assert recurrences.page(ListRecurrences(subject="t")).rows == []


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"every": None}, InvalidArgument, "give cron or every"),
        ({"cron": "* * * * *", "every": 1.0}, InvalidArgument, "give cron or every"),
        ({"every": 0.5}, InvalidArgument, "0.5 seconds"),
        ({"every": float("nan")}, InvalidArgument, "nan seconds"),
        ({"every": 1e9}, InvalidArgument, "366 days"),
        ({"zone": "Europe/Berlin"}, InvalidArgument, "cron expression only"),
        ({"cron": "0 0 */29 2 WED#5"}, InvalidArgument, "matches no time"),
        ({"body": b"x" * (RECURRENCE_BODY_MAX + 1)}, TooLarge, "16385 bytes"),
        ({"headers": {"plait-due": 1}}, InvalidArgument, "'plait-due'"),
        ({"headers": {"a": "x" * 5_000}}, TooLarge, "4096"),
        ({"headers": {"a": 1 << 70}}, InvalidArgument, "64 bits"),
        ({"key": ""}, InvalidArgument, "1 to 1024 bytes"),
        ({"tags": ["a\n"]}, InvalidArgument, "tag"),
        ({"tags": ["a"] * 17}, InvalidArgument, "17 tags"),
        ({"name": "a b"}, InvalidArgument, "recurrence name"),
    ],
)
def test_a_wrong_definition_is_refused(
    ready: MetaService, fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ready.recurrences.create(wanted(**fields))
    assert ready.recurrences.page(ListRecurrences()).rows == []


def test_the_number_of_recurrences_is_limited(stores: Stores, clock: ManualClock) -> None:
    service = MetaService(stores(), clock, MetaLimits(recurrences=2))
    service.register_broker("g1", "b1", "plait://b1:1")
    service.subjects.create("s")
    service.recurrences.create(wanted("a"))
    service.recurrences.create(wanted("b"))
    with pytest.raises(LimitExceeded, match="recurrence limit"):
        service.recurrences.create(wanted("c"))


@pytest.mark.parametrize(("catch_up", "numbers"), [("one", [1]), ("all", [1, 2, 3, 4, 5, 6]), ("none", [])])
def test_missed_firings_are_made_up_for_as_the_recurrence_says(
    ready: MetaService, clock: ManualClock, catch_up: Any, numbers: list[int]
) -> None:
    begin = clock.now()
    ready.recurrences.create(wanted(catch_up=catch_up))
    clock.advance(65.0)
    found = fired(fire(ready))
    assert [(number, due) for _, number, due in found] == [(n, begin + n * 10 * SECOND) for n in numbers]
    assert ready.recurrences.describe("r").next == begin + 70 * SECOND
    clock.advance(5.0)
    assert [number for _, number, _ in fired(fire(ready))] == [len(numbers) + 1]


def test_catching_up_has_an_end(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted(every=1.0, catch_up="all"))
    clock.advance(1_000_000.0)
    assert len(fired(fire(ready))) == CATCH_UP_MAX
    assert ready.recurrences.describe("r").next == clock.now() + 1 * SECOND


def test_a_late_firing_counts_as_missed_after_a_while(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted(catch_up="none"))
    clock.advance(19.9)
    assert len(fire(ready)) == 1


def test_a_pause_is_not_made_up_for(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted(catch_up="all"))
    paused = ready.recurrences.pause("r", paused=True)
    assert (paused.paused, paused.next) == (True, None)
    clock.advance(100.5)
    assert fire(ready) == []
    assert ready.recurrences.preview(PreviewFirings("r")) == []
    resumed = ready.recurrences.pause("r", paused=False)
    assert resumed.next is not None
    assert resumed.next - clock.now() == 9_500_000
    assert ready.recurrences.preview(PreviewFirings("r", count=2)) == [resumed.next, resumed.next + 10 * SECOND]


def test_a_clock_that_is_set_back_repeats_no_firing(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted())
    clock.advance(10.0)
    [(_, _, due)] = fired(fire(ready))
    clock.jump(-3_600.0)
    assert fire(ready) == []
    for change in (
        lambda: ready.recurrences.pause("r", paused=True),
        lambda: ready.recurrences.pause("r", paused=False),
        lambda: ready.recurrences.set(SetRecurrence("r", every=2.0)),
        lambda: ready.recurrences.set(SetRecurrence("r", cron="* * * * *")),
    ):
        row = change()
        assert row.next is None or row.next > due


def test_a_change_keeps_the_rest(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted(key="k", tags=["t"], headers={"n": 1}))
    changed = ready.recurrences.set(SetRecurrence("r", cron="30 2 * * *", zone="Asia/Tokyo"))
    assert (changed.cron, changed.zone, changed.every, changed.key, changed.tags) == (
        "30 2 * * *",
        "Asia/Tokyo",
        None,
        "k",
        ["t"],
    )
    back = ready.recurrences.set(SetRecurrence("r", every=5.0, key=None))
    assert (back.cron, back.zone, back.every, back.key) == (None, "UTC", 5.0, None)
    assert back.next == clock.now() + 5 * SECOND
    clock.advance(1.0)
    assert ready.recurrences.set(SetRecurrence("r", body=b"new")).next == back.next
    for wrong in ({"zone": "Asia/Tokyo"}, {"cron": "* * * * *", "every": 1.0}, {"cron": "x"}):
        with pytest.raises(InvalidArgument):
            ready.recurrences.set(SetRecurrence("r", **wrong))
    with pytest.raises(RecurrenceNotFound):
        ready.recurrences.set(SetRecurrence("q", body=b""))


def test_a_removed_recurrence_sends_what_is_decided(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted())
    clock.advance(10.0)
    ready.firings.decide()
    ready.recurrences.remove("r")
    with pytest.raises(RecurrenceNotFound):
        ready.recurrences.remove("r")
    [frame] = ready.firings.pending()
    assert [number for _, number, _ in fired([frame])] == [1]


def test_a_deleted_subject_takes_its_recurrences_along(ready: MetaService, clock: ManualClock) -> None:
    ready.recurrences.create(wanted())
    clock.advance(10.0)
    ready.firings.decide()
    ready.subjects.delete("s")
    assert ready.recurrences.page(ListRecurrences()).rows == []
    assert ready.firings.pending() == []


def test_a_partition_gets_one_frame_at_a_time(ready: MetaService, clock: ManualClock) -> None:
    for number in range(2 * PAGE):
        ready.recurrences.create(wanted(f"r{number}"))
    clock.advance(10.0)
    first = ready.firings.decide()
    assert (len(first.frames), first.more) == (1, True)
    assert ready.firings.decide().frames == []
    ready.firings.confirm(first.frames)
    rest = fire(ready)
    assert len(fired(first.frames + rest)) == 2 * PAGE
    # The next frame of a process follows the one before.
    second = FrameView(rest[0].frame)
    assert (rest[0].producer, second.first, second.previous) == (first.frames[0].producer, PAGE + 1, PAGE)


def test_an_unavailable_broker_delays_no_other_subject(spread: MetaService, clock: ManualClock) -> None:
    spread.subjects.create("t", groups=["g3"])
    converge(spread)
    for number in range(PAGE + 5):
        spread.recurrences.create(wanted(f"a{number}"))
    spread.recurrences.create(CreateRecurrence("z", "t", b"", every=11.0))
    for group in ("g1", "g2"):
        spread.brokers.wish(group, "R")
    clock.advance(20.0)
    assert [name for name, _, _ in fired(fire(spread))] == ["z"]
    spread.brokers.wish("g2", "RW")
    assert len(fired(fire(spread))) == PAGE + 5


def test_a_refused_frame_follows_the_route(spread: MetaService, clock: ManualClock) -> None:
    for key in ("k1", "k2", "k3", None):
        spread.recurrences.create(wanted(f"r-{key}", key=key))
    clock.advance(10.0)
    frames = spread.firings.decide().frames
    before = sorted(fired(frames))
    assert spread.firings.reroute(frames[0]) == [], "the route has not changed"
    spread.routing.retarget("s", [PartitionId("s", "g3")])
    converge(spread)
    for frame in frames:
        spread.firings.reroute(frame)
    moved = spread.firings.pending()
    assert {str(frame.place) for frame in moved} == {"s@g3"}
    assert sorted(fired(moved)) == before
    assert len({frame.producer for frame in moved}) == len(frames)
    assert [spread.firings.reroute(frame) for frame in frames] == [[] for _ in frames], "each is replaced once"


def test_a_partition_with_unconfirmed_firings_is_not_retired(spread: MetaService, clock: ManualClock) -> None:
    spread.recurrences.create(wanted())
    clock.advance(10.0)
    [frame] = spread.firings.decide().frames
    other = next(name for name in places(spread, "s") if name != str(frame.place))
    spread.routing.retarget("s", [PartitionId(*other.split("@"))])
    converge(spread)
    report = PartitionProgress(frame.place.name, "s", 1 << 60, gone_below=1_000)
    progress(spread, frame.place.group, report)
    assert str(frame.place) in places(spread, "s")
    spread.firings.confirm([frame])
    progress(spread, frame.place.group, report)
    assert places(spread, "s") == [other]


def test_firings_of_a_broker_group_that_was_removed_go_elsewhere(spread: MetaService, clock: ManualClock) -> None:
    spread.recurrences.create(wanted())
    clock.advance(10.0)
    [frame] = spread.firings.decide().frames
    group = frame.place.group
    assert spread.brokers.heartbeat(group, "b1" if group == "g1" else f"{group}-1", "NRW")
    spread.retiring.forget(group, lost=True)
    [moved] = spread.firings.pending()
    assert moved.place.group != group
    assert fired([moved]) == fired([frame])


def test_a_process_that_starts_again_uses_another_producer(
    ready: MetaService, stores: Stores, clock: ManualClock
) -> None:
    """Its database may be an older copy, whose numbers would repeat."""
    ready.recurrences.create(wanted())
    clock.advance(10.0)
    [first] = fire(ready)
    again = MetaService(stores(), clock, MetaLimits())
    clock.advance(10.0)
    [second] = fire(again)
    assert first.producer != second.producer
    assert FrameView(second.frame).previous == 0


def test_two_meta_servers_decide_each_firing_once(stores: Stores, clock: ManualClock, service: MetaService) -> None:
    other = MetaService(stores(), clock, MetaLimits())
    for number in range(4):
        service.subjects.create(f"s{number}")
    converge(service)
    for number in range(120):
        service.recurrences.create(CreateRecurrence(f"r{number}", f"s{number % 4}", b"", every=10.0))
    found: list[tuple[str, int, int]] = []

    def decide(each: MetaService) -> list[PendingFrame]:
        frames = each.firings.decide().frames
        each.firings.confirm(frames)
        return frames

    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            clock.advance(10.0)
            for _ in range(10):
                for frames in threads.map(decide, (service, other)):
                    found += fired(frames)
    assert len(found) == len(set(found)) == 360
    assert sorted(number for _, number, _ in found) == sorted([1, 2, 3] * 120)


def test_a_step_examines_only_due_recurrences(
    ready: MetaService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        ready.recurrences.create(wanted(f"r{number:03}", every=10.0 if number < 3 else 1_000.0))
    examined: list[int] = []
    due = Firings._due

    def counted(self: Firings, *arguments: Any) -> Any:
        rows = due(self, *arguments)
        examined.append(len(rows))
        return rows

    monkeypatch.setattr(Firings, "_due", counted)
    clock.advance(10.0)
    assert len(fired(ready.firings.decide().frames)) == 3
    assert examined == [3]
