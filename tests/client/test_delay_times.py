"""Conversion of a delay, a level or a time to the microsecond at which a message is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.client.arguments import micros_of, moment_of, start_of, to_datetime
from plait.client.send.encoding import due_of, dues_of
from plait.limits import DELAY_SECONDS_MAX, DELAY_SECONDS_MIN

NOW = 1_700_000_000_000_000
SECOND = 1_000_000
LATER = to_datetime(NOW + 5 * SECOND)


@pytest.mark.parametrize(
    ("delay", "micros"),
    [
        (1, SECOND),
        (0.1, 100_000),
        (0.01, 10_000),
        ("10ms", 10_000),
        ("5m", 300 * SECOND),
        (timedelta(days=2, microseconds=1), 2 * 86_400 * SECOND + 1),
        (plait.DelayLevel.LEVEL_3, 10 * SECOND),
        (1.000_000_4, SECOND + 1),
        (np.int64(5), 5 * SECOND),
        (np.uint8(5), 5 * SECOND),
        (np.float32(0.5), SECOND // 2),
        (DELAY_SECONDS_MAX, 2 * 366 * 86_400 * SECOND),
    ],
)
def test_a_delay_starts_now_and_is_rounded_up(delay: Any, micros: int):
    assert due_of(delay, None, NOW) == NOW + micros


@given(st.floats(DELAY_SECONDS_MIN, DELAY_SECONDS_MAX))
def test_no_delay_is_shorter_than_requested(seconds: float):
    micros = due_of(seconds, None, NOW) - NOW
    assert 0 <= micros - seconds * SECOND + 0.001 < 1.01
    assert dues_of(np.array([seconds]), None, NOW, 1) == [NOW + micros]


@pytest.mark.parametrize(
    "delay",
    [
        *(0, 0.009, -1, "9ms", DELAY_SECONDS_MAX + 1, timedelta(days=733), float("nan"), float("inf"), "1"),
        *(10**400, 10**5000, -(10**5000), f"{'9' * 400}d", timedelta.max, True, np.bool_(True)),
        *(np.array(5.0), np.array([5]), np.timedelta64(5, "s"), [5], None, "5m" * 100),
    ],
    ids=lambda delay: repr(type(delay)),
)
def test_a_delay_outside_the_limits_is_refused(delay: Any):
    with pytest.raises(
        plait.InvalidArgument, match=r"10 ms to 732 days|must be 0 or more|is not understood|is too long"
    ) as refused:
        due_of(delay, None, NOW)
    assert len(str(refused.value)) < 200


def test_due_times_keep_their_precision():
    assert due_of(None, LATER, NOW) == NOW + 5 * SECOND
    east = LATER.astimezone(timezone(timedelta(hours=8)))
    assert due_of(None, east, NOW) == NOW + 5 * SECOND
    assert due_of(None, to_datetime(5), NOW) == 5
    assert due_of(None, datetime(1900, 1, 1, tzinfo=UTC), NOW) == 0


def test_invalid_due_times_are_refused():
    with pytest.raises(plait.InvalidArgument, match="has no time zone; add one"):
        due_of(None, datetime(2030, 1, 1), NOW)  # noqa: DTZ001 - that is the point
    with pytest.raises(plait.InvalidArgument, match="is too far ahead; use 10 ms to 732 days from now"):
        due_of(None, to_datetime(NOW + 733 * 86_400 * SECOND), NOW)
    with pytest.raises(plait.InvalidArgument, match="deliver_at 5 is a int; use a datetime"):
        due_of(None, 5, NOW)
    for one in (due_of, lambda *given: dues_of(*given, 1)):
        with pytest.raises(plait.InvalidArgument, match="give a delay or deliver_at, not both"):
            one(5, LATER, NOW)


def test_the_levels_are_those_of_rocketmq():
    seconds = [level.value.total_seconds() for level in plait.DelayLevel]
    minutes = [60.0 * minute for minute in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)]
    assert seconds == [1, 5, 10, 30, *minutes]
    assert [level.name for level in plait.DelayLevel] == [f"LEVEL_{number}" for number in range(1, 19)]


@pytest.mark.parametrize(
    "delays",
    [
        [1, "2s", timedelta(seconds=3)],
        (1, 2, 3),
        range(1, 4),
        [np.int64(1), np.float64(2), np.int16(3)],
        np.array([1, 2, 3]),
        np.array([1.0, 2.0, 3.0], np.float32),
        np.array([1, 2, 3], "timedelta64[s]"),
        np.array([1_000_000_000, 1_999_999_001, 3_000_000_000], "timedelta64[ns]"),
        pa.array([1.0, 2.0, 3.0]),
        pa.array([1, 2, 3], pa.int16()),
        pa.array([1, 2, 3], pa.duration("s")),
        pa.chunked_array([pa.array([1_000, 2_000], pa.duration("ms")), pa.array([3_000], pa.duration("ms"))]),
        pa.array([1_000_000_000, 2_000_000_000, 2_999_999_001], pa.duration("ns")),
    ],
)
def test_many_delays_are_given_in_several_forms(delays: Any):
    assert list(dues_of(delays, None, NOW, 3)) == [NOW + n * SECOND for n in (1, 2, 3)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "times",
    [
        [to_datetime(NOW + n) for n in (1, 2, 3)],
        pa.array([to_datetime(NOW + n) for n in (1, 2, 3)], pa.timestamp("us", tz="UTC")),
        pa.array([1000 * NOW + n for n in (1, 1001, 3000)], pa.timestamp("ns", tz="Europe/Berlin")),
    ],
)
def test_many_due_times_are_given_in_several_forms(times: Any):
    assert list(dues_of(None, times, NOW, 3)) == [NOW + n for n in (1, 2, 3)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("delay", "deliver_at", "message"),
    [
        ([1, 2], None, "delay has 2 values for 3 bodies"),
        ([1, None, 2], None, "row 1: duration None is not understood"),
        (np.array([1, 2, 0]), None, "row 2: a message cannot be delayed by 0; use 10 ms to 732 days"),
        (np.array([1, float("nan"), 1]), None, "row 1: a message cannot be delayed by nan"),
        (np.array([1, 1, -1], "timedelta64[s]"), None, "row 2: delay is -1 s from now; use 10 ms"),
        (np.array([1, "NaT", 1], "timedelta64[s]"), None, "row 1: delay is"),
        (np.array([1, 1, 1], "timedelta64[M]"), None, "a unit of no fixed length"),
        (np.array([True, True, True]), None, "delay is a NumPy array of bool"),
        (np.array([[1], [1], [1]]), None, "delay is a NumPy array of 2 dimensions"),
        (np.array(5.0), None, "delay is a NumPy array of 0 dimensions"),
        (b"123", None, "duration b'123' is not understood"),
        # An unchecked conversion to microseconds would overflow to 0.448 s.
        (np.array([1, 18_446_744_073_710, 1], "timedelta64[s]"), None, "row 1: delay is 1.84467e"),
        (np.array([1, 1, 213_503_982_335], "timedelta64[D]"), None, "row 2: delay is 1.84467e"),
        (np.array([1, 1, 1], "timedelta64[Y]"), None, "a unit of no fixed length"),
        (pa.array([1, None, 1]), None, "delay has null rows"),
        (pa.array(["1s"] * 3), None, "delay is an Arrow column of string"),
        (pa.array([1, 2, 1 << 62], pa.duration("s")), None, "row 2: delay is"),
        (None, [LATER, None, LATER], "row 1: deliver_at is None"),
        (None, [LATER, LATER, 5], "row 2: deliver_at 5 is a int"),
        (None, np.array(["2030-01-01"] * 3, "datetime64[us]"), "deliver_at is a NumPy array of datetime64"),
        (None, pa.array([1, 2, 3], pa.timestamp("us")), "deliver_at has no time zone"),
        (None, pa.array([1, 2, 1 << 61], pa.timestamp("us", tz="UTC")), "row 2: deliver_at is"),
    ],
)
def test_invalid_delays_are_refused_with_their_row(delay: Any, deliver_at: Any, message: str):
    with pytest.raises(plait.InvalidArgument, match=message):
        dues_of(delay, deliver_at, NOW, 3)


@given(st.integers(0, 4_000_000_000_000_000))
def test_microseconds_and_datetimes_convert_both_ways(micros: int):
    assert micros_of(to_datetime(micros), "t") == micros


def test_a_moment_is_a_duration_or_a_time():
    assert moment_of(None, "start", NOW) is None
    assert moment_of("5s", "start", NOW) == NOW + 5 * SECOND
    assert moment_of("-5s", "start", NOW) == NOW - 5 * SECOND
    assert moment_of(timedelta(seconds=-5), "start", NOW) == NOW - 5 * SECOND
    assert moment_of(5, "start", NOW) == NOW + 5 * SECOND
    assert moment_of(LATER, "start", NOW) == NOW + 5 * SECOND
    assert moment_of(LATER.isoformat(), "start", NOW) == NOW + 5 * SECOND
    assert moment_of("1970-01-01T00:00:01", "start", NOW) == SECOND
    with pytest.raises(plait.InvalidArgument, match="'soon' is not understood"):
        moment_of("soon", "start", NOW)


@pytest.mark.parametrize(
    "moment",
    [
        "-999999d",
        "999999999d",
        "-60y",
        f"{'9' * 400}d",
        timedelta.max,
        timedelta.min,
        1e300,
        10**400,
        "1896091200000000",
    ],
)
def test_moments_out_of_range_are_refused(moment: Any):
    with pytest.raises(plait.InvalidArgument, match=r"within the years 1970 to 9999|not understood|must be|too long"):
        moment_of(moment, "start", NOW)


def test_a_start_may_be_far_away():
    assert start_of("-999999d", NOW) == start_of(timedelta.max, NOW) == ["time", 0]
    assert start_of(datetime(1900, 1, 1, tzinfo=UTC), NOW) == ["time", 0]
    assert start_of(np.int64(5), NOW) == start_of("5", NOW) == ["sequence", 5]
    for wrong in (10**30, "9" * 30, "9" * 5000, np.array([1]), True, np.timedelta64(5, "s")):
        with pytest.raises(plait.InvalidArgument, match=r"is out of range|is not understood"):
            start_of(wrong, NOW)
