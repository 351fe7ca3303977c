"""Who lives is told by counters and the watcher's own time."""

from __future__ import annotations

import math

from plait.meta.members.liveness import Liveness


def test_who_is_heard_lives_for_a_lease():
    watch = Liveness(5.0)
    watch.hear("a")
    watch.advance(4.9)
    assert watch.lives("a")
    assert watch.is_certain("a")
    watch.advance(0.1)
    assert not watch.lives("a")
    assert not watch.is_certain("a")
    assert watch.lost(10) == ["a"]


def test_a_counter_with_another_value_is_a_sign_of_life():
    watch = Liveness(5.0)
    watch.expect("a")
    watch.see("a", 7)
    assert watch.lives("a")
    assert not watch.is_certain("a")
    watch.advance(4.0)
    watch.see("a", 8)
    watch.advance(4.0)
    assert watch.is_certain("a")
    watch.see("a", 8)
    watch.advance(1.0)
    assert not watch.lives("a")
    assert watch.count("a") == 8


def test_a_counter_that_the_watcher_raised_is_none_until_others_do():
    watch = Liveness(5.0)
    watch.expect("a")
    watch.see("a", 7)
    watch.advance(5.0)
    watch.raised("a")
    watch.raised("a")
    assert watch.count("a") == 9
    watch.see("a", 9)
    assert not watch.lives("a")
    watch.raised("a")
    watch.see("a", 11)
    assert watch.lives("a")


def test_a_counter_that_starts_anew_is_one_too():
    watch = Liveness(5.0)
    watch.expect("a")
    watch.see("a", 7)
    watch.advance(5.0)
    watch.see("a", 1)
    assert watch.lives("a")


def test_who_is_only_expected_has_a_lease_to_show_itself():
    watch = Liveness(5.0)
    watch.advance(100.0)
    watch.expect("a")
    watch.advance(3.0)
    watch.expect("a")
    assert watch.lives("a")
    watch.advance(2.0)
    assert watch.lost(10) == ["a"]


def test_the_lost_are_named_the_longest_silent_first_and_a_page_at_a_time():
    watch = Liveness(5.0)
    for name in "cab":
        watch.hear(name)
        watch.advance(1.0)
    watch.hear("c")
    watch.advance(5.0)
    assert watch.lost(10) == ["a", "b", "c"]
    assert watch.lost(2) == ["a", "b"]


def test_it_is_known_when_the_first_will_be_lost():
    watch = Liveness(5.0)
    assert watch.next_loss == math.inf
    watch.hear("a")
    watch.advance(2.0)
    watch.hear("b")
    assert watch.next_loss == 3.0
    watch.hear("a")
    assert watch.next_loss == 5.0
    watch.advance(9.0)
    assert watch.next_loss == 0.0


def test_who_is_forgotten_is_not_lost():
    watch = Liveness(5.0)
    watch.hear("a")
    watch.see("a", 3)
    watch.forget("a")
    watch.advance(9.0)
    assert watch.lost(10) == []
    assert "a" not in watch
    assert watch.count("a") is None
    assert not watch.lives("a")
