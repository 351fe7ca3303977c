"""Producers of a simulated world: sends of every kind, now or later, cancelled and moved, each recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

import plait
from plait.errors import DiskFull, FlowControl, PlaitError, SubjectNotFound
from plait.testing.history import RecordedSend
from plait.testing.sim import Process, Simulation
from tests.sim.world.calls import Calls, Interrupted
from tests.sim.world.ledger import DELAYED, Ledger
from tests.sim.world.plan import DOOMED, Plan

KEYS: list[str | None] = [*(f"k{n}" for n in range(8)), None]
DELAYED_KEYS: list[str | None] = [*(f"{DELAYED}{n}" for n in range(8)), None]
PADDING = (0, 0, 0, 100, 2000, 9000)
#: A few bodies of this size exceed a small buffer.
LARGE = (0, 1500, 2500)
#: Errors after which the message is not stored and never will be.
REFUSED = (FlowControl, DiskFull, SubjectNotFound)


class Body(msgspec.Struct):
    """The body of every message."""

    number: int
    padding: str = ""


class Senders:
    """State that all producers share."""

    def __init__(
        self,
        simulation: Simulation,
        plan: Plan,
        ledger: Ledger,
        addresses: Sequence[str],
        limits: plait.ClientLimits,
    ) -> None:
        self.simulation = simulation
        self.plan = plan
        self.ledger = ledger
        self.sending = True
        self._addresses = addresses
        self._limits = msgspec.structs.replace(limits, buffer_bytes=plan.buffer_bytes)

    async def run(self, process: Process) -> None:
        """The main of a producer."""
        name = f"{process.name}.{process.lives}"
        draw = random.Random(f"{self.plan.seed} {name}")
        calls = Calls(draw, self.plan.cancels)
        while self.sending:
            try:
                async with process.connect(self._addresses, client_id=name, limits=self._limits) as client:
                    while self.sending:
                        subject = draw.choice(self.plan.subjects).name
                        await self._burst(process, client, subject, draw, calls)
                        await self.simulation.sleep(draw.expovariate(1.0 / 0.3))
                    await client.flush()
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _burst(
        self, process: Process, client: plait.Client, subject: str, draw: random.Random, calls: Calls
    ) -> None:
        later = 3 if self.plan.delays else 0
        ways = (self._posts, self._awaits, self._at_once, self._many, self._later)
        how = draw.choices(ways, (3, 2, 2, 2, later))[0]
        await how(process, client, subject, draw, calls)

    def _record(self, process: Process, client: plait.Client, subject: str, key: str | None) -> RecordedSend:
        number = self.ledger.next_number()
        self.ledger.running[number] = process, process.lives
        history = self.ledger.histories[subject]
        return history.send(key, number, self.simulation.now, producer=client.client_id)

    def _body(self, record: RecordedSend, draw: random.Random) -> bytes:
        return msgspec.json.encode(Body(int(record.value), "x" * draw.choice(PADDING)))

    async def _posts(
        self, process: Process, client: plait.Client, subject: str, draw: random.Random, calls: Calls
    ) -> None:
        """Post a few messages at once, in the order of the calls."""
        for _ in range(draw.choice((1, 1, 2, 6))):
            record = self._record(process, client, subject, draw.choice(KEYS))
            try:
                ticket = client.post(subject, self._body(record, draw), key=_key(record))
            except PlaitError as error:
                self._failed(record, error)
            else:
                process.spawn(self._settle(record, subject, ticket))

    async def _awaits(
        self, process: Process, client: plait.Client, subject: str, draw: random.Random, calls: Calls
    ) -> None:
        """Send one message; the call may be cancelled."""
        record = self._record(process, client, subject, draw.choice(KEYS))
        await self._settle(record, subject, calls(client.send(subject, self._body(record, draw), key=_key(record))))

    async def _at_once(
        self, process: Process, client: plait.Client, subject: str, draw: random.Random, calls: Calls
    ) -> None:
        """Several tasks, each sending one message after another; together they exceed a small buffer."""
        keys = draw.sample(KEYS, 2)
        for _ in range(draw.choice((2, 4))):
            process.spawn(self._chain(process, client, subject, keys, draw))

    async def _chain(
        self,
        process: Process,
        client: plait.Client,
        subject: str,
        keys: Sequence[str | None],
        draw: random.Random,
    ) -> None:
        for _ in range(3):
            # Not by ``calls``: a call that may be cancelled begins one step later, which changes the order.
            record = self._record(process, client, subject, draw.choice(keys))
            body = msgspec.json.encode(Body(int(record.value), "x" * draw.choice(LARGE)))
            await self._settle(record, subject, client.send(subject, body, key=_key(record)))

    async def _many(
        self, process: Process, client: plait.Client, subject: str, draw: random.Random, calls: Calls
    ) -> None:
        """Send several messages with one call."""
        records = [self._record(process, client, subject, draw.choice(KEYS)) for _ in range(draw.choice((1, 3, 12)))]
        bodies = [self._body(record, draw) for record in records]
        keys = [_key(record) for record in records]
        try:
            receipts = await calls(client.send_many(subject, bodies, keys=keys))
        except (PlaitError, Interrupted) as error:
            # Some of the messages may be stored.
            for record in records:
                self._unknown(record, error)
        else:
            for record, receipt in zip(records, receipts, strict=True):
                self._stored(record, subject, receipt, None)

    async def _later(
        self, process: Process, client: plait.Client, subject: str, draw: random.Random, calls: Calls
    ) -> None:
        """Send a delayed message, and perhaps cancel it or change its due time."""
        record = self._record(process, client, subject, draw.choice(DELAYED_KEYS))
        delay = draw.choice((0.05, 0.5, draw.uniform(0.1, 6.0)))
        due = self.simulation.now + delay
        body = self._body(record, draw)
        receipt = await self._settle(
            record, subject, calls(client.send(subject, body, key=_key(record), delay=delay)), due
        )
        if receipt is not None and draw.random() < 0.3:
            process.spawn(self._change_mind(client, record, receipt, draw))

    async def _change_mind(
        self, client: plait.Client, record: RecordedSend, receipt: plait.Receipt, draw: random.Random
    ) -> None:
        await self.simulation.sleep(draw.uniform(0.0, 2.0))
        number = int(record.value)
        if draw.random() < 0.3:
            try:
                await client.reschedule(receipt, delay=draw.uniform(0.05, 3.0))
            except PlaitError:
                pass
            return
        self.ledger.perhaps_cancelled.add(number)
        try:
            cancelled = await client.cancel(receipt)
        except PlaitError:
            return
        self.ledger.perhaps_cancelled.discard(number)
        if cancelled:
            self.ledger.cancelled.add(number)

    # --- outcomes -------------------------------------------------------------------------------

    async def _settle(
        self, record: RecordedSend, subject: str, sending: Any, due: float | None = None
    ) -> plait.Receipt | None:
        try:
            receipt: plait.Receipt = await sending
        except REFUSED as error:
            self._failed(record, error)
        except (PlaitError, Interrupted) as error:
            self._unknown(record, error)
        else:
            self._stored(record, subject, receipt, due)
            return receipt
        return None

    def _stored(self, record: RecordedSend, subject: str, receipt: plait.Receipt, due: float | None) -> None:
        place = None if receipt.sequence is None else (str(receipt.partition), receipt.sequence)
        record.ok(place, self.simulation.now)
        self.ledger.running.pop(int(record.value), None)
        if subject != DOOMED:
            self.ledger.stored(record, subject, due)

    def _failed(self, record: RecordedSend, error: Exception) -> None:
        record.failed(error, self.simulation.now)
        self.ledger.running.pop(int(record.value), None)

    def _unknown(self, record: RecordedSend, error: Exception) -> None:
        record.unknown(error, self.simulation.now)
        self.ledger.running.pop(int(record.value), None)


def _key(record: RecordedSend) -> str | None:
    assert record.key is None or isinstance(record.key, str)
    return record.key
