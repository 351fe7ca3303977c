"""Retries and dead letters compared with a simple model of each message, with crashes between any two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.broker.groups.dead_letters import Choice
from plait.broker.groups.group import AttachedConsumer
from plait.frame.columns import Column
from plait.model.rate import Rate
from plait.model.reason import Reason
from plait.model.retry_policy import LOST_ATTEMPTS_MIN, Retry
from plait.model.settings import with_pause, with_rate
from plait.storage.logs.retained_log import HISTORY_MAX
from tests.broker.rate_record import RateRecord
from tests.support.broker_node import Node, Producer

CLIENTS = st.sampled_from(["a", "b", "c"])
#: Two waits, of which the last is repeated; without jitter, so that the model can predict due times.
RETRY = Retry(steps=(2, 8), jitter=0, attempts=3)
LOST_SECONDS = 5.0


@dataclass
class Message:
    """The state of one message in the model."""

    attempt: int = 0
    #: The consumer that holds it.
    holder: str | None = None
    #: It must not be delivered before the first time, and must be after the second (microseconds).
    due: tuple[int, int] = (0, 0)
    done: bool = False
    #: It is done because its dead letter was purged.
    purged: bool = False
    #: It was done, but not purged, when the group was rewound to a message after it.
    before: bool = False
    #: The reason if it is a dead letter, and the attempt count at each resend.
    dead: str | None = None
    resent: list[int] = field(default_factory=list)

    @property
    def to_come(self) -> bool:
        """Whether it is delivered once it is due."""
        return not self.done and self.holder is None and self.dead is None

    @property
    def last(self) -> bool:
        """Whether a failure of this attempt makes it a dead letter."""
        return self.attempt - (self.resent[-1] if self.resent else 0) >= RETRY.attempts

    @property
    def last_of_many(self) -> bool:
        """Whether the loss of its consumer makes it a dead letter."""
        return self.attempt - (self.resent[-1] if self.resent else 0) >= LOST_ATTEMPTS_MIN


class Retrying(RuleBasedStateMachine):
    """A group with up to three consumers, whose messages fail, wait, and are acked early, late or not at all."""

    @initialize(flush=st.sampled_from(["sync", "async"]))
    def start(self, flush: str) -> None:
        self.node = Node(flush=flush)
        self.producer = Producer(1)
        self.messages: list[Message] = []
        self.consumers: dict[str, AttachedConsumer] = {}
        self.paused = False
        self.rate = RateRecord()

    def _consumer(self, client: str) -> AttachedConsumer:
        consumer = self.consumers.get(client)
        if consumer is None:
            holds = [
                (sequence, sequence + 1, epoch)
                for sequence, message in enumerate(self.messages)
                if message.holder == client
                for _, epoch in self.node.partition("orders").epochs
            ]
            consumer = self.node.attach("orders", "g", client, retry=RETRY, holds=holds)
            self.consumers[client] = consumer
        return consumer

    def _ranges(self, sequences: list[int]) -> list[tuple[int, int, int]]:
        # The rows may be of an earlier epoch: report each epoch, only one applies.
        return [(s, s + 1, epoch) for s in sequences for _, epoch in self.node.partition("orders").epochs]

    def _held(self, client: str) -> list[int]:
        return [sequence for sequence, message in enumerate(self.messages) if message.holder == client]

    # --- steps ----------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        bodies = [b"%d" % (len(self.messages) + number) for number in range(count)]
        assert self.node.send("orders", *bodies, producer=self.producer).acknowledged
        self.messages += [Message() for _ in range(count)]

    @rule(client=CLIENTS, count=st.integers(1, 8))
    def pull(self, client: str, count: int) -> None:
        now = self.node.clock.now()
        consumer = self._consumer(client)
        got = 0
        ranges = self.node.pull(consumer, count).ranges
        if self.paused:
            assert ranges == [], "the group is paused"
            return
        for start, end, attempt in ranges:
            for sequence in range(start, end):
                message = self.messages[sequence]
                assert not message.done, f"{sequence} is acked"
                assert message.holder is None, f"{sequence} is held by {message.holder}"
                assert message.dead is None, f"{sequence} is a dead letter"
                assert message.due[0] <= now, f"{sequence} is delivered early"
                assert attempt == message.attempt + 1, f"{sequence} is on attempt {attempt}"
                message.attempt, message.holder = attempt, client
                got += 1
        self.rate.delivered(got, self.node.clock.monotonic())
        if got < count and self.rate.messages is None:
            late = [
                sequence for sequence, message in enumerate(self.messages) if message.to_come and message.due[1] <= now
            ]
            assert late == [], "these fit in the pull"

    def _choose(self, data: st.DataObject) -> tuple[AttachedConsumer, list[int]]:
        """A consumer that holds messages, and some of them."""
        client = data.draw(st.sampled_from(sorted({m.holder for m in self.messages if m.holder})))
        chosen = data.draw(st.lists(st.sampled_from(self._held(client)), unique=True, min_size=1))
        return self._consumer(client), chosen

    @precondition(lambda self: any(message.holder for message in self.messages))
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        consumer, chosen = self._choose(data)
        assert self.node.ack(consumer, *self._ranges(chosen))
        for sequence in chosen:
            self.messages[sequence].done, self.messages[sequence].holder = True, None

    @precondition(lambda self: any(message.holder for message in self.messages))
    @rule(data=st.data(), delay=st.none() | st.sampled_from([None, 0.0, 0.5, 30.0]))
    def fail(self, data: st.DataObject, delay: float | None) -> None:
        self._fail(*self._choose(data), delay)

    def _fail(self, consumer: AttachedConsumer, chosen: list[int], delay: float | None) -> None:
        now = self.node.clock.now()
        assert self.node.nack(consumer, *self._ranges(chosen), delay=delay, reason=Reason("Failed"))
        for sequence in chosen:
            message = self.messages[sequence]
            if message.last:
                message.holder, message.dead = None, "Failed"
                continue
            wait = RETRY.wait(message.attempt, 0.0) if delay is None else delay
            micros = round(wait * 1_000_000)
            message.holder, message.due = None, (now + micros, now + micros + micros // 32)

    @precondition(lambda self: any(message.holder for message in self.messages))
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        self._reject(*self._choose(data))

    def _reject(self, consumer: AttachedConsumer, chosen: list[int]) -> None:
        assert self.node.nack(consumer, *self._ranges(chosen), reject=True, reason=Reason("Rejected"))
        for sequence in chosen:
            self.messages[sequence].holder, self.messages[sequence].dead = None, "Rejected"

    @precondition(lambda self: any(message.holder for message in self.messages))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Return messages, which does not count an attempt."""
        consumer, chosen = self._choose(data)
        assert self.node.nack(consumer, *self._ranges(chosen), counted=False)
        for sequence in chosen:
            message = self.messages[sequence]
            message.holder, message.due, message.attempt = None, (0, 0), message.attempt - 1

    @precondition(lambda self: any(message.dead for message in self.messages))
    @rule(data=st.data(), kind=st.none() | st.sampled_from(["Failed", "Rejected"]), purge=st.booleans())
    def resend_or_purge(self, data: st.DataObject, kind: str | None, purge: bool) -> None:
        dead = [sequence for sequence, message in enumerate(self.messages) if message.dead]
        self._take_out(data.draw(st.none() | st.lists(st.sampled_from(dead), unique=True, min_size=1)), kind, purge)

    @precondition(lambda self: any(message.dead for message in self.messages))
    @rule(client=CLIENTS, fates=st.lists(st.sampled_from(["fail", "reject"]), min_size=1, max_size=4))
    def resend_in_vain(self, client: str, fates: list[str]) -> None:
        """Resend letters that fail again, several times."""
        for fate in fates:
            self._take_out(None, None, purge=False)
            self.pull(client, 1000)
            if held := self._held(client):
                if fate == "fail":
                    self._fail(self._consumer(client), held, 0.0)
                else:
                    self._reject(self._consumer(client), held)

    def _take_out(self, chosen: list[int] | None, kind: str | None, purge: bool) -> None:
        dead = [sequence for sequence, message in enumerate(self.messages) if message.dead]
        group, letters = self.node.partition("orders").groups["g"], self.node.broker.dead_letters
        found, following = letters.page(group, Choice(chosen, kind), -1, 1000)
        assert following is None
        meant = [s for s in (dead if chosen is None else sorted(chosen)) if kind in (None, self.messages[s].dead)]
        assert sorted(s for part in found for s in part.sequences.tolist()) == meant
        assert (letters.purge if purge else letters.resend)(group, found) == len(meant)
        self.node.turn()
        for sequence in meant:
            message = self.messages[sequence]
            message.dead, message.done, message.purged, message.due = None, purge, purge, (0, 0)
            if not purge:
                message.resent.append(message.attempt)

    @rule(data=st.data())
    def ack_late(self, data: st.DataObject) -> None:
        """Ack a failed message, which cancels its next attempt."""
        waiting = [s for s, m in enumerate(self.messages) if m.attempt and m.holder is None and not m.done]
        if waiting and self.consumers:
            sequence = data.draw(st.sampled_from(waiting))
            assert self.node.ack(next(iter(self.consumers.values())), *self._ranges([sequence]))
            self.messages[sequence].done, self.messages[sequence].dead = True, None

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        for consumer in self.consumers.values():
            consumer.last_contact = self.node.clock.monotonic() + seconds
        self.node.later(seconds)

    @rule(client=CLIENTS, early=st.sampled_from([1, 1000]))
    def look_before_it_is_due(self, client: str, early: int) -> None:
        now = self.node.clock.now()
        moments = [m.due[0] for m in self.messages if m.to_come and m.due[0] > now + early]
        if moments:
            self.time_passes((min(moments) - early - now) / 1_000_000)
            self.pull(client, 1000)

    @rule(client=CLIENTS)
    def look_when_it_is_due(self, client: str) -> None:
        now = self.node.clock.now()
        moments = [m.due[1] for m in self.messages if m.to_come and m.due[1] > now]
        if moments:
            self.time_passes((min(moments) - now) / 1_000_000)
            self.pull(client, 1000)

    @rule(client=CLIENTS)
    def lose(self, client: str) -> None:
        """Lose a silent consumer: its messages are due for other consumers at once."""
        consumer = self.consumers.pop(client, None)
        if consumer is None:
            return
        self.node.clock.advance(LOST_SECONDS + 1)
        for other in self.consumers.values():
            other.last_contact = self.node.clock.monotonic()
        self.node.membership.disconnected(consumer, consumer.session)
        self.node.membership.lose_silent()
        self.node.later(0)
        for sequence in self._held(client):
            if self.messages[sequence].last_of_many:
                self.messages[sequence].holder, self.messages[sequence].dead = None, "ConsumerLost"
        self._back(client)

    @rule(client=CLIENTS)
    def leave(self, client: str) -> None:
        consumer = self.consumers.pop(client, None)
        if consumer is not None:
            self.node.membership.detach(consumer)
            self.node.turn()
            self._back(client)

    def _back(self, client: str) -> None:
        for sequence in self._held(client):
            self.messages[sequence].holder, self.messages[sequence].due = None, (0, 0)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        """Pause or resume the group; consumers keep what they hold."""
        if self.messages:
            settings = self.node.partition("orders").row.settings
            changed = with_pause(settings, "g", self.node.clock.now() * paused)
            self.node.broker.catalog.update_subject("orders", changed)
            self.node.turn()
            self.paused = paused

    @rule(messages=st.sampled_from([None, 0.5, 3, 40]))
    def limit(self, messages: float | None) -> None:
        """Limit the rate of the group, or end the limit."""
        if self.messages:
            settings = self.node.partition("orders").row.settings
            self.node.broker.catalog.update_subject("orders", with_rate(settings, "g", Rate(messages)))
            self.node.turn()
            self.rate.begin(messages, self.node.clock.monotonic())

    @rule(data=st.data(), skipping=st.booleans(), closed=st.booleans())
    def rewind(self, data: st.DataObject, skipping: bool, closed: bool) -> None:
        """Rewind the group while its consumers are closed, or have lost their connections a moment ago."""
        if not self.messages or "g" not in self.node.partition("orders").groups:
            return
        for consumer in self.consumers.values():
            if closed:
                self.node.membership.detach(consumer)
            else:
                self.node.membership.disconnected(consumer, consumer.session)
        self.consumers.clear()
        to = data.draw(st.integers(0, len(self.messages)))
        for preview in (True, False):
            found = self.node.membership.rewind("orders", "g", ["sequence", to], skipping=skipping, preview=preview)
            done = sum(message.done for message in self.messages[to:])
            open_ones = sum(not message.done and not message.dead for message in self.messages[:to])
            dead = sum(message.dead is not None for message in self.messages[to:])
            assert (found.position, found.handled, found.dead_again) == (to, done, dead)
            assert (found.open, found.skipped) == ((0, open_ones) if skipping else (open_ones, 0))
            assert found.again == max(found.before - to, 0) >= done + dead
        self.node.turn()
        self.messages[to:] = [Message() for _ in self.messages[to:]]
        for message in self.messages[:to]:
            message.done = message.done or (skipping and not message.dead)
            message.before = message.done and not message.purged
            if message.holder is not None:
                message.holder, message.due = None, (0, 0)

    @rule()
    def checkpoint(self) -> None:
        self.node.checkpoint()

    @rule(steps=st.integers(1, 4))
    def slow_checkpoint(self, steps: int) -> None:
        for _ in range(steps):
            self.node.checkpoint_step()

    @rule(orderly=st.booleans())
    def crash(self, orderly: bool) -> None:
        """Restart the broker; the consumers attach again with the messages that they hold."""
        self.node = self.node.restart() if orderly else self.node.killed()
        self.rate.restarted(self.node.clock.monotonic())
        self._attach_again()

    @precondition(lambda self: self.node.config.flush == "sync")
    @rule()
    def lose_power(self) -> None:
        self.node = self.node.power_lost()
        self.rate.restarted(self.node.clock.monotonic())
        self._attach_again()

    def _attach_again(self) -> None:
        clients, self.consumers = list(self.consumers), {}
        for client in clients:
            self._consumer(client)
        self.node.later(0)

    # --- checks ---------------------------------------------------------------------------------

    @invariant()
    def everything_is_counted(self) -> None:
        group = self.node.partition("orders").groups.get("g")
        if group is None:
            return
        log = group.cursor
        held = sum(1 for message in self.messages if message.holder is not None)
        open_count = sum(1 for message in self.messages if not message.done and not message.dead)
        ahead = self.node.partition("orders").visible - log.next
        assert log.held_count == held
        assert log.returned.count + log.passed.count + log.waiting.count + ahead == open_count - held
        assert group.lost_count == 0
        letters, _ = self.node.broker.dead_letters.page(group, Choice(), -1, 1000)
        found = {s: (part.death.reason.type, part) for part in letters for s in part.sequences.tolist()}
        assert {s: kind for s, (kind, _) in found.items()} == {
            s: message.dead for s, message in enumerate(self.messages) if message.dead
        }
        for sequence, (_, part) in found.items():
            message = self.messages[sequence]
            assert part.death.attempts == message.attempt
            assert [past.attempts for past in part.death.history] == message.resent[-HISTORY_MAX:]
            assert part.death.first_time <= part.death.last_time
            row = part.frame.sequences().tolist().index(sequence)
            assert part.frame.rows(Column.BODY, row, row + 1) == [b"%d" % sequence]

    def teardown(self) -> None:
        """In the end, deliver every open message once."""
        if not hasattr(self, "node"):
            return
        for client in list(self.consumers):
            self.leave(client)
        self.pause(paused=False)
        self.limit(messages=None)
        self.node.later(100)
        last = self.node.attach("orders", "g", "last")
        got: list[int] = []
        while ranges := self.node.pull(last, 1000).ranges:
            got += [sequence for start, end, _ in ranges for sequence in range(start, end)]
        assert sorted(got) == [
            sequence for sequence, message in enumerate(self.messages) if not message.done and not message.dead
        ]


TestRetrying = Retrying.TestCase
TestRetrying.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
