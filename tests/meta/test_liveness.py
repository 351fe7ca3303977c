"""Liveness: counters and the observer's own clock decide which members are alive."""

from __future__ import annotations

import math

from plait.meta.members.liveness import Liveness


def test_a_noticed_member_lives_for_one_lease():
    liveness = Liveness(5.0)
    liveness.notice("a")
    liveness.advance(4.9)
    assert liveness.lives("a")
    assert liveness.is_certain("a")
    liveness.advance(0.1)
    assert not liveness.lives("a")
    assert not liveness.is_certain("a")
    assert liveness.lost(10) == ["a"]


def test_a_changed_counter_is_a_sign_of_life():
    liveness = Liveness(5.0)
    liveness.expect("a")
    liveness.observe("a", 7)
    assert liveness.lives("a")
    assert not liveness.is_certain("a")
    liveness.advance(4.0)
    liveness.observe("a", 8)
    liveness.advance(4.0)
    assert liveness.is_certain("a")
    liveness.observe("a", 8)
    liveness.advance(1.0)
    assert not liveness.lives("a")
    assert liveness.count("a") == 8


def test_a_counter_that_only_the_observer_raised_is_no_sign_of_life():
    liveness = Liveness(5.0)
    liveness.expect("a")
    liveness.observe("a", 7)
    liveness.advance(5.0)
    liveness.raised("a")
    liveness.raised("a")
    assert liveness.count("a") == 9
    liveness.observe("a", 9)
    assert not liveness.lives("a")
    liveness.raised("a")
    liveness.observe("a", 11)
    assert liveness.lives("a")


def test_a_counter_that_restarts_is_a_sign_of_life():
    liveness = Liveness(5.0)
    liveness.expect("a")
    liveness.observe("a", 7)
    liveness.advance(5.0)
    liveness.observe("a", 1)
    assert liveness.lives("a")


def test_an_expected_member_has_one_lease_to_appear():
    liveness = Liveness(5.0)
    liveness.advance(100.0)
    liveness.expect("a")
    liveness.advance(3.0)
    liveness.expect("a")
    assert liveness.lives("a")
    liveness.advance(2.0)
    assert liveness.lost(10) == ["a"]


def test_lost_members_are_listed_longest_silent_first_and_page_by_page():
    liveness = Liveness(5.0)
    for name in "cab":
        liveness.notice(name)
        liveness.advance(1.0)
    liveness.notice("c")
    liveness.advance(5.0)
    assert liveness.lost(10) == ["a", "b", "c"]
    assert liveness.lost(2) == ["a", "b"]


def test_the_time_until_the_next_loss_is_known():
    liveness = Liveness(5.0)
    assert liveness.next_loss == math.inf
    liveness.notice("a")
    liveness.advance(2.0)
    liveness.notice("b")
    assert liveness.next_loss == 3.0
    liveness.notice("a")
    assert liveness.next_loss == 5.0
    liveness.advance(9.0)
    assert liveness.next_loss == 0.0


def test_a_forgotten_member_is_not_lost():
    liveness = Liveness(5.0)
    liveness.notice("a")
    liveness.observe("a", 3)
    liveness.forget("a")
    liveness.advance(9.0)
    assert liveness.lost(10) == []
    assert "a" not in liveness
    assert liveness.count("a") is None
    assert not liveness.lives("a")
