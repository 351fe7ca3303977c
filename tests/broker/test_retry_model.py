"""Retries against a plain model that knows every message by itself, with crashes between any two steps."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.broker.group import Consumer
from plait.retry import Retry
from tests.support.broker_node import Node, Producer

CLIENTS = st.sampled_from(["a", "b", "c"])
#: Two steps, then the last one again and again; without chance, so that the model can know.
RETRY = Retry(steps=(2, 8), jitter=0)
LOST_SECONDS = 5.0


@dataclass
class Message:
    """What the model knows of one message."""

    attempt: int = 0
    #: Who has it in their hands.
    holder: str | None = None
    #: It must not come before the first, and has to come after the second (microseconds).
    due: tuple[int, int] = (0, 0)
    done: bool = False


class Retrying(RuleBasedStateMachine):
    """A group with up to three consumers, whose messages fail, wait and are acked early, late or never."""

    @initialize(flush=st.sampled_from(["sync", "async"]))
    def start(self, flush: str) -> None:
        self.node = Node(flush=flush)
        self.producer = Producer(1)
        self.messages: list[Message] = []
        self.consumers: dict[str, Consumer] = {}

    def _consumer(self, client: str) -> Consumer:
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
        # A crash in between makes epochs: every one is tried, one is right.
        return [(s, s + 1, epoch) for s in sequences for _, epoch in self.node.partition("orders").epochs]

    def _in_hands(self, client: str) -> list[int]:
        return [sequence for sequence, message in enumerate(self.messages) if message.holder == client]

    # --- what happens ---------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        assert self.node.send("orders", *[b"x"] * count, producer=self.producer).acknowledged
        self.messages += [Message() for _ in range(count)]

    @rule(client=CLIENTS, count=st.integers(1, 8))
    def pull(self, client: str, count: int) -> None:
        now = self.node.clock.now()
        consumer = self._consumer(client)
        got = 0
        for start, end, attempt in self.node.pull(consumer, count).ranges:
            for sequence in range(start, end):
                message = self.messages[sequence]
                assert not message.done, f"{sequence} is done"
                assert message.holder is None, f"{sequence} is in the hands of {message.holder}"
                assert message.due[0] <= now, f"{sequence} comes early"
                assert attempt == message.attempt + 1, f"{sequence} is on attempt {attempt}"
                message.attempt, message.holder = attempt, client
                got += 1
        if got < count:
            late = [
                sequence
                for sequence, message in enumerate(self.messages)
                if not message.done and message.holder is None and message.due[1] <= now
            ]
            assert late == [], "there was room for these"

    def _choose(self, data: st.DataObject) -> tuple[Consumer, list[int]]:
        """Somebody with messages in its hands, and some of them."""
        client = data.draw(st.sampled_from(sorted({m.holder for m in self.messages if m.holder})))
        chosen = data.draw(st.lists(st.sampled_from(self._in_hands(client)), unique=True, min_size=1))
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
        consumer, chosen = self._choose(data)
        now = self.node.clock.now()
        assert self.node.nack(consumer, *self._ranges(chosen), delay=delay)
        for sequence in chosen:
            message = self.messages[sequence]
            wait = RETRY.wait(message.attempt, 0.0) if delay is None else delay
            micros = round(wait * 1_000_000)
            message.holder, message.due = None, (now + micros, now + micros + micros // 32)

    @rule(data=st.data())
    def ack_late(self, data: st.DataObject) -> None:
        """Somebody acks what failed before: the next attempt is called off."""
        waiting = [s for s, m in enumerate(self.messages) if m.attempt and m.holder is None and not m.done]
        if waiting and self.consumers:
            sequence = data.draw(st.sampled_from(waiting))
            assert self.node.ack(next(iter(self.consumers.values())), *self._ranges([sequence]))
            self.messages[sequence].done = True

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        for consumer in self.consumers.values():
            consumer.heard = self.node.clock.monotonic() + seconds
        self.node.later(seconds)

    @rule(client=CLIENTS, early=st.sampled_from([1, 1000]))
    def look_before_it_is_due(self, client: str, early: int) -> None:
        now = self.node.clock.now()
        moments = [m.due[0] for m in self.messages if not m.done and m.holder is None and m.due[0] > now + early]
        if moments:
            self.time_passes((min(moments) - early - now) / 1_000_000)
            self.pull(client, 1000)

    @rule(client=CLIENTS)
    def look_when_it_is_due(self, client: str) -> None:
        now = self.node.clock.now()
        moments = [m.due[1] for m in self.messages if not m.done and m.holder is None and m.due[1] > now]
        if moments:
            self.time_passes((min(moments) - now) / 1_000_000)
            self.pull(client, 1000)

    @rule(client=CLIENTS)
    def lose(self, client: str) -> None:
        """A consumer is silent for too long: what it held is there for the others at once."""
        consumer = self.consumers.pop(client, None)
        if consumer is None:
            return
        self.node.clock.advance(LOST_SECONDS + 1)
        for other in self.consumers.values():
            other.heard = self.node.clock.monotonic()
        self.node.membership.disconnected(consumer, consumer.session)
        self.node.membership.lose_silent()
        self.node.later(0)
        self._back(client)

    @rule(client=CLIENTS)
    def leave(self, client: str) -> None:
        consumer = self.consumers.pop(client, None)
        if consumer is not None:
            self.node.membership.detach(consumer)
            self.node.turn()
            self._back(client)

    def _back(self, client: str) -> None:
        for sequence in self._in_hands(client):
            self.messages[sequence].holder, self.messages[sequence].due = None, (0, 0)

    @rule()
    def checkpoint(self) -> None:
        self.node.checkpoint()

    @rule(orderly=st.booleans())
    def crash(self, orderly: bool) -> None:
        """The process ends; the consumers live on, and attach again with what is in their hands."""
        self.node = self.node.restart() if orderly else self.node.killed()
        self._attach_again()

    @precondition(lambda self: self.node.config.flush == "sync")
    @rule()
    def lose_power(self) -> None:
        self.node = self.node.power_lost()
        self._attach_again()

    def _attach_again(self) -> None:
        clients, self.consumers = list(self.consumers), {}
        for client in clients:
            self._consumer(client)
        self.node.later(0)

    # --- what holds -----------------------------------------------------------------------------

    @invariant()
    def everything_is_counted(self) -> None:
        group = self.node.partition("orders").groups.get("g")
        if group is None:
            return
        log = group.pull_log
        held = sum(1 for message in self.messages if message.holder is not None)
        open_count = sum(1 for message in self.messages if not message.done)
        ahead = self.node.partition("orders").visible - log.next
        assert log.held_count == held
        assert log.returned.count + log.waiting.count + ahead == open_count - held
        assert group.lost_count == 0

    def teardown(self) -> None:
        """In the end everything that is not done is handed out, once."""
        if not hasattr(self, "node"):
            return
        for client in list(self.consumers):
            self.leave(client)
        self.node.later(100)
        last = self.node.attach("orders", "g", "last")
        got: list[int] = []
        while ranges := self.node.pull(last, 1000).ranges:
            got += [sequence for start, end, _ in ranges for sequence in range(start, end)]
        assert sorted(got) == [sequence for sequence, message in enumerate(self.messages) if not message.done]


TestRetrying = Retrying.TestCase
TestRetrying.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
