"""The state of a shared group, as events change it, against a model with the state of every single sequence."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plait.storage.cursor import CursorState
from plait.storage.logs.action_events import Action
from plait.storage.ranges import Range, Ranges
from tests.support.bare_group import BareGroup

CONSUMERS = st.integers(1, 3)
SEQUENCES = st.integers(0, 30)
SIZES = st.integers(1, 8)
START = 3
DUES = st.integers(1, 5)


class SharedStateMachine(RuleBasedStateMachine):
    """Each sequence is not yet delivered, held by a consumer, returned, waiting, dead, or done."""

    def __init__(self) -> None:
        super().__init__()
        self.state = BareGroup(START)
        self.next = START
        self.held: dict[int, tuple[int, int]] = {}
        self.returned: dict[int, int] = {}
        #: Sequence → attempt, and sequence → the time of its first failure in seconds.
        self.dead: dict[int, int] = {}
        self.failing: dict[int, int] = {}
        self.resent: dict[int, int] = {}
        #: Sequence → (due time, attempt).
        self.waiting: dict[int, tuple[int, int]] = {}
        self.now = 0

    @property
    def time(self) -> int:
        return self.now * 1_000_000

    def _failed(self, sequence: int) -> None:
        self.failing.setdefault(sequence, self.now)

    def _forget(self, sequence: int) -> None:
        self.failing.pop(sequence, None)
        self.resent.pop(sequence, None)

    def _pass(self, start: int, end: int) -> None:
        if end > self.next:
            self.returned.update(dict.fromkeys(range(self.next, start), 0))
            self.dead = {s: attempt for s, attempt in self.dead.items() if not self.next <= s < start}
            self.next = end

    @rule(consumer=CONSUMERS, count=SIZES)
    def pull_new(self, consumer: int, count: int) -> None:
        start = self.next
        self.state.event(Action.PULL, consumer, start, start + count, 1)
        self.next += count
        for sequence in range(start, start + count):
            self.held[sequence] = (consumer, 1)
            # After a rewind to an earlier sequence, dead letters are delivered as new rows.
            self.dead.pop(sequence, None)

    @rule(consumer=CONSUMERS)
    def pull_returned(self, consumer: int) -> None:
        if not self.returned:
            return
        cursor = self.state.cursor
        start, end, attempt = (cursor.returned or cursor.passed).head()
        assert set(range(start, end)) <= self.returned.keys()
        self.state.event(Action.PULL, consumer, start, end, attempt + 1)
        for sequence in range(start, end):
            assert self.returned.pop(sequence) == attempt
            self.held[sequence] = (consumer, attempt + 1)

    @rule(consumer=CONSUMERS, ahead=st.integers(1, 5), count=SIZES)
    def pull_ahead(self, consumer: int, ahead: int, count: int) -> None:
        """A pull event whose predecessors were lost: the rows that it jumps over are delivered again."""
        start = self.next + ahead
        self._pass(start, start + count)
        self.state.event(Action.PULL, consumer, start, start + count, 1)
        for sequence in range(start, start + count):
            self.held[sequence] = (consumer, 1)
            self.dead.pop(sequence, None)

    @rule(consumer=CONSUMERS, start=SEQUENCES, count=SIZES)
    def ack(self, consumer: int, start: int, count: int) -> None:
        self._pass(start, start + count)
        self.state.event(Action.ACK, consumer, start, start + count)
        for sequence in range(start, start + count):
            self.returned.pop(sequence, None)
            self.waiting.pop(sequence, None)
            if self.held.get(sequence, (0, 0))[0] == consumer:
                del self.held[sequence]
            self.dead.pop(sequence, None)
            self._forget(sequence)

    @rule(consumer=CONSUMERS, start=SEQUENCES, count=SIZES)
    def nack(self, consumer: int, start: int, count: int) -> None:
        self.state.event(Action.NACK, consumer, start, start + count, time=self.time)
        expected = {s: a for s, (c, a) in self.held.items() if c == consumer and start <= s < start + count}
        for sequence, attempt in expected.items():
            del self.held[sequence]
            self.returned[sequence] = attempt
            self._failed(sequence)

    @rule(consumer=CONSUMERS, start=SEQUENCES, count=SIZES)
    def give_back(self, consumer: int, start: int, count: int) -> None:
        """The consumer returns rows that it had not begun to handle."""
        self.state.event(Action.NACK, consumer, start, start + count, time=self.time, counted=False)
        for sequence, (holder, attempt) in list(self.held.items()):
            if holder == consumer and start <= sequence < start + count:
                del self.held[sequence]
                self.returned[sequence] = attempt - 1

    @rule(consumer=CONSUMERS)
    def bury(self, consumer: int) -> None:
        held = self.state.cursor.held.get(consumer)
        if held:
            start, end, attempt = held.head()
            self.state.event(Action.BURY, consumer, start, end, attempt, time=self.time)
            for sequence in range(start, end):
                del self.held[sequence]
                self._failed(sequence)
                self.resent.pop(sequence, None)
                self.dead[sequence] = attempt

    @rule(start=SEQUENCES, count=SIZES)
    def resend(self, start: int, count: int) -> None:
        found = {s: a for s, a in self.dead.items() if start <= s < start + count}
        self.state.event(Action.REVIVE, 0, start, start + count)
        for sequence, attempt in found.items():
            del self.dead[sequence]
            if sequence < self.next:
                self.returned[sequence] = self.resent[sequence] = attempt

    @rule(start=SEQUENCES, count=SIZES)
    def purge(self, start: int, count: int) -> None:
        found = [s for s in self.dead if start <= s < start + count]
        assert self.state.failures.purge(start, start + count) == len(found)
        for sequence in found:
            del self.dead[sequence]
            self._forget(sequence)

    @rule(consumer=CONSUMERS, start=SEQUENCES, count=SIZES, due=DUES)
    def fail(self, consumer: int, start: int, count: int, due: int) -> None:
        due += self.now
        self.state.event(Action.NACK, consumer, start, start + count, due=due, time=self.time)
        for sequence, (holder, attempt) in list(self.held.items()):
            if holder == consumer and start <= sequence < start + count:
                del self.held[sequence]
                self.waiting[sequence] = (due, attempt)
                self._failed(sequence)

    @rule(moments=DUES)
    def time_passes(self, moments: int) -> None:
        self.now += moments
        self.state.group.return_due(self.now)
        self.look()

    @rule()
    def look(self) -> None:
        """Due ranges are returned one due time at a time, the next one when the last was delivered."""
        due = [at for at, _ in self.waiting.values() if at <= self.now]
        if not any(self.returned.values()) and due:
            for sequence, (at, attempt) in list(self.waiting.items()):
                if at == min(due):
                    del self.waiting[sequence]
                    self.returned[sequence] = attempt
        assert self.state.cursor.ready == any(self.returned.values())

    @property
    def begun(self) -> list[int]:
        """Returned rows that had an attempt."""
        return [sequence for sequence, attempt in self.returned.items() if attempt]

    @rule(consumer=CONSUMERS, end=SEQUENCES, count=SIZES)
    def pull_separate_ranges(self, consumer: int, end: int, count: int) -> None:
        heads = self.state.cursor.returned.heads(end, count)
        assert len(heads) <= count
        if not heads:
            assert not self.begun or min(self.begun) >= end
            return
        for start, stop, attempt in heads:
            self.state.event(Action.PULL, consumer, start, stop, attempt + 1)
            for sequence in range(start, stop):
                assert sequence == min(self.begun)
                assert sequence < end
                assert self.returned.pop(sequence) == attempt
                self.held[sequence] = (consumer, attempt + 1)

    @rule(consumer=CONSUMERS)
    def replay_a_pull_of_due_rows(self, consumer: int) -> None:
        if not self.waiting:
            return
        sequence = min(self.waiting)
        _, attempt = self.waiting.pop(sequence)
        self.state.event(Action.PULL, consumer, sequence, sequence + 1, attempt + 1)
        self.held[sequence] = (consumer, attempt + 1)

    @rule(consumer=CONSUMERS)
    def offline(self, consumer: int) -> None:
        gone = {s: a for s, (c, a) in self.held.items() if c == consumer}
        assert self.state.group.forget(consumer, self.time) == len(gone)
        for sequence, attempt in gone.items():
            del self.held[sequence]
            self.returned[sequence] = attempt
            self._failed(sequence)

    @rule(start=SEQUENCES, count=SIZES)
    def skip(self, start: int, count: int) -> None:
        end = start + count
        expired = [s for s in self.returned if start <= s < end]
        for sequence in expired:
            del self.returned[sequence]
        late = [s for s in self.waiting if start <= s < end]
        for sequence in late:
            del self.waiting[sequence]
        lost = len(expired) + len(late)
        for sequence in [*expired, *late]:
            self._forget(sequence)
        if start <= self.next < end:
            lost += end - self.next
            self.next = end
        before = self.state.group.lost_count
        self.state.event(Action.SKIP, 0, start, end)
        assert self.state.group.lost_count - before == lost

    @rule(sequence=SEQUENCES)
    def rewind(self, sequence: int) -> None:
        self.state.event(Action.REWIND, 0, sequence, sequence)
        self.returned.update({s: attempt for s, (_, attempt) in self.held.items()})
        self.held = {}
        again = range(sequence, self.next)
        self.returned = {s: attempt for s, attempt in self.returned.items() if s not in again}
        self.waiting = {s: entry for s, entry in self.waiting.items() if s not in again}
        for failures in (self.dead, self.resent, self.failing):
            for s in [s for s in failures if s >= sequence]:
                del failures[s]
        self.next = min(self.next, sequence)

    @rule(sequence=SEQUENCES)
    def skip_to(self, sequence: int) -> None:
        """The event's flag, which a nack uses for rows that do not count."""
        self.state.event(Action.REWIND, 0, sequence, sequence, counted=False)
        self.next, self.held, self.returned, self.waiting, self.resent = sequence, {}, {}, {}, {}
        self.dead = {s: attempt for s, attempt in self.dead.items() if s < sequence}
        self.failing = {s: since for s, since in self.failing.items() if s in self.dead}

    def _reload(self, *, broadcast: bool) -> None:
        again = BareGroup(broadcast=broadcast)
        again.group.load([self.state.cursor.dump(durable_holds=not broadcast)])
        again.failures.load(self.state.failures.dump())
        self.state = again
        self.state.cursor.waiting.release(self.now)

    @rule()
    def checkpoint(self) -> None:
        self._reload(broadcast=False)

    @rule()
    def checkpoint_of_a_broadcast_group(self) -> None:
        self._reload(broadcast=True)
        self.returned.update({s: attempt for s, (_, attempt) in self.held.items()})
        self.held = {}

    @invariant()
    def they_agree(self) -> None:
        assert self.state.cursor.next == self.next
        returned, passed = self.state.cursor.returned, self.state.cursor.passed
        assert {s: r.attempt for r in (*returned, *passed) for s in range(r.start, r.end)} == self.returned
        held = {
            s: (consumer, r.attempt)
            for consumer, ranges in self.state.cursor.held.items()
            for r in ranges
            for s in range(r.start, r.end)
        }
        assert held == self.held
        for found, known in (
            (self.state.failures.dead, self.dead),
            (self.state.failures.failing, self.failing),
            (self.state.failures.resent, self.resent),
        ):
            assert {s: r.attempt for r in found for s in range(r.start, r.end)} == known
        assert not self.dead.keys() & (self.held.keys() | self.returned.keys() | self.waiting.keys())
        assert self.state.cursor.held_count == len(self.held)
        assert self.state.cursor.floor == min([self.next, *self.held, *self.returned, *self.waiting])
        waiting = {
            s: (due, r.attempt)
            for due, ranges in self.state.cursor.waiting
            for r in ranges
            for s in range(r.start, r.end)
        }
        assert waiting == self.waiting
        assert self.state.cursor.waiting.count == len(waiting)
        assert len(self.state.cursor.waiting) == sum(len(ranges) for _, ranges in self.state.cursor.waiting)
        to_come = [due for due, _ in waiting.values() if due > self.now]
        assert self.state.cursor.waiting.next_due == min(to_come, default=None)

    @invariant()
    def consumers_without_held_ranges_have_no_entry(self) -> None:
        assert all(self.state.cursor.held.values())


