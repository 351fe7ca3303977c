"""Judging rows by their events: compared with the replay of a shared group, and with defects."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.model.logical_partitions import NO_KEY_HASH
from plait.spark.auditing.block_arrays import AUDITED, BlockRows, Events, audited, of_rows
from plait.spark.auditing.group_facts import GroupFacts, GroupTable
from plait.spark.auditing.key_order import out_of_order
from plait.spark.auditing.touches import touches
from plait.spark.auditing.verdicts import Fate, GroupVerdict, judge
from plait.storage.logs.action_events import EVENT, Action
from plait.storage.logs.action_log import ConsumerDefinition, GroupDefinition
from plait.storage.ranges import Ranges
from tests.support.bare_group import BareGroup

END = 40


def rows_of(count: int = END, *, keys: list[int] | None = None, epochs: list[int] | None = None) -> BlockRows:
    sequences = np.arange(count)
    hashes = np.full(count, NO_KEY_HASH) if keys is None else np.array(keys, np.uint64)
    lps = np.zeros(count, np.uint16) if keys is None else (hashes % np.uint64(1024)).astype(np.uint16)
    return block_rows(sequences, hashes, sequences * 10, np.array(epochs or [1] * count), lps)


def block_rows(sequences: Any, hashes: Any, times: Any, epochs: Any, lps: Any) -> BlockRows:
    none = np.zeros(len(sequences), bool)
    ids = np.zeros(len(sequences), np.uint64), sequences.astype(np.uint64)
    return BlockRows(sequences, epochs, lps, hashes, times, times, ids, none, none)


class Script:
    """Events in log order, each in its own frame, and the facts about their group."""

    def __init__(self, *, start: int = 0, **kind: Any) -> None:
        self.definition = GroupDefinition(
            7, 1, "g", start, kind.pop("broadcast", False), kind.pop("delivery", "at_least_once"), 0, **kind
        )
        self.events: list[tuple[int, ...]] = []
        self.clients: dict[int, str] = {number: f"c-{number}" for number in range(1, 6)}

    def add(
        self,
        action: Action,
        holder: int = 0,
        start: int = 0,
        end: int = 0,
        attempt: int = 0,
        epoch: int = 1,
        value: int = 0,
        *,
        uncounted: bool = False,
    ) -> None:
        self.events.append((7, epoch, action, attempt, uncounted, holder, start, end, value))

    def array(self) -> Events:
        rows = [np.array([event], EVENT) for event in self.events]
        return audited((100 * number, 1000 + number, row) for number, row in enumerate(rows))

    def facts(self, *, strict: bool = False) -> GroupFacts:
        table = GroupTable()
        table.define(self.definition)
        for number, client in self.clients.items():
            table.define(ConsumerDefinition(number, 7, client))
        table.take(self.array())
        group = table.groups[7]
        group.strict = strict
        return group

    def judge(self, rows: BlockRows | None = None, *, strict: bool = False) -> GroupVerdict:
        rows = rows or rows_of()
        events, group = of_rows(self.array()), self.facts(strict=strict)
        return judge(rows, events, touches(rows, events, group), group)


def broken(verdict: GroupVerdict) -> dict[str, list[int]]:
    return {name: numbers.tolist() for name, numbers in verdict.broken.items() if len(numbers)}


# --- against a shared group ----------------------------------------------------------------------


class Driven:
    """A shared group that is driven like a broker's; every decision is recorded as an event."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.script = Script()
        self.group = BareGroup()
        self.cursor, self.failures = self.group.cursor, self.group.failures
        self._draw = draw
        self.acked = Ranges()
        self.skipped = Ranges()
        self.filtered = Ranges()
        self.purged = Ranges()
        #: Rows below it may still be handled after a rewind, which the audit does not judge.
        self.judged_from = 0

    def pull(self) -> None:
        consumer, count = self._draw(st.integers(1, 3)), self._draw(st.integers(1, 6))
        self.group.group.return_due(10**18)
        if self.cursor.ready:
            start, end, attempt = self.cursor.returned.head()
            end = min(end, start + count)
        else:
            start, end, attempt = self.cursor.next, min(self.cursor.next + count, END), 0
        if start < end:
            self.script.add(Action.PULL, consumer, start, end, attempt + 1)
            self.group.event(Action.PULL, consumer, start, end, attempt + 1)
            self.purged.remove(start, end)

    def _held(self) -> tuple[int, int, int, int] | None:
        pieces = [(consumer, *piece) for consumer, held in sorted(self.cursor.held.items()) for piece in held]
        if not pieces:
            return None
        consumer, start, end, attempt = self._draw(st.sampled_from(pieces))
        first = self._draw(st.integers(start, end - 1))
        return consumer, first, self._draw(st.integers(first + 1, end)), attempt

    def ack(self) -> None:
        if piece := self._held():
            consumer, start, end, _ = piece
            self.script.add(Action.ACK, consumer, start, end)
            self.group.event(Action.ACK, consumer, start, end)
            self.acked.add(start, end, 0)

    def nack(self) -> None:
        if piece := self._held():
            due = self._draw(st.sampled_from([0, 5_000]))
            consumer, start, end, attempt = piece
            uncounted = self._draw(st.booleans())
            self.script.add(Action.NACK, consumer, start, end, attempt, uncounted=uncounted)
            self.group.event(Action.NACK, consumer, start, end, due=due, counted=not uncounted)

    def bury(self) -> None:
        if piece := self._held():
            consumer, start, end, attempt = piece
            self.script.add(Action.BURY, consumer, start, end, attempt)
            self.group.event(Action.BURY, consumer, start, end, attempt)

    def offline(self) -> None:
        consumer = self._draw(st.integers(1, 3))
        if consumer in self.cursor.held:
            self.script.add(Action.OFFLINE, consumer)
            self.group.event(Action.OFFLINE, consumer)

    def revive(self) -> None:
        if self.failures.dead:
            start, end, _ = self._draw(st.sampled_from(list(self.failures.dead)))
            self.script.add(Action.REVIVE, 0, start, end)
            self.group.event(Action.REVIVE, 0, start, end)

    def purge(self) -> None:
        if self.failures.dead:
            start, end, _ = self._draw(st.sampled_from(list(self.failures.dead)))
            self.script.add(Action.PURGE, 0, start, end)
            self.group.event(Action.PURGE, 0, start, end)
            self.purged.add(start, end, 0)

    def skip(self) -> None:
        start = self.cursor.next
        end = min(start + 2, END)
        if start < end and not self.cursor.ready:
            self.script.add(Action.SKIP, 0, start, end)
            self.group.event(Action.SKIP, 0, start, end)
            self.skipped.add(start, end, 0)

    def leave_out(self) -> None:
        start = self.cursor.next
        end = min(start + self._draw(st.integers(1, 3)), END)
        if start < end and not self.cursor.ready:
            self.script.add(Action.FILTERED, 0, start, end, value=end - start)
            self.group.event(Action.FILTERED, 0, start, end)
            self.filtered.add(start, end, 0)

    def rewind(self) -> None:
        to = self._draw(st.integers(0, self.cursor.next))
        skipping = self._draw(st.booleans())
        # The flag of a nack that does not count is the flag of a rewind that skips rows.
        self.script.add(Action.REWIND, 0, to, to, uncounted=skipping)
        self.group.event(Action.REWIND, 0, to, to, counted=not skipping)
        self.judged_from = 0 if skipping else to
        self.acked.clear()
        self.skipped.clear()
        self.purged.remove(to, END)
        self.filtered.clear()

    def expected(self) -> list[Fate]:
        """The fate of each row by the group."""
        fates = []
        events = self.script.array()
        start = max(events["start"][events["action"] == Action.REWIND].tolist()[-1:], default=0)
        for row in range(END):

            def there(ranges: Any, row: int = row) -> bool:
                return bool(ranges.overlap(row, row + 1))

            if there(self.acked):
                fates.append(Fate.ACKED)
            elif there(self.failures.dead) or (there(self.purged) and row < self.cursor.next):
                fates.append(Fate.DEAD)
            elif there(self.filtered):
                fates.append(Fate.FILTERED)
            elif there(self.skipped):
                fates.append(Fate.EXPIRED)
            elif any(there(held) for held in self.cursor.held.values()):
                fates.append(Fate.HELD)
            elif there(self.cursor.returned) or there(self.cursor.waiting):
                fates.append(Fate.RETURNED)
            elif row < start:
                fates.append(Fate.OUTSIDE)
            else:
                fates.append(Fate.PENDING)
        return fates


