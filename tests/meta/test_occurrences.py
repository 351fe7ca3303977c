"""Cron times compared with an oracle that examines every minute with zoneinfo, around changes of the clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from plait.errors import InvalidArgument
from plait.meta.recurring.occurrences import NEVER, Rule

SECOND = 1_000_000
#: Zones and days with a change of their clock: both hemispheres, shifts of half an hour and at midnight, a whole day
#: that is skipped, a change without daylight saving time.
CHANGES = [
    ("Europe/Berlin", "2025-03-30"),
    ("Europe/Berlin", "2025-10-26"),
    ("America/New_York", "2026-03-08"),
    ("America/New_York", "2026-11-01"),
    ("Australia/Sydney", "2025-10-05"),
    ("Australia/Sydney", "2026-04-05"),
    ("Australia/Lord_Howe", "2025-10-05"),
    ("Australia/Lord_Howe", "2026-04-05"),
    ("America/Santiago", "2025-09-07"),
    ("America/Santiago", "2026-04-05"),
    ("Africa/Cairo", "2025-04-25"),
    ("Africa/Cairo", "2025-10-31"),
    ("Asia/Beirut", "2025-03-30"),
    ("Pacific/Apia", "2011-12-30"),
    ("Europe/Dublin", "2025-10-26"),
    ("Africa/Casablanca", "2025-02-23"),
    ("Africa/Casablanca", "2025-04-06"),
    ("Asia/Pyongyang", "2018-05-05"),
    ("UTC", "2025-03-30"),
]


def micros(text: str, zone: str = "UTC", fold: int = 0) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()) * SECOND


def matches(values: str, value: int, low: int, high: int) -> bool:
    """Whether a cron field of numbers, ranges, steps and lists matches: written apart from the library."""
    for part in values.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first, last = map(int, span.split("-"))
        else:
            first = int(span)
            last = high if step else first
        if first <= value <= last and (value - first) % int(step or 1) == 0:
            return True
    return False


def wall_matches(cron: str, wall: datetime) -> bool:
    minute, hour, day, month, weekday = cron.split()
    days = matches(day, wall.day, 1, 31)
    weekdays = any(matches(weekday, number, 0, 7) for number in {wall.isoweekday(), wall.isoweekday() % 7})
    either = days and weekdays if day.startswith("*") or weekday.startswith("*") else days or weekdays
    return (
        matches(minute, wall.minute, 0, 59)
        and matches(hour, wall.hour, 0, 23)
        and matches(month, wall.month, 1, 12)
        and either
    )


def oracle(cron: str, zone: str, begin: datetime, end: datetime) -> Iterator[int]:
    """The firing times after ``begin``, found by examining every minute."""
    minute, hour = cron.split()[:2]
    fixed = not minute.startswith("*") and not hour.startswith("*") and zone != "UTC"
    moment = begin.replace(second=0, microsecond=0)
    before = moment.astimezone(ZoneInfo(zone))
    while moment < end:
        moment += timedelta(minutes=1)
        wall = moment.astimezone(ZoneInfo(zone))
        plain = wall.replace(tzinfo=None, fold=0)
        if fixed:
            # All wall times that the clock has passed with this minute: several after a gap, none in a repeated hour.
            passed = before.replace(tzinfo=None, fold=0) + timedelta(minutes=1)
            fires = False
            while passed <= plain and not wall.fold:
                fires = fires or wall_matches(cron, passed)
                passed += timedelta(minutes=1)
            if not wall.fold and plain <= before.replace(tzinfo=None, fold=0):
                # Repeated, although zoneinfo does not mark it: the oracle must not be used there.
                raise AssertionError(f"{zone} repeats {plain}")
        else:
            fires = wall_matches(cron, plain)
        if not wall.fold or not fixed:
            before = wall
        if fires:
            yield int(moment.timestamp()) * SECOND


def draw_cron(draw: random.Random) -> str:
    minute = draw.choice(["0", "30", "*", "*/15", "5,35", "10-20/5", "59", str(draw.randrange(60)), "0-59/20"])
    hour = draw.choice(["*", "2", "1", "0", "3", "23", "1-3", "0,2", "*/2", str(draw.randrange(24))])
    day = draw.choice(["*", "*", "*", "1-7", "30", "5,26"])
    weekday = draw.choice(["*", "*", "*", "0", "7", "1-5", "0,6"])
    return f"{minute} {hour} {day} * {weekday}"


@pytest.mark.parametrize(("zone", "day"), CHANGES)
def test_times_around_a_change_of_the_clock_agree_with_the_oracle(zone: str, day: str) -> None:
    draw = random.Random(f"{zone} {day}")
    noon = datetime.fromisoformat(day).replace(tzinfo=UTC)
    for _ in range(5):
        cron = draw_cron(draw)
        begin = noon - timedelta(hours=30, minutes=draw.randrange(600), seconds=draw.randrange(60))
        end = noon + timedelta(hours=40)
        rule, moment, found = Rule(cron, zone, None, 0), int(begin.timestamp() * SECOND), []
        while (moment := rule.after(moment)) <= end.timestamp() * SECOND:
            found.append(moment)
        assert found == list(oracle(cron, zone, begin, end)), (cron, zone, begin)


@pytest.mark.parametrize(("zone", "day"), CHANGES)
def test_the_next_time_does_not_depend_on_the_moment_of_the_question(zone: str, day: str) -> None:
    """``after`` of any moment, also in a repeated hour, is the next time of the whole list."""
    draw = random.Random(f"{zone} {day} moments")
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC) - timedelta(hours=30)
    for _ in range(3):
        cron = draw_cron(draw)
        rule = Rule(cron, zone, None, 0)
        times = list(oracle(cron, zone, begin, begin + timedelta(days=4)))
        for _ in range(20):
            moment = int((begin + timedelta(minutes=draw.randrange(60 * 70), seconds=draw.randrange(60))).timestamp())
            expected = next((each for each in times if each > moment * SECOND), None)
            if expected is not None:
                assert rule.after(moment * SECOND + draw.randrange(SECOND)) == expected, (cron, zone, moment)


def test_half_past_two_fires_once_when_the_clock_skips_or_repeats_it() -> None:
    rule = Rule("30 2 * * *", "Europe/Berlin", None, 0)
    assert rule.after(micros("2025-03-29T03:00", "Europe/Berlin")) == micros("2025-03-30T03:00", "Europe/Berlin")
    assert rule.after(micros("2025-03-30T03:00", "Europe/Berlin")) == micros("2025-03-31T02:30", "Europe/Berlin")
    first = micros("2025-10-26T02:30", "Europe/Berlin")
    assert rule.after(micros("2025-10-25T03:00", "Europe/Berlin")) == first
    assert rule.after(first) == micros("2025-10-27T02:30", "Europe/Berlin")


def test_every_hour_fires_in_both_repeated_hours() -> None:
    rule = Rule("30 * * * *", "Europe/Berlin", None, 0)
    first = micros("2025-10-26T02:30", "Europe/Berlin")
    assert rule.after(first) == micros("2025-10-26T02:30", "Europe/Berlin", fold=1) == first + 3600 * SECOND


def test_an_interval_counts_from_its_start() -> None:
    rule = Rule(None, "UTC", 7 * SECOND, 1_000)
    assert rule.after(0) == rule.after(1_000) == 1_000 + 7 * SECOND
    assert rule.after(1_000 + 7 * SECOND) == 1_000 + 14 * SECOND
    assert rule.after(1_000 + 14 * SECOND - 1) == 1_000 + 14 * SECOND


@pytest.mark.parametrize(
    "cron",
    [
        *("", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8"),
        *("a * * * *", "*/0 * * * *", "5-1 * * * *", "* * * * 1#2/2", "* * * * 1#6", "0 0 30 2 *", "٣ * * * *"),
        *("@daily", "* " * 200),
    ],
)
def test_a_wrong_expression_is_refused(cron: str) -> None:
    with pytest.raises(InvalidArgument, match="cron expression"):
        Rule(cron, "UTC", None, 0)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../../etc/passwd", "", "/etc/localtime", "Europe", "x\0y", "ü"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(InvalidArgument, match="time zone"):
        Rule("* * * * *", zone, None, 0)


def test_a_rule_without_a_further_time_ends() -> None:
    assert Rule("0 0 */29 2 WED#5", "UTC", None, 0).after(micros("2025-01-01T00:00")) == NEVER
    assert Rule("* * * * *", "UTC", None, 0).after(253_402_000_000 * SECOND) == NEVER
