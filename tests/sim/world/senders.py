"""Producers of a simulated world: sends of every kind, now or later, cancelled and moved, each recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

import plait
from plait.errors import DiskFull, FlowControl, PlaitError, SubjectNotFound
from plait.testing.history import RecordedSend
from plait.testing.sim import Process
from tests.sim.users import CLIENT_LIMITS
from tests.sim.world.calls import Calls, Interrupted
from tests.sim.world.ledger import DELAYED, Part
from tests.sim.world.plan import DOOMED, LOOSE, address_of
from tests.sim.world.transactions import PRODUCER_GROUP, Half, Transacting

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


class Burst(NamedTuple):
    """One producer that sends something."""

    process: Process
    client: plait.Client
    subject: str
    draw: random.Random
    calls: Calls


class Senders(Part):
    """State that all producers share."""

    sending = True
    #: Set by the world.
    transacting: Transacting

    async def run(self, process: Process) -> None:
        name = f"{process.name}.{process.lives}"
        draw = random.Random(f"{self.plan.seed} {name}")
        calls = Calls(draw, self.plan.cancels)
        limits = msgspec.structs.replace(CLIENT_LIMITS, buffer_bytes=self.plan.buffer_bytes)
        while self.sending:
            try:
                async with self.connect(process, client_id=name, limits=limits) as client:
                    if self.plan.transactions:
                        client.transaction_checks(PRODUCER_GROUP, self.transacting.answer)
                    while self.sending:
                        subject = draw.choice(self.plan.subjects).name
                        await self._send(Burst(process, client, subject, draw, calls))
                        await self.simulation.sleep(draw.expovariate(1.0 / 0.3))
                    await client.flush()
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _send(self, burst: Burst) -> None:
        if self.plan.transactions and burst.draw.random() < self.plan.transactions:
            burst.process.spawn(self._transact(burst))
            return
        later = 3 if self.plan.delays else 0
        ways = (self._posts, self._awaits, self._at_once, self._many, self._later)
        how = burst.draw.choices(ways, (3, 2, 2, 2, later))[0]
        await how(burst)

    def _record(self, burst: Burst, keys: Sequence[str | None] = KEYS) -> RecordedSend:
        key = burst.draw.choice(keys)
        number = self.ledger.next_number()
        self.ledger.running[number] = burst.process, burst.process.lives
        history = self.ledger.histories[burst.subject]
        return history.send(key, number, self.simulation.now, producer=burst.client.client_id)

    def _body(self, record: RecordedSend, draw: random.Random, sizes: Sequence[int] = PADDING) -> bytes:
        return msgspec.json.encode(Body(int(record.value), "x" * draw.choice(sizes)))

    def _group_of(self, record: RecordedSend) -> str | None:
        return address_of(self.plan.addressed, int(record.value))

    def _priority(self, record: RecordedSend, burst: Burst) -> int:
        number = int(record.value)
        return number % 10 if self.plan.priorities and burst.subject == LOOSE and number % 4 == 0 else 0

    def _options(self, record: RecordedSend, burst: Burst) -> dict[str, Any]:
        return {
            "key": _key(record),
            "headers": headers_of(record),
            "to_group": self._group_of(record),
            "priority": self._priority(record, burst),
        }

    async def _posts(self, burst: Burst) -> None:
        """Post a few messages at once, in the order of the calls."""
        for _ in range(burst.draw.choice((1, 1, 2, 6))):
            record = self._record(burst)
            try:
                ticket = burst.client.post(
                    burst.subject, self._body(record, burst.draw), **self._options(record, burst)
                )
            except PlaitError as error:
                self._failed(record, error)
            else:
                burst.process.spawn(self._settle(record, burst.subject, ticket))

    async def _awaits(self, burst: Burst) -> None:
        """Send one message; the call may be cancelled."""
        record = self._record(burst)
        body = self._body(record, burst.draw)
        sending = burst.client.send(burst.subject, body, **self._options(record, burst))
        await self._settle(record, burst.subject, burst.calls(sending))

    async def _at_once(self, burst: Burst) -> None:
        """Several tasks, each sending one message after another; together they exceed a small buffer."""
        keys = burst.draw.sample(KEYS, 2)
        for _ in range(burst.draw.choice((2, 4))):
            burst.process.spawn(self._chain(burst, keys))

    async def _chain(self, burst: Burst, keys: Sequence[str | None]) -> None:
        for _ in range(3):
            # Not by ``calls``: a call that may be cancelled begins one step later, which changes the order.
            record = self._record(burst, keys)
            body = self._body(record, burst.draw, LARGE)
            sending = burst.client.send(burst.subject, body, **self._options(record, burst))
            await self._settle(record, burst.subject, sending)

    async def _many(self, burst: Burst) -> None:
        """Send several messages with one call."""
        records = [self._record(burst) for _ in range(burst.draw.choice((1, 3, 12)))]
        bodies = [self._body(record, burst.draw) for record in records]
        keys = [_key(record) for record in records]
        try:
            headers = [headers_of(record) for record in records]
            groups = [self._group_of(record) for record in records]
            ranks = [self._priority(record, burst) for record in records]
            sending = burst.client.send_many(
                burst.subject, bodies, keys=keys, headers=headers, to_group=groups, priority=ranks
            )
            receipts = await burst.calls(sending)
        except (PlaitError, Interrupted) as error:
            # Some of the messages may be stored.
            for record in records:
                self._unknown(record, error)
        else:
            for record, receipt in zip(records, receipts, strict=True):
                self._stored(record, burst.subject, receipt, None)

    async def _later(self, burst: Burst) -> None:
        """Send a delayed message, and perhaps cancel it or change its due time."""
        client, draw = burst.client, burst.draw
        record = self._record(burst, DELAYED_KEYS)
        delay = draw.choice((0.05, 0.5, draw.uniform(0.1, 6.0)))
        due = self.simulation.now + delay
        body = self._body(record, draw)
        sending = client.send(burst.subject, body, delay=delay, **self._options(record, burst))
        receipt = await self._settle(record, burst.subject, burst.calls(sending), due)
        if receipt is not None and draw.random() < 0.3:
            burst.process.spawn(self._change_mind(client, record, receipt, draw))

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

    async def _transact(self, burst: Burst) -> None:
        """Send messages to one or two subjects in a transaction."""
        draw, records = burst.draw, []
        subjects = draw.sample(self.plan.subjects, min(len(self.plan.subjects), draw.choice((1, 2))))
        for _ in range(draw.choice((1, 2, 4))):
            one = burst._replace(subject=draw.choice(subjects).name)
            # The outcome is known to the local database only, so no process waits for it.
            record = self._record(one, DELAYED_KEYS)
            self.ledger.running.pop(int(record.value))
            delay = draw.uniform(0.05, 2.0) if self.plan.delays and draw.random() < 0.3 else None
            body, group = self._body(record, draw), self._group_of(record)
            records.append(Half(record, one.subject, body, headers_of(record), delay, group))
        await self.transacting.run(burst, records)

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


def headers_of(record: RecordedSend) -> dict[str, str | int]:
    """The headers of a message, which a filtered reader examines; every third message has one more."""
    number = int(record.value)
    return {"number": number} | ({"third": "yes"} if number % 3 == 0 else {})


def _key(record: RecordedSend) -> str | None:
    assert record.key is None or isinstance(record.key, str)
    return record.key