STEPS = ["pull", "pull", "ack", "ack", "nack", "bury", "offline", "revive", "purge", "skip", "leave_out", "rewind"]


@settings(deadline=None)
@given(st.data())
def test_every_row_has_the_fate_of_a_replay_and_no_promise_is_broken(data: st.DataObject):
    driven = Driven(data.draw)
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=40)):
        getattr(driven, step)()
    verdict = driven.script.judge()
    assert broken(verdict) == {}
    found = [Fate(fate) for fate in verdict.fates.tolist()]
    assert found[driven.judged_from :] == driven.expected()[driven.judged_from :]


@settings(deadline=None)
@given(st.data())
def test_removing_all_events_of_rows_before_the_scan_is_found(data: st.DataObject):
    driven = Driven(data.draw)
    for _ in range(8):
        driven.pull()
        driven.ack()
    events = driven.script.array()
    pulls = events[(events["action"] == Action.PULL) & (events["attempt"] == 1)]
    gone = range(*data.draw(st.sampled_from(pulls[:-2][["start", "end"]].tolist())))
    kept = (events["start"] >= gone.stop) | (events["end"] <= gone.start)
    driven.script.events = list(compress(driven.script.events, kept))
    assert broken(driven.script.judge()) == {"lost": list(gone)}


# --- single cases -----------------------------------------------------------------------------------


