"""The retry policy: the delay before each attempt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.model.retry_policy import GRAIN, WAIT_SECONDS_MAX, due_time

SHARES = st.floats(0, 1)


def test_waits_double_from_a_second_to_ten_minutes_by_default():
    policy = plait.Retry()
    assert [policy.wait(attempt, 0.0) for attempt in range(1, 13)] == [
        *(2.0**n for n in range(10)),
        600.0,
        600.0,
    ]
    assert policy.wait(1, 1.0) == 1.2
    assert policy.wait(100_000, 1.0) == 720.0


@given(st.integers(1, 10**9), SHARES, st.floats(0, 1e6), st.floats(1, 1e3), st.floats(0, 1e6), SHARES)
def test_a_wait_is_never_longer_than_the_longest_and_its_jitter(
    attempt: int, chance: float, first: float, factor: float, longest: float, jitter: float
):
    policy = plait.Retry(first=first, factor=factor, longest=longest, jitter=jitter)
    assert 0 <= policy.wait(attempt, chance) <= longest * (1 + jitter) * (1 + 1e-9)
    assert policy.wait(attempt, 0.0) <= policy.wait(attempt + 1, 0.0)


@pytest.mark.parametrize("factor", [1.01, 1.05, 1.1, 3, 65_536, 1e6, 1e7])
def test_a_wait_reaches_the_longest_whatever_the_factor(factor: float):
    policy = plait.Retry(first=1, factor=factor, longest=600, jitter=0)
    waits = [policy.wait(attempt, 0.0) for attempt in range(1, 1000)]
    assert waits[1] == pytest.approx(min(factor, 600))
    assert waits[-1] == 600


def test_steps_may_be_a_list():
    assert plait.Retry(steps=[1, 5]) == plait.Retry(steps=(1, 5))  # type: ignore[arg-type]


def test_the_presets():
    assert [plait.Retry.constant(5).wait(attempt, 0.9) for attempt in (1, 2, 50)] == [5.0, 5.0, 5.0]
    table = plait.Retry.rocketmq()
    waits = [table.wait(attempt, 0.5) for attempt in range(1, 18)]
    assert waits[:3] == [10.0, 30.0, 60.0]
    assert waits[13:] == [1800.0, 3600.0, 7200.0, 7200.0]
    custom = plait.Retry(steps=(1, 5), jitter=0)
    assert [custom.wait(attempt, 0.0) for attempt in (1, 2, 3)] == [1, 5, 5]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"first": -1}, "first is -1"),
        ({"first": "1s"}, "first is '1s'"),
        ({"longest": float("inf")}, "longest is inf"),
        ({"first": float("nan")}, "first is nan"),
        ({"factor": 0.5}, "factor is 0.5; waits must not become shorter"),
        ({"jitter": 2}, "jitter is 2; it is a share"),
        ({"jitter": True}, "jitter is True"),
        ({"steps": (1, -1)}, "a step is -1"),
        ({"steps": (1,) * 65}, "65 steps are over the limit of 64"),
        ({"steps": 5}, "steps are 5; use a tuple of seconds"),
        ({"longest": WAIT_SECONDS_MAX + 1}, "longest is"),
        ({"attempts": 0}, "attempts is 0; use 1 to 65535, or None"),
        ({"attempts": 2.5}, "attempts is 2.5"),
        ({"attempts": True}, "attempts is True"),
        ({"expires": 0}, "expires is 0; use seconds, above 0"),
        ({"expires": float("nan")}, "expires is nan"),
        ({"expires": "1h"}, "expires is '1h'"),
    ],
)
def test_an_invalid_policy_is_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(plait.InvalidArgument, match=reason):
        plait.Retry(**settings)


def test_a_policy_is_printed_as_text():
    assert str(plait.Retry()) == "1 s, then 2 times as long each time, at most 600 s, up to 20% longer, 16 attempts"
    assert str(plait.Retry.constant(5, attempts=None)) == "5 s"
    assert str(plait.Retry.constant(5, attempts=3, expires=60)) == "5 s, 3 attempts, within 60 s"


@given(st.integers(0, 2**53), st.floats(0.000_001, WAIT_SECONDS_MAX))
def test_a_wait_is_rounded_up_and_never_shorter(now: int, seconds: float):
    due = due_time(now, seconds)
    micros = round(seconds * 1_000_000)
    assert 0 <= due - now - micros <= micros // GRAIN


def test_no_wait_is_no_due_time():
    assert due_time(5, 0.0) == 0
