"""A model of limits: a producer and a group, whose limits change between sends, pulls, pauses and crashes.

In every run, no more is stored or delivered than the limits allow, restarts give nothing, a pull that is suspended
because of a limit is answered as soon as the limit allows it, and in the end every stored message was delivered once,
in order.
"""

from __future__ import annotations

import random

from plait.errors import RateLimited
from plait.limits import RATE_STEP_SECONDS
from plait.model.rate import Rate
from plait.model.settings import with_pause, with_rate
from tests.broker.rate_record import RateRecord
from tests.support.broker_node import Node, Producer, Pulled

RATES = (None, 0.5, 4, 60)
CRASHES = ("killed", "restart", "power_lost")


class RateModel:
    """One broker with a subject ``s`` and a shared group ``g`` of one consumer, which acks at once."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"{seed} rates")
        self.node = Node(flush="sync")
        self.stored, self.delivered = RateRecord(), RateRecord()
        self.sent: list[bytes] = []
        self.got: list[bytes] = []
        self.paused = False
        self.producers = 1
        self.waiting: Pulled | None = None
        #: Since when the pull waits although there are messages, and neither a pause nor another limit began.
        self.hungry: float | None = None
        self.node.send("s", b"0")
        self.sent.append(b"0")
        self.consumer = self.node.attach("s", "g")

    @property
    def now(self) -> float:
        return self.node.clock.monotonic()

    def send(self, count: int) -> None:
        self.producers += 1
        bodies = [b"%d" % (len(self.sent) + number) for number in range(count)]
        sent = self.node.send("s", *bodies, producer=Producer(self.producers))
        if sent.acknowledged:
            # A frame is stored whole: it may be larger than what the limit has left.
            self.stored.delivered(1, self.now)
            self.sent += bodies
        else:
            assert self.stored.messages is not None
            assert isinstance(sent.error, RateLimited)
        self.look()

    def pull(self, count: int) -> None:
        if self.waiting is None:
            self.waiting = self.node.pull(self.consumer, count, wait=60.0)
            self.look()

    def look(self) -> None:
        """Take the answer of the pull, if it has one; it must not be late."""
        waiting, now = self.waiting, self.now
        if waiting is None:
            return
        if waiting.answered:
            self.waiting = self.hungry = None
            rows = waiting.rows
            assert not (rows and self.paused)
            self.delivered.delivered(len(rows), now)
            self.got += [row.body for row in rows]
            assert self.node.ack(self.consumer, *((row.sequence, row.sequence + 1, row.epoch) for row in rows))
            return
        rate = self.delivered.messages
        if self.paused or len(self.got) == len(self.sent):
            self.hungry = None
            return
        self.hungry = now if self.hungry is None else self.hungry
        longest = 0.0 if rate is None else 1 / rate + 2 * RATE_STEP_SECONDS
        assert now <= self.hungry + longest, f"the pull waits for {now - self.hungry:.2f} s at a rate of {rate}"

    def later(self, seconds: float) -> None:
        """Let time pass from one timer of the broker to the next."""
        end = self.now + seconds
        while self.now < end:
            due = self.node.broker.next_deadline
            step = end - self.now if due is None else max(min(due, end) - self.now, 1e-4)
            self.node.later(min(step, 1.0))
            self.node.contact(self.consumer)
            self.look()

    def limit(self, group: str | None, messages: float | None) -> None:
        settings = self.node.partition("s").row.settings
        self.node.broker.catalog.update_subject("s", with_rate(settings, group, Rate(messages)))
        self.node.turn()
        (self.stored if group is None else self.delivered).begin(messages, self.now)
        self.hungry = None
        self.look()

    def pause(self, *, paused: bool) -> None:
        settings = self.node.partition("s").row.settings
        self.node.broker.catalog.update_subject("s", with_pause(settings, "g", self.node.clock.now() * paused))
        self.node.turn()
        self.paused = paused
        self.look()

    def crash(self) -> None:
        self.node = getattr(self.node, self.draw.choice(CRASHES))()
        self.waiting = self.hungry = None
        for record in (self.stored, self.delivered):
            record.restarted(self.now)
        self.consumer = self.node.attach("s", "g")

    def step(self) -> None:
        step = self.draw.random()
        if step < 0.4:
            self.send(self.draw.choice((1, 1, 2, 5)))
        elif step < 0.65:
            self.pull(self.draw.choice((1, 3, 100)))
        elif step < 0.85:
            self.later(self.draw.choice((0.02, 0.1, 1.0, 3.0)))
        elif step < 0.9:
            self.limit("g", self.draw.choice(RATES))
        elif step < 0.95:
            self.limit(None, self.draw.choice(RATES))
        elif step < 0.97:
            self.pause(paused=not self.paused)
        else:
            self.crash()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.pause(paused=False)
        for _ in range(1000):
            if len(self.got) == len(self.sent):
                break
            self.pull(100)
            self.later(1.0)
        assert self.got == self.sent