PULLED = (Action.PULL, 1, 0, 10, 1)
ACKED = (Action.ACK, 1, 0, 10)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        pytest.param([PULLED, ACKED, (Action.ACK, 2, 4, 5)], {"double_acks": [4]}, id="ack without a delivery"),
        pytest.param([PULLED, ACKED, ACKED], {}, id="resent ack"),
        pytest.param([PULLED, (Action.PULL, 2, 3, 4, 2)], {"delivered_twice": [3]}, id="second consumer"),
    ],
)
def test_events_of_a_shared_group(events: list[tuple[Any, ...]], found: dict[str, list[int]]):
    script = Script()
    for event in events:
        script.add(*event)
    assert broken(script.judge()) == found


@pytest.mark.parametrize("purged", [False, True])
def test_a_dead_row_that_is_skipped_after_a_rewind_is_lost(purged: bool):
    script = Script()
    script.add(Action.PULL, 1, 0, 5, 1)
    script.add(Action.BURY, 1, 2, 3, 1)
    if purged:
        script.add(Action.PURGE, 0, 2, 3)
    script.add(Action.ACK, 1, 0, 2)
    script.add(Action.ACK, 1, 3, 5)
    script.add(Action.REWIND, 0, 0, 0)
    assert script.judge().fates[2] == Fate.PENDING
    script.add(Action.PULL, 1, 0, 2, 1)
    script.add(Action.PULL, 1, 3, 8, 1)
    # Skipped rows are delivered before new ones.
    assert script.judge().fates[2] == Fate.PENDING
    script.add(Action.PULL, 1, 8, 10, 1)
    assert broken(script.judge()) == {"lost": [2]}


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_rows_that_others_overtook_are_pending_until_a_delivery_leaves_none(delivery: str):
    script = Script(delivery=delivery)
    action = Action.PULL if delivery == "at_least_once" else Action.ACK
    # The flag of a nack that does not count is the flag of a delivery that overtakes rows.
    script.add(action, 1, 5, 10, 1, uncounted=True)
    script.add(action, 1, 10, 12, 1, uncounted=True)
    script.add(action, 1, 0, 2, 1)
    assert broken(script.judge()) == {}
    assert script.judge().fates[2:5].tolist() == [Fate.PENDING] * 3
    script.add(action, 1, 12, 13, 1)
    assert broken(script.judge()) == {"lost": [2, 3, 4]}