TestSharedState = SharedStateMachine.TestCase
TestSharedState.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_same_events_lead_to_the_same_state():
    lived, replayed = BareGroup(), BareGroup()
    events = [
        (Action.PULL, 1, 0, 10, 1),
        (Action.ACK, 1, 0, 4),
        (Action.NACK, 1, 4, 6, 0, 0, 7_000_000),
        (Action.PULL, 2, 4, 6, 2),
        (Action.BURY, 1, 6, 8, 1, 0, 8_000_000),
        (Action.OFFLINE, 1, 0, 0, 0, 0, 9_000_000),
    ]
    for number, event in enumerate(events):
        lived.event(*event)
        if number == 2:
            replayed.group.load(lived.group.dump())
            replayed.failures.load(lived.failures.dump())
        elif number > 2:
            replayed.event(*event)
    assert replayed.group.dump() == lived.group.dump()
    assert replayed.failures.dump() == lived.failures.dump()
    assert lived.group.dump() == [
        CursorState(
            id=0,
            lps=None,
            key=None,
            without=[],
            next=10,
            returned=[Range(8, 10, 1)],
            held={2: [Range(4, 6, 2)]},
            waiting=[],
            parked=False,
            letter=-1,
        )
    ]
    failing = Ranges([(4, 6, 7), (6, 8, 8), (8, 10, 9)])
    assert lived.failures.dump() == (Ranges([(6, 8, 1)]).pack(), failing.pack(), Ranges().pack())
