"""Kills a real server under load again and again, and checks that the server keeps its promises.

One ``Load`` runs many cycles of *send and consume, SIGKILL, restart, drain*. It records what it sent, what was
acknowledged, what each group received and which acks the broker confirmed, and compares that with what is stored:

- every acknowledged message is stored at the sequence of its receipt, exactly once, unchanged, in order of sending;
- nothing else is stored;
- a send that ran during the kill is stored once, and its caller never notices the kill;
- every group gets every message, but never again a message whose ack was confirmed before the kill;
- an at-most-once group gets no message twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, Self
from zlib import crc32

import plait
from plait.client.types import Receipt
from plait.errors import FlowControl
from tests.support.process import ServerProcess

SUBJECTS = ("orders", "payments")
#: The names of a group of two consumers, of a group of one consumer, and of an at-most-once group.
SHARED, ALONE, ONCE = "shared", "alone", "once"
#: A longer wait fails the test. It allows for a machine under load.
PATIENCE_SECONDS = 180.0

_SIZES = (0, 10, 20, 100, 100, 100, 1000, 10_000)
_FILLER = random.Random(1).randbytes(1 << 16)


class Sent(NamedTuple):
    """A message as it was given to the client; its name determines all of it."""

    name: str

    @property
    def body(self) -> bytes:
        name = self.name.encode()
        chosen = crc32(name)
        start, size = chosen & 0x7FFF, _SIZES[chosen >> 16 & 7]
        return name + b"|" + _FILLER[start : start + size]

    @property
    def key(self) -> str | None:
        number = int(self.name.rpartition(".")[2])
        return None if number % 3 == 0 else f"key-{number % 7}"


class Load:
    """Producers and consumers of one server. ``async with Load(server, rng) as load``, then ``cycle`` repeatedly."""

    def __init__(self, server: ServerProcess, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._number = 0
        self._sending = False
        self._acknowledged_count = 0
        self._progressed = asyncio.Event()
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._clients: list[plait.Client] = []
        #: The number of restarts so far. An ack with a lower number was confirmed before the last kill.
        self.restarts = 0
        self.sent: dict[str, set[str]] = {subject: set() for subject in SUBJECTS}
        #: Subject → the names of messages in sends of which at least one message was refused.
        self.refused: dict[str, set[str]] = {subject: set() for subject in SUBJECTS}
        self.acknowledged: dict[str, dict[str, Receipt]] = {subject: {} for subject in SUBJECTS}
        self.delivered: dict[tuple[str, str], Counter[str]] = {}
        self.confirmed: dict[tuple[str, str], dict[str, int]] = {}
        self.broken: list[str] = []
        self._checked = dict.fromkeys(SUBJECTS, 0)
        self._last_of: dict[tuple[str, str], int] = {}
        self._seen: dict[str, set[str]] = {subject: set() for subject in SUBJECTS}

    async def __aenter__(self) -> Self:
        for compression in (None, "zstd"):
            limits = plait.ClientLimits(reconnect_max_seconds=0.1, send_seconds=PATIENCE_SECONDS)
            client = plait.connect(self._server.address, compression=compression, limits=limits)  # type: ignore[arg-type]
            self._clients.append(await client.open())
        for subject in SUBJECTS:
            for group, client_numbers in ((SHARED, (0, 1)), (ALONE, (0,)), (ONCE, (1,))):
                self.delivered[subject, group] = Counter()
                self.confirmed[subject, group] = {}
                for number in client_numbers:
                    work = self._consume(self._clients[number], subject, group)
                    task = asyncio.create_task(work)
                    task.add_done_callback(lambda _: self._progressed.set())
                    self._consuming.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        open_tasks = {*self._producing, *self._consuming}
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            _, stuck = await asyncio.wait(open_tasks, timeout=PATIENCE_SECONDS)
            assert not stuck, f"cancelled and still running: {stuck}"
        for client in self._clients:
            await client.close()

    # --- a cycle --------------------------------------------------------------------------------

    async def cycle(self, next_flush: str) -> None:
        """Load, kill, restart, drain, compare. The server restarts with ``next_flush``."""
        self._sending = True
        for client_number, client in enumerate(self._clients):
            for subject in SUBJECTS:
                for kind, send in self._ways(client):
                    name = f"{subject}.{client_number}.{kind}"
                    task = asyncio.create_task(self._produce(subject, name, send))
                    task.add_done_callback(lambda _: self._progressed.set())
                    self._producing.append(task)
        await self._in_time("send something", self._acknowledge(self._rng.randrange(1, 1500)))
        await asyncio.to_thread(self._server.kill)
        self.restarts += 1
        self._server.flush = next_flush
        if self._rng.random() < 0.3:
            await self._kill_while_starting()
        await asyncio.to_thread(self._server.start)
        await self._in_time("send something again", self._acknowledge(self._rng.randrange(1, 500)))
        self._sending = False
        await self._in_time("acknowledge all sends", asyncio.gather(*self._producing))
        self._producing.clear()
        await self._in_time("drain all groups", self._drain())
        await self._in_time("read everything back", self._compare())

    async def _in_time(self, what: str, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await work
        except TimeoutError:
            groups = await self._clients[0].admin.groups()
            tail = self._server.log[-2000:]
            raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:g} s; {groups}\n{tail}") from None

    async def _acknowledge(self, count: int) -> None:
        """Wait until ``count`` more sends are acknowledged."""
        goal = self._acknowledged_count + count
        while self._acknowledged_count < goal:
            await self._progress()

    async def _kill_while_starting(self) -> None:
        """Kill the server during recovery or right after it."""
        self._server.spawn()
        starting = asyncio.create_task(asyncio.to_thread(self._server.wait_ready))
        await asyncio.wait([starting], timeout=self._rng.uniform(0.05, 1.0))
        os.kill(self._server.pid, signal.SIGKILL)
        # Whether the server was ready or not.
        await asyncio.wait([starting])
        starting.exception()
        await asyncio.to_thread(self._server.kill)

    async def _progress(self) -> None:
        """Wait until something was acknowledged, delivered or confirmed since the last call."""
        await self._progressed.wait()
        self._progressed.clear()
        for task in [*self._producing, *self._consuming]:
            if task.done():
                task.result()

    # --- sending --------------------------------------------------------------------------------

    def _ways(self, client: plait.Client) -> list[tuple[str, Callable[[str, list[Sent]], Awaitable[list[Receipt]]]]]:
        async def send(subject: str, messages: list[Sent]) -> list[Receipt]:
            return [await client.send(subject, message.body, key=message.key) for message in messages[:1]]

        async def send_tagged(subject: str, messages: list[Sent]) -> list[Receipt]:
            tasks = [
                client.send(subject, sent.body, key=sent.key, tags=["new"], headers={"name": sent.name})
                for sent in messages[:5]
            ]
            return list(await asyncio.gather(*tasks))

        async def post(subject: str, messages: list[Sent]) -> list[Receipt]:
            tickets = [client.post(subject, message.body, key=message.key) for message in messages]
            await client.flush()
            return [await ticket for ticket in tickets]

        async def send_many(subject: str, messages: list[Sent]) -> list[Receipt]:
            bodies, keys = [message.body for message in messages], [message.key for message in messages]
            return list(await client.send_many(subject, bodies, keys=keys))

        return [("send", send), ("tagged", send_tagged), ("post", post), ("many", send_many)]

    async def _produce(
        self, subject: str, name: str, send: Callable[[str, list[Sent]], Awaitable[list[Receipt]]]
    ) -> None:
        while self._sending:
            # The method may send fewer messages than this; unused names do no harm.
            batch = []
            for _ in range(self._rng.randrange(1, 60)):
                self._number += 1
                batch.append(Sent(f"{name}.{self._number}"))
            self.sent[subject].update(message.name for message in batch)
            try:
                receipts = await send(subject, batch)
            except FlowControl:
                # The disk was busy for a second, so the broker refused some messages and the caller got an error.
                self.refused[subject].update(message.name for message in batch)
                continue
            for message, receipt in zip(batch, receipts, strict=False):
                self.acknowledged[subject][message.name] = receipt
            self._acknowledged_count += len(receipts)
            self._progressed.set()
            self.sent[subject].difference_update(message.name for message in batch[len(receipts) :])

    # --- consuming ------------------------------------------------------------------------------

    async def _consume(self, client: plait.Client, subject: str, group: str) -> None:
        delivered, confirmed = self.delivered[subject, group], self.confirmed[subject, group]
        delivery = "at_most_once" if group == ONCE else "at_least_once"
        async with client.consumer(subject, group=group, delivery=delivery) as consumer:  # type: ignore[arg-type]
            while True:
                batch = await consumer.fetch(self._rng.choice([1, 50, 1000]), wait=5.0)
                names = [self._name_of(subject, message) for message in batch]
                for name in names:
                    if delivered[name] and group == ONCE:
                        self.broken.append(f"{name} was delivered to {group} twice")
                    if confirmed.get(name, self.restarts) < self.restarts:
                        self.broken.append(f"{name} was delivered to {group} again after its ack was confirmed")
                    delivered[name] += 1
                self._progressed.set()
                if group == ONCE or not batch:
                    continue
                returned = set(range(0, len(batch), 7)) if self._rng.random() < 0.1 else set()
                for row in returned:
                    batch[row].nack()
                restarts = self.restarts
                await batch.ack()
                for row, name in enumerate(names):
                    if row not in returned and self.restarts == restarts:
                        confirmed.setdefault(name, restarts)
                self._progressed.set()

    def _name_of(self, subject: str, message: plait.Message) -> str:
        """The name of a message; records a violation if it was not sent, or was changed."""
        name = message.body.partition(b"|")[0].decode(errors="replace")
        sent = Sent(name)
        if name not in self.sent[subject]:
            self.broken.append(f"{name} in {subject} was never sent")
        elif (message.body, message.key) != (sent.body, sent.key):
            self.broken.append(f"{name} in {subject} was changed")
        elif ".tagged." in name and (message.tags, message.headers) != (["new"], {"name": name}):
            self.broken.append(f"{name} in {subject} lost its tags or headers")
        return name

    async def _drain(self) -> None:
        admin = self._clients[0].admin
        for subject in SUBJECTS:
            for group in (SHARED, ALONE, ONCE):
                while (await admin.group(subject, group)).lag:
                    await self._progress()

    # --- comparing ------------------------------------------------------------------------------

    async def _compare(self) -> None:
        for subject in SUBJECTS:
            await self._compare_stored(subject)
            for group in (SHARED, ALONE):
                missing = self._seen[subject] - self.delivered[subject, group].keys()
                if missing:
                    self.broken.append(f"{len(missing)} messages of {subject} were never delivered to {group}")
        assert not self.broken, "\n".join(self.broken[:20])

    async def _compare_stored(self, subject: str) -> None:
        """Compare what this cycle stored with what it sent."""
        end = (await self._clients[0].admin.subject(subject)).subject.end
        seen = self._seen[subject]
        async with self._clients[0].reader(subject, start=self._checked[subject]) as reader:
            while self._checked[subject] < end:
                for message in await reader.fetch(10_000, wait=5.0):
                    if message.sequence != self._checked[subject]:
                        self.broken.append(f"{subject} has {message.sequence} after {self._checked[subject] - 1}")
                    self._checked[subject] = message.sequence + 1
                    name = self._name_of(subject, message)
                    if name in seen:
                        self.broken.append(f"{name} is stored twice")
                    seen.add(name)
                    self._compare_receipt(subject, name, message)
                    producer, _, number = name.rpartition(".")
                    if self._last_of.get((subject, producer), 0) >= int(number):
                        self.broken.append(f"{name} was stored out of order")
                    self._last_of[subject, producer] = int(number)
        lost = self.acknowledged[subject].keys() - seen
        if lost:
            self.broken.append(f"{len(lost)} acknowledged messages of {subject} are lost: {sorted(lost)[:5]}")

    def _compare_receipt(self, subject: str, name: str, message: plait.Message) -> None:
        receipt = self.acknowledged[subject].get(name)
        if receipt is None and name in self.refused[subject]:
            return
        if receipt is None:
            # Every send of the cycle was acknowledged in the end.
            self.broken.append(f"{name} is stored and was not acknowledged")
        elif (receipt.message_id, receipt.sequence or message.sequence) != (message.message_id, message.sequence):
            self.broken.append(f"{name} is at {message.sequence}, its receipt says {receipt.sequence}")