def test_a_consumer_that_got_a_new_number_is_the_same_client():
    script = Script()
    script.clients[4] = script.clients[2]
    script.add(Action.PULL, 2, 0, 10, 1)
    script.add(Action.OFFLINE, 2)
    script.add(Action.PULL, 1, 0, 10, 2)
    script.add(Action.ACK, 1, 0, 10)
    script.add(Action.ACK, 4, 0, 10)
    verdict = script.judge()
    assert broken(verdict) == {}
    assert verdict.counts["redelivered_consumer_lost"] == 10
    assert verdict.counts["acked_again"] == 10


def test_a_second_ack_in_a_later_epoch_may_belong_to_a_pull_that_was_lost():
    script = Script()
    script.add(Action.PULL, 1, 0, 10, 1, epoch=2)
    script.add(Action.ACK, 1, 0, 10, epoch=2)
    script.add(Action.ACK, 2, 0, 10, epoch=2)
    assert broken(script.judge()) == {}
    assert broken(script.judge(rows_of(epochs=[1] * 9 + [2] * 31))) == {"double_acks": [9]}


def test_a_consumer_that_returns_keeps_the_rows_it_holds():
    script = Script()
    script.add(Action.PULL, 1, 0, 10, 1)
    script.add(Action.OFFLINE, 1)
    script.add(Action.PULL, 1, 0, 10, 1)
    verdict = script.judge()
    assert broken(verdict) == {}
    assert verdict.counts["redelivered_consumer_lost"] == 0
    assert (verdict.fates[:10] == Fate.HELD).all()


def test_at_most_once_is_broken_by_a_second_delivery():
    script = Script(delivery="at_most_once")
    script.add(Action.ACK, 1, 0, 10, 1)
    script.add(Action.ACK, 1, 0, 10, 0)
    assert broken(script.judge()) == {}
    script.add(Action.ACK, 2, 5, 6, 1)
    assert broken(script.judge()) == {"double_acks": [5]}


def test_rows_returned_at_most_once_may_be_delivered_again_and_are_not_done_until_then():
    script = Script(delivery="at_most_once")
    script.add(Action.ACK, 1, 0, 10, 1)
    script.add(Action.NACK, 1, 5, 10, 1, uncounted=True)
    verdict = script.judge()
    assert (verdict.fates[:5] == Fate.ACKED).all()
    assert (verdict.fates[5:10] == Fate.RETURNED).all()
    script.add(Action.ACK, 2, 5, 8, 1)
    verdict = script.judge()
    assert broken(verdict) == {}
    assert (verdict.fates[:8] == Fate.ACKED).all()
    script.add(Action.ACK, 1, 7, 8, 1)
    assert broken(script.judge()) == {"double_acks": [7]}


def test_rows_that_an_at_most_once_broadcast_skipped_are_lost():
    script = Script(broadcast=True, delivery="at_most_once")
    for start, end in ((0, 3), (5, 7)):
        script.add(Action.ACK, 1, start, end, 1)
    # The scan may still deliver these rows: only a later delivery shows that it skipped them.
    assert broken(script.judge()) == {}
    script.add(Action.ACK, 1, 7, 9, 1)
    assert broken(script.judge()) == {"lost": [3, 4]}


def test_acks_of_a_broadcast_group_leave_gaps_that_are_not_lost():
    script = Script(broadcast=True)
    script.add(Action.ACK, 1, 10, 20)
    script.add(Action.ACK, 1, 25, 30)
    verdict = script.judge()
    assert broken(verdict) == {}
    assert (verdict.fates[:10] == Fate.PENDING).all()


