"""Producers of the simulated cluster: bursts of messages of a few keys, each recorded in a history.

Some messages are delayed, and some of these are cancelled. A delayed message has no key or a key that no other message
has, because delayed messages are ordered by due time. It may become due at any moment of a change of the route.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import plait
from plait.errors import FlowControl, PlaitError
from plait.testing.history import Handling, History, RecordedSend
from plait.testing.sim import Fault, Process, Simulation
from tests.sim.meta_servers import ADDRESSES
from tests.sim.users import CLIENT_LIMITS

KEYS: list[str | None] = [*(f"k{n}" for n in range(10)), None]

#: The share of messages that are delayed. Each run chooses one of these.
SHARES = (0.0, 0.3, 0.6)
#: Share of delayed messages that are cancelled.
CANCELLED = 0.15
#: How many times two brokers are cut off from each other.
CUT_OFF = 0.3
DELAYS = (0.1, 1.0, 2.5, 5.0)


class DelayedSends:
    """Which messages of a run are delayed, and by how much."""

    def __init__(self, seed: int, *, share: float | None = None) -> None:
        """``share`` replaces the share of delayed messages that the seed chooses."""
        self._draw = random.Random(f"{seed} delayed")
        self.share = self._draw.choice(SHARES) if share is None else share

    def faults(self, seconds: float, brokers: Sequence[str]) -> list[Fault]:
        """Cuts between brokers, which forward delayed messages to each other."""
        found = []
        for one, other in combinations(brokers, 2):
            if self.share and self._draw.random() < CUT_OFF:
                at = self._draw.uniform(0.5, seconds)
                found.append(Fault("cut", at, min(self._draw.uniform(0.1, 5.0), seconds - at), one, other))
        return found

    def delay(self, draw: random.Random) -> float | None:
        """The delay of the next message; None: it is not delayed."""
        if not self.share or draw.random() >= self.share:
            return None
        return draw.uniform(0.01, draw.choice(DELAYS))

    @staticmethod
    def key(number: int, draw: random.Random) -> str | None:
        """The key of a delayed message."""
        return draw.choice((f"late-{number}", f"late-{number}", None))

    @staticmethod
    async def cancelled(client: plait.Client, receipt: plait.Receipt, draw: random.Random) -> bool | None:
        """Perhaps cancel the message. Returns whether it was cancelled; None: unknown."""
        if draw.random() >= CANCELLED:
            return False
        try:
            return await client.cancel(receipt)
        except PlaitError:
            return None


class Senders:
    """State that all producers share: whether they continue, and which messages are not handled yet."""

    def __init__(
        self,
        simulation: Simulation,
        histories: dict[str, History],
        delayed: DelayedSends,
        *,
        many: bool = False,
    ) -> None:
        self.simulation = simulation
        self.histories = histories
        self._delayed = delayed
        self.sending = True
        self._bursts = (4, 8) if many else (1, 1, 2, 6)
        self._number = 0
        #: Number of a send without an outcome → (process, life): the process that sends, and the number of its start.
        self._under_way: dict[int, tuple[Process, int]] = {}
        #: The messages that are stored and not yet handled.
        self.waiting: set[int] = set()
        self.done: set[int] = set()
        #: When a message was handled last.
        self.progress = 0.0

    def handled(self, handling: Handling) -> None:
        number = int(handling.value)
        self.progress = self.simulation.now
        self.done.add(number)
        self.waiting.discard(number)

    def drained(self) -> bool:
        return not self.waiting and not any(process.lives == life for process, life in self._under_way.values())

    async def run(self, process: Process) -> None:
        name = f"{process.name}.{process.lives}"
        draw = random.Random(f"{self.simulation.seed} {name}")
        while self.sending:
            try:
                async with process.connect(ADDRESSES, client_id=name, limits=CLIENT_LIMITS) as client:
                    while self.sending:
                        self._burst(process, client, draw)
                        await self.simulation.sleep(draw.expovariate(1.0 / 0.3))
                    await client.flush()
            except PlaitError:
                await self.simulation.sleep(0.5)

    def _burst(self, process: Process, client: plait.Client, draw: random.Random) -> None:
        """Post a few messages at once, in the order of the calls."""
        subject = draw.choice(list(self.histories))
        for _ in range(draw.choice(self._bursts)):
            number = self._number = self._number + 1
            key, delay = draw.choice(KEYS), self._delayed.delay(draw)
            if delay is not None:
                key = self._delayed.key(number, draw)
            record = self.histories[subject].send(key, number, self.simulation.now, producer=client.client_id)
            body = f"{number}|".encode() + bytes(draw.choice((0, 0, 100, 2000)))
            self._under_way[number] = process, process.lives
            try:
                ticket = client.post(subject, body, key=key, delay=delay)
            except PlaitError as error:
                del self._under_way[number]
                record.failed(error, self.simulation.now)
            else:
                process.spawn(self._sent(client, ticket, number, record, draw))

    async def _sent(
        self, client: plait.Client, ticket: plait.Ticket, number: int, record: RecordedSend, draw: random.Random
    ) -> None:
        try:
            receipt = await ticket
            cancelled = receipt.schedule is not None and await self._delayed.cancelled(client, receipt, draw)
        except FlowControl as error:
            record.failed(error, self.simulation.now)
        except PlaitError as error:
            record.unknown(error, self.simulation.now)
        else:
            if cancelled is None:
                record.unknown("it may be cancelled", self.simulation.now)
            elif cancelled:
                record.failed("it is cancelled", self.simulation.now)
            else:
                # A delayed message gets its sequence when it is due.
                place = None if receipt.sequence is None else (str(receipt.partition), receipt.sequence)
                record.ok(place, self.simulation.now)
                if number not in self.done:
                    self.waiting.add(number)
        del self._under_way[number]
