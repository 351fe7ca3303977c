"""Broker groups that are slow or fail are avoided for a time."""

from __future__ import annotations

import pytest

from plait.client.send.producer import FAILURE_SECONDS, SLOW, GroupHealth

FIRST_LIMIT, FIRST_PAUSE = SLOW[0]


def test_an_unknown_broker_group_is_not_avoided() -> None:
    assert GroupHealth().avoided_until("g") == 0.0


def test_one_slow_answer_among_fast_ones_is_ignored() -> None:
    health = GroupHealth()
    for moment in range(10):
        health.answered("g", 0.001, float(moment))
    health.answered("g", 1.5 * FIRST_LIMIT, 10.0)
    assert health.avoided_until("g") == 0.0


@pytest.mark.parametrize(("limit", "pause"), SLOW)
def test_slower_answers_in_a_row_are_avoided_for_longer(limit: float, pause: float) -> None:
    health = GroupHealth()
    for _ in range(40):
        health.answered("g", limit, 100.0)
    health.answered("g", limit * 1.01, 100.0)
    assert health.avoided_until("g") == 100.0 + pause
    assert health.avoided_until("other") == 0.0


def test_a_failure_counts_as_a_slow_answer() -> None:
    health = GroupHealth()
    health.answered("g", 0.001, 0.0)
    health.failed("g", 1.0)
    assert health.seconds("g") == FAILURE_SECONDS
    assert health.avoided_until("g") == 1.0 + dict(SLOW)[FAILURE_SECONDS]


def test_one_good_answer_after_the_pause_ends_the_avoidance() -> None:
    health = GroupHealth()
    health.failed("g", 0.0)
    over = health.avoided_until("g")
    health.answered("g", 0.001, over)
    assert (health.seconds("g"), health.avoided_until("g")) == (0.001, 0.0)


def test_good_answers_to_keyed_rows_end_the_avoidance_early() -> None:
    health = GroupHealth()
    health.failed("g", 0.0)
    changes = health.changes
    answers = 0
    while health.avoided_until("g"):
        health.answered("g", 0.001, 0.1)
        answers += 1
    assert 3 < answers < 20
    assert health.changes > changes