@pytest.mark.parametrize(
    ("action", "below"), [(Action.REVIVE, Fate.RETURNED), (Action.PURGE, Fate.DEAD)], ids=["resent", "purged"]
)
def test_a_dead_row_that_is_resent_or_purged_after_an_earlier_rewind_is_pending(action: Action, below: Fate):
    script = Script()
    script.add(Action.PULL, 1, 0, 2, 1)
    script.add(Action.BURY, 1, 0, 2, 1)
    script.add(Action.REWIND, 0, 1, 1)
    script.add(action, 0, 0, 2)
    verdict = script.judge()
    assert broken(verdict) == {}
    assert verdict.fates[:3].tolist() == [below, Fate.PENDING, Fate.PENDING]


def test_rows_before_the_start_of_a_group_are_outside():
    script = Script(start=30)
    script.add(Action.PULL, 1, 30, 35, 1)
    script.add(Action.PULL, 1, 35, 40, 1)
    verdict = script.judge()
    assert broken(verdict) == {}
    assert (verdict.fates[:30] == Fate.OUTSIDE).all()


def test_an_event_does_not_count_for_a_later_row_with_the_same_sequence():
    script = Script()
    script.add(Action.PULL, 1, 0, 10, 1)
    script.add(Action.ACK, 1, 0, 10)
    verdict = script.judge(rows_of(epochs=[1] * 5 + [2] * 35))
    assert verdict.fates[:10].tolist() == [Fate.ACKED] * 5 + [Fate.PENDING] * 5


# --- ordered groups ---------------------------------------------------------------------------------


def ordered(script: Script, keys: list[int], *, strict: bool = True) -> tuple[GroupVerdict, list[int]]:
    rows = rows_of(len(keys), keys=keys)
    verdict = script.judge(rows, strict=strict)
    return verdict, out_of_order(rows, verdict)[0].tolist()


def test_events_of_a_cursor_count_for_its_own_rows_only():
    script = Script(ordered=True)
    script.add(Action.MOVE, 1, 0, 2, value=2)
    script.add(Action.ACK, 2, 0, 6)
    verdict, wrong = ordered(script, [0, 1, 2, 0, 1, 2])
    assert verdict.fates.tolist() == [1, 1, 6, 1, 1, 6]
    assert wrong == []


def test_a_held_key_has_its_own_cursor_until_it_joins():
    key = 2**63 + 5
    script = Script(ordered=True)
    script.add(Action.HOLD, 1, key % 1024, 2, value=key - 2**64)
    script.add(Action.ACK, 1, 0, 3)
    script.add(Action.JOIN, 1, 2, 3)
    script.add(Action.RETURN, 1, 1, 2)
    script.add(Action.ACK, 1, 3, 6)
    verdict, _ = ordered(script, [1, key, 1, key, 1, key])
    assert verdict.fates.tolist() == [1, 5, 1, 1, 1, 1]


def test_unfinished_rows_of_a_joined_cursor_that_are_not_returned_are_lost():
    script = Script(ordered=True)
    script.add(Action.MOVE, 1, 0, 2, value=2)
    script.add(Action.ACK, 1, 0, 4)
    script.add(Action.ACK, 2, 0, 2)
    script.add(Action.JOIN, 1, 2, 4)
    script.add(Action.RETURN, 1, 3, 4)
    assert broken(ordered(script, [1, 2, 1, 1, 2])[0]) == {"lost": [2]}


def test_swapped_acks_of_a_key_are_out_of_order():
    script = Script(ordered=True)
    script.add(Action.LOCK, 5, 0, 1024, value=1)
    for row in (0, 1, 3):
        script.add(Action.ACK, 1, row, row + 1)
    script.add(Action.LOCK, 0, 8, 9, value=1)
    script.add(Action.LOCK, 6, 8, 9, value=2)
    for row in (2, 4):
        script.add(Action.ACK, 1, row, row + 1)
    verdict, wrong = ordered(script, [8, 9, 8, 8, 9])
    assert wrong == [3]
    assert broken(verdict) == {}


