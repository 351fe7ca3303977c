"""The history checker: it finds each kind of violation, and accepts correct histories."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.testing.checker import Violation, check
from plait.testing.history import Handling, History, Key, Place, RecordedSend, Value


@pytest.fixture
def history() -> History:
    return History()


def sent(
    history: History, value: Value, *, key: Key = "k", at: float = 0.0, place: Place | None = None
) -> RecordedSend:
    send = history.send(key, value, at, producer="p")
    send.ok(place, at + 0.1)
    return send


def handled(history: History, value: Value, at: float, *, key: Key = "k", by: str = "c", **more: Any) -> Handling:
    """Record a successful handling of 0.5 s, and its ack."""
    handling = history.handle(by, key, value, time=at, **more)
    handling.done(at + 0.5)
    handling.ack_ok(at + 0.6)
    return handling


def kinds(history: History, strict: bool = True, **more: Any) -> list[str]:
    return [violation.kind for violation in check(history, strict, **more)]


# --- lost and invented --------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["failed", "unknown"])
def test_a_failed_or_unknown_send_need_not_be_handled(history: History, outcome: str):
    getattr(history.send("k", 1, 0.0), outcome)("gone")
    assert check(history) == []


def test_a_dead_letter_is_not_lost(history: History):
    sent(history, 1)
    sent(history, 2, at=1.0)
    history.handle("c", "k", 1, time=3.0).failed(4.0)
    history.bury(1)
    handled(history, 2, 5.0)
    assert check(history) == []


def test_each_group_has_to_handle_everything(history: History):
    sent(history, 1)
    handled(history, 1, 1.0, group="a")
    assert check(history, groups=["a"]) == []
    assert kinds(history, groups=["a", "b"]) == ["lost"]


def test_a_message_that_is_handled_before_it_is_sent_is_invented(history: History):
    handled(history, 1, 1.0)
    sent(history, 1, at=2.0)
    assert "invented" in kinds(history)


def test_a_send_with_an_unknown_outcome_may_be_handled(history: History):
    history.send("k", 1, 0.0).unknown("time-out")
    handled(history, 1, 1.0)
    assert check(history) == []


# --- places -------------------------------------------------------------------------------------


def test_after_a_route_change_only_the_places_of_one_key_follow_the_calls(history: History):
    history.send("a", 1, 0.0).ok(("s", 2), 0.1)
    history.send("b", 2, 0.2).ok(("s", 1), 0.3)
    history.send(None, 3, 0.4).ok(("s", 4), 0.5)
    history.send(None, 4, 0.6).ok(("s", 3), 0.7)
    assert check(history, drained=False, moves=True) == []
    history.send("a", 5, 0.8).ok(("s", 0), 0.9)
    assert kinds(history, drained=False, moves=True) == ["send_order"]


def test_places_of_two_partitions_have_no_order(history: History):
    sent(history, 1, place=("a", 2))
    sent(history, 2, place=("b", 1))
    assert check(history, drained=False) == []


def test_two_receipts_do_not_name_one_place(history: History):
    sent(history, 1, place=("s", 1))
    sent(history, 2, place=("s", 1))
    assert kinds(history, drained=False) == ["send_order"]


# --- order --------------------------------------------------------------------------------------


def test_a_failed_message_holds_back_its_key_only_if_order_is_strict(history: History):
    sent(history, 1)
    sent(history, 2, at=1.0)
    history.handle("c", "k", 1, time=2.0).failed(2.1)
    handled(history, 2, 3.0)
    handled(history, 1, 4.0, attempt=2)
    assert kinds(history) == ["order"]
    assert check(history, strict=False) == []


def test_best_tried_keeps_the_order_of_keys_without_a_failure(history: History):
    sent(history, 1)
    sent(history, 2, at=1.0)
    handled(history, 2, 2.0)
    handled(history, 1, 3.0)
    assert kinds(history, strict=False) == ["order"]
    assert kinds(history, ordered=False) == []


def test_other_keys_and_messages_without_one_have_no_order(history: History):
    for value, key in [(1, "a"), (2, "b"), (3, None), (4, None)]:
        sent(history, value, key=key, at=value)
    for value, key in [(4, None), (3, None), (2, "b"), (1, "a")]:
        handled(history, value, 20.0 - value, key=key)
    assert check(history) == []


def test_sends_of_two_producers_that_overlap_have_no_order(history: History):
    one = history.send("k", 1, 0.0, producer="p")
    other = history.send("k", 2, 0.5, producer="q")
    one.ok(None, 1.0)
    other.ok(None, 1.0)
    handled(history, 2, 2.0)
    handled(history, 1, 3.0)
    assert check(history) == []


def test_a_send_that_ended_before_another_producers_send_began_comes_first(history: History):
    history.send("k", 1, 0.0, producer="p").ok(None, 0.4)
    history.send("k", 2, 0.5, producer="q").ok(None, 1.0)
    handled(history, 2, 2.0)
    handled(history, 1, 3.0)
    assert kinds(history) == ["order"]


def test_a_send_with_an_unknown_outcome_is_ordered_once_it_is_handled(history: History):
    history.send("k", 1, 0.0).unknown()
    history.send("k", 2, 1.0).ok(None, 1.1)
    handled(history, 2, 2.0)
    assert check(history) == []
    handled(history, 1, 3.0)
    assert kinds(history) == ["order"]


# --- faults as excuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "found"), [(None, ["overlap"]), ({"consumer": "c"}, []), ({}, ["overlap"])], ids=["none", "one", "all"]
)
def test_only_a_fault_of_the_first_consumer_excuses_an_overlap(
    history: History, fault: dict[str, Any] | None, found: list[str]
):
    sent(history, 1)
    history.handle("c", "k", 1, time=1.0).done(5.0)
    handled(history, 1, 2.0, by="d")
    if fault is not None:
        history.broken("paused", 1.5, **fault)
    assert [kind for kind in kinds(history) if kind == "overlap"] == found


@pytest.mark.parametrize(
    ("ack", "at", "fault", "found"),
    [
        ("ok", None, {}, ["redelivered"]),
        ("unknown", None, {}, ["duplicate"]),
        (None, None, {}, ["duplicate"]),
        ("failed", None, {}, []),
        # Since the send, of both consumers or of one of them.
        ("unknown", 2.0, {}, []),
        ("unknown", 2.0, {"consumer": "c"}, []),
        ("unknown", 2.0, {"consumer": "d"}, []),
        ("unknown", 2.0, {"consumer": "e"}, ["duplicate"]),
        # Before the send, after the second handling began, and until after the send.
        ("unknown", -1.0, {}, ["duplicate"]),
        ("unknown", 3.1, {}, ["duplicate"]),
        ("unknown", -1.0, {"until": 0.5, "consumer": "c"}, []),
        # Of the broker group that has the message, or of another one.
        ("unknown", 2.0, {"at": "g1"}, []),
        ("unknown", 2.0, {"at": "g2"}, ["duplicate"]),
        ("unknown", 2.0, {"at": "g1", "consumer": "c"}, []),
        ("unknown", 2.0, {"at": "g2", "consumer": "c"}, ["duplicate"]),
        ("unknown", 2.0, {"at": "g1", "consumer": "e"}, ["duplicate"]),
        # After a confirmed ack, only if the broker forgets acks; before it, since the late ack is of no use.
        ("ok", 2.0, {}, ["redelivered"]),
        ("ok", 2.0, {"forgets": True}, []),
        ("ok", 1.2, {"consumer": "c"}, []),
    ],
)
def test_a_second_handling_needs_an_excuse(
    history: History, ack: str | None, at: float | None, fault: dict[str, Any], found: list[str]
):
    """Handled by c from 1.0 to 1.5, with this outcome of the ack at 1.6, and by d at 3.0."""
    sent(history, 1)
    first = history.handle("c", "k", 1, place=("s@g1", 7), time=1.0)
    first.done(1.5)
    if ack is not None:
        getattr(first, f"ack_{ack}")(1.6)
    handled(history, 1, 3.0, by="d")
    if at is not None:
        history.broken("killed", at, **fault)
    assert kinds(history) == found


def test_the_handlings_of_a_dead_consumer_end(history: History):
    sent(history, 1)
    history.handle("c", "k", 1, time=1.0)
    history.gone("c", 2.0)
    handled(history, 1, 3.0, by="d")
    assert check(history) == []
    assert history.handlings[0].outcome == "unknown"


def test_two_sends_of_one_value_are_refused(history: History):
    sent(history, 1)
    sent(history, 1)
    with pytest.raises(ValueError, match="sent twice"):
        check(history)


def test_a_violation_prints_its_kind_time_message_and_reason(history: History):
    sent(history, "m-1", at=2.5)
    [violation] = check(history)
    assert str(violation) == "lost at 2.500000 s: 'm-1' of key 'k': sent by p and never handled"


# --- generated histories ------------------------------------------------------------------------


@st.composite
def legal(draw: st.DrawFn) -> History:
    """A strictly ordered history: each key has one owner at a time, with increasing epochs, failures and retries."""
    history = History()
    keys = draw(st.lists(st.integers(0, 5), min_size=2, max_size=12))
    for value, key in enumerate(keys):
        history.send(key, value, float(value), producer="p").ok(("s", value), value + 0.5)
    clocks = dict.fromkeys(keys, 100.0)
    epochs = dict.fromkeys(keys, 1)
    for value, key in enumerate(keys):
        for attempt in range(draw(st.integers(1, 3)), 0, -1):
            if draw(st.booleans()):
                epochs[key] += 1
            begun = clocks[key] + draw(st.floats(0.0, 1.0))
            handling = history.handle(f"c{epochs[key]}", key, value, 1, epochs[key], key, ("s", value), begun)
            clocks[key] = begun + draw(st.floats(0.1, 1.0))
            if attempt > 1:
                handling.failed(clocks[key])
            else:
                handling.done(clocks[key])
                handling.ack_ok(clocks[key])
    history.handlings.sort(key=lambda handling: handling.begun)
    return history


def successes(history: History) -> list[Handling]:
    return [handling for handling in history.handlings if handling.outcome == "ok"]


def neighbours(history: History) -> list[tuple[Handling, Handling]]:
    """Successes of one key that follow each other."""
    found: list[tuple[Handling, Handling]] = []
    last: dict[Key, Handling] = {}
    for handling in successes(history):
        if handling.key in last:
            found.append((last[handling.key], handling))
        last[handling.key] = handling
    return found


def lose(history: History, pick: Callable[[Any], Any]) -> str:
    history.handlings.remove(pick(successes(history)))
    return "lost"


def fail_last_attempt(history: History, pick: Callable[[Any], Any]) -> str:
    pick(successes(history)).outcome = "failed"
    return "lost"


def invent(history: History, pick: Callable[[Any], Any]) -> str:
    pick(history.handlings).value = "invented"
    return "invented"


def change_key(history: History, pick: Callable[[Any], Any]) -> str:
    pick(history.handlings).key = "another"
    return "invented"


def refuse(history: History, pick: Callable[[Any], Any]) -> str:
    pick(history.sends).outcome = "failed"
    return "invented"


def store_twice(history: History, pick: Callable[[Any], Any]) -> str:
    pick(history.handlings).place = ("s", 1000)
    return "stored_twice"


def swap_places(history: History, pick: Callable[[Any], Any]) -> str:
    at = pick(range(len(history.sends) - 1))
    one, other = history.sends[at], history.sends[at + 1]
    one.place, other.place = other.place, one.place
    return "send_order"


def repeat(history: History, pick: Callable[[Any], Any]) -> str:
    again = copy.copy(pick(successes(history)))
    again.begun = (again.acked or 0.0) + 1.0
    again.ended = again.begun + 0.1
    history.handlings.append(again)
    history.handlings.sort(key=lambda handling: handling.begun)
    return "redelivered"


def lower_epoch(history: History, pick: Callable[[Any], Any]) -> str:
    last = {handling.lp: handling for handling in history.handlings}
    handling = pick(list(last.values()))
    first = next(each for each in history.handlings if each.lp == handling.lp)
    first.epoch = handling.epoch + 1
    return "epoch" if first is not handling else ""


def other_owner(history: History, pick: Callable[[Any], Any]) -> str:
    handling = pick(history.handlings)
    handling.consumer = "other"
    shared = [each for each in history.handlings if (each.lp, each.epoch) == (handling.lp, handling.epoch)]
    return "owners" if len(shared) > 1 else ""


def swap_order(history: History, pick: Callable[[Any], Any]) -> str:
    pairs = neighbours(history)
    if not pairs:
        return ""
    one, other = pick(pairs)
    one.value, other.value = other.value, one.value
    return "order"


def overlap(history: History, pick: Callable[[Any], Any]) -> str:
    pairs = neighbours(history)
    if not pairs:
        return ""
    one, other = pick(pairs)
    one.ended = other.begun + 0.01
    return "overlap"


MUTATIONS = [
    lose, fail_last_attempt, invent, change_key, refuse, store_twice, swap_places, repeat, lower_epoch, other_owner,
    swap_order, overlap,
]  # fmt: skip


@given(legal())
def test_a_legal_history_has_no_violation(history: History):
    assert check(history) == []
    assert check(history, strict=False) == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@given(data=st.data())
def test_each_single_change_of_a_legal_history_is_found(mutation: Any, data: st.DataObject):
    history = data.draw(legal())
    expected = mutation(history, lambda some: data.draw(st.sampled_from(some)))
    if expected:
        assert expected in kinds(history)


def test_a_long_history_is_checked_in_little_time(history: History):
    count = 100_000
    for value in range(count):
        sent(history, value, key=value % 1000, at=value / 1000, place=("s", value))
    for value in range(count):
        history.handle("c", value % 1000, value, 1, 1, value % 1000, ("s", value), 200.0 + value / 1000).done(
            200.0 + value / 1000
        )
    begun = time.process_time()
    found: list[Violation] = check(history)
    assert found == []
    # 1 s on a slow machine; quadratic growth would take hours.
    assert time.process_time() - begun < 20.0