def test_one_owner_may_ack_the_rows_it_holds_in_any_order():
    script = Script(ordered=True)
    script.add(Action.LOCK, 5, 0, 1024, value=1)
    for row in (3, 1, 2, 0):
        script.add(Action.ACK, 1, row, row + 1)
    # Other LPs get another owner.
    script.add(Action.LOCK, 6, 100, 1024, value=1)
    assert ordered(script, [8, 8, 8, 8, 8])[1] == []
    script.add(Action.ACK, 1, 4, 5)
    assert ordered(script, [8, 8, 8, 8, 8])[1] == []


def test_acks_of_one_frame_count_as_simultaneous():
    script = Script(ordered=True)
    script.add(Action.ACK, 1, 1, 2)
    script.add(Action.ACK, 1, 0, 1)
    events = script.array()
    events["offset"] = 0
    rows, group = rows_of(2, keys=[8, 8]), script.facts(strict=True)
    verdict = judge(rows, events, touches(rows, events, group), group)
    assert out_of_order(rows, verdict)[0].tolist() == []


def test_a_row_that_overtakes_an_unacked_one_is_out_of_order_in_a_strict_subject():
    script = Script(ordered=True)
    script.add(Action.LOCK, 5, 0, 1024, value=1)
    script.add(Action.ACK, 1, 1, 2)
    assert ordered(script, [8, 8])[1] == [], "its owner may still hold the first row"
    script.add(Action.LOCK, 0, 0, 1024, value=1)
    assert ordered(script, [8, 8])[1] == [1]
    assert ordered(script, [8, 8], strict=False)[1] == []


@pytest.mark.parametrize(("strict", "found"), [(True, [1]), (False, [])])
def test_a_failed_row_may_be_overtaken_only_if_order_is_not_strict(strict: bool, found: list[int]):
    script = Script(ordered=True)
    script.add(Action.NACK, 1, 0, 1, 1)
    script.add(Action.ACK, 1, 1, 2)
    script.add(Action.ACK, 1, 0, 1)
    assert ordered(script, [8, 8], strict=strict)[1] == found


def test_a_dead_letter_that_was_skipped_and_resent_is_not_out_of_order():
    script = Script(ordered=True)
    script.add(Action.BURY, 1, 0, 1, 1)
    script.add(Action.ACK, 1, 1, 2)
    script.add(Action.REVIVE, 1, 0, 1)
    script.add(Action.ACK, 1, 0, 1)
    verdict, wrong = ordered(script, [8, 8])
    assert wrong == []
    assert broken(verdict) == {}


def test_two_acks_of_an_ordered_group_need_a_return_between_them():
    script = Script(ordered=True)
    script.add(Action.ACK, 1, 0, 2)
    script.add(Action.NACK, 1, 0, 1, 1)
    script.add(Action.ACK, 1, 0, 2)
    assert broken(ordered(script, [8, 9])[0]) == {"double_acks": [1]}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), min_size=1, max_size=30))
def test_order_is_the_same_as_by_comparing_every_pair(drawn: list[tuple[int, int, bool]]):
    keys, places, excused = map(list, zip(*drawn, strict=True))
    rows = rows_of(len(keys), keys=[key + 1 for key in keys])
    verdict = GroupVerdict(np.zeros(len(keys), np.uint8))
    verdict.acked_at = np.array([100 * place if place else 1 << 62 for place in places])
    verdict.excused = np.array(excused)
    expected = [
        b
        for b in range(len(keys))
        if places[b]
        and any(keys[a] == keys[b] and not excused[a] and verdict.acked_at[a] > verdict.acked_at[b] for a in range(b))
    ]
    assert out_of_order(rows, verdict)[0].tolist() == expected


def test_judging_no_rows_gives_no_fates():
    rows = rows_of(0)
    group = Script().facts()
    events = np.empty(0, AUDITED)
    assert len(judge(rows, events, touches(rows, events, group), group).fates) == 0
