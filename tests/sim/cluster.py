"""A broker, producers and shared consumers in a simulation, with faults from a seed and a recorded history.

The processes run Plait's own classes: ``Server``, ``Client``, ``Consumer`` and ``App``. ``Cluster.run`` plays the
faults, ends them, waits until every sent message is handled, and checks the history.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

import plait
from plait.broker import BrokerConfig
from plait.errors import FlowControl, PlaitError
from plait.limits import KIB, MIB
from plait.server import Server
from plait.testing.checker import Violation, check
from plait.testing.history import Handling, History, RecordedSend, Value
from plait.testing.sim import Fault, FaultKind, Faults, Process, Simulation, SimulationFailed, play

T = TypeVar("T")

ADDRESS = "plait://127.0.0.1:7450"
SUBJECT, GROUP = "orders", "billing"
#: Small segments and frequent checkpoints, so that a short run has many of both.
CONFIG = BrokerConfig(
    copy_partitions=1,
    message_segment_size=32 * KIB,
    action_segment_size=16 * KIB,
    retained_segment_size=16 * KIB,
    checkpoint_seconds=5.0,
    disk_used_max=1.0,
    disk_free_min=1 * MIB,
)
#: The probability that a client's call is cancelled, at a random step.
CANCELLED = 0.05
#: The loss of a consumer counts as an attempt of its messages. So many attempts are allowed that no message becomes a
#: dead letter.
RETRY = plait.Retry(attempts=10_000, first=0.2, longest=2.0)
WEIGHTS: dict[FaultKind, float] = {"kill": 3, "crash_at": 2, "pause": 2, "cut": 2, "cut_one_way": 1, "jump": 1}
#: How long the effects of a fault outlast it: a lost consumer, reconnects.
AFTERMATH_SECONDS = 10.0
#: More than the longest reconnect pause, the time until a consumer is lost, and retries together.
DRAIN_SECONDS = 120.0


async def serve(process: Process, config: BrokerConfig = CONFIG) -> None:
    """The main of a broker's process; it ends when storage fails."""
    server = Server(process.disk, config, clock=process.clock)
    await server.start()
    assert server.failed is not None
    raise await server.failed


class Cluster:
    """``run`` runs one seed. ``script`` replaces the faults of the seed. ``lose``: the run may also lose a consumer."""

    def __init__(
        self,
        seed: int,
        *,
        seconds: float = 15.0,
        producers: int = 2,
        consumers: int = 2,
        flush: Literal["async", "sync"] = "async",
        script: Sequence[Fault] | None = None,
        lose: bool = True,
    ) -> None:
        self.simulation = sim = Simulation(seed)
        self.history = History()
        self.seconds = seconds
        self.config = msgspec.structs.replace(CONFIG, flush=flush)
        self.random = random.Random(f"{seed} cluster")
        self.sending = True
        self._lose = lose
        self._number = 0
        #: Value of a send without an outcome → (process, life): the process that sends, and the number of its start.
        self._sending: dict[Value, tuple[Process, int]] = {}
        #: The messages that are stored and not yet handled.
        self.waiting: set[int] = set()
        self.done: set[int] = set()
        self.broker = sim.process("broker", self._serve)
        self.producers = [sim.process(f"producer-{n}", self._produce) for n in range(producers)]
        self.consumers = [sim.process(f"consumer-{n}", self._consume) for n in range(consumers)]
        self.consumers.append(sim.process("app", self._run_app))
        self.once = sim.process("once", self._consume_once)
        #: Message → how often the at-most-once group received it.
        self.got_once: Counter[int] = Counter()
        if script is None:
            others = [process.name for process in (*self.producers, *self.consumers, self.once)]
            script = Faults(
                self.random,
                ["broker", *others],
                [("broker", other) for other in others],
                disks=["broker"],
                # With "async" a power loss may lose acknowledged messages.
                weights=WEIGHTS if flush == "async" else WEIGHTS | {"power_loss": 2},
                # Retries use the broker's wall clock. Setting it back by more would delay them for too long.
                jump_seconds=20.0,
            ).script(seconds)
        self.script = script

    def run(self) -> list[Violation]:
        sim = self.simulation
        with sim:
            for process in (self.broker, *self.producers, *self.consumers, self.once):
                process.start()
            play(sim, self.script, self._fault)
            sim.run_for(self.seconds)
            if self._lose and self.random.random() < 0.5:
                self._lose_permanently(self.random.choice(self.consumers))
            sim.heal()
            self.sending = False
            try:
                sim.run_until(self._drained, seconds=DRAIN_SECONDS, waiting_for="draining")
            except SimulationFailed as failure:
                failure.add_note(f"not handled: {sorted(self.waiting)[:20]}")
                raise
            # A consumer that still holds a message handles it now. The check then reports it as a duplicate.
            sim.run_for(20.0)
            found = check(self.history, ordered=False, groups=[GROUP])
            assert found == [], "\n".join(map(str, found))
            assert [number for number, count in self.got_once.items() if count > 1] == []
            if not self.script:
                # Rows that a consumer pulled ahead are lost only if the consumer dies.
                assert sorted(self.done - self.got_once.keys()) == [], "not delivered at most once, without a fault"
        return found

    def _drained(self) -> bool:
        return not self.waiting and not any(process.lives == life for process, life in self._sending.values())

    def _lose_permanently(self, consumer: Process) -> None:
        """Kill a consumer permanently. The others receive its messages."""
        consumer.main = None
        consumer.kill()
        self.history.broken("gone", self.simulation.now, consumer=consumer.name)
        self.history.gone(consumer.name, self.simulation.now)

    def _fault(self, fault: Fault) -> None:
        """Record in the history what the fault excuses.

        A kill or pause of the broker excuses nothing: its consumers reconnect and report the rows they hold. A crash
        during a turn may lose the record of a delivery.
        """
        now = self.simulation.now
        until = now + fault.seconds + AFTERMATH_SECONDS
        names = {fault.process, fault.other}
        if fault.kind == "jump" or names & {process.name for process in (*self.producers, self.once)}:
            return
        consumers = names & {process.name for process in self.consumers}
        if not consumers and fault.kind in ("crash_at", "power_loss"):
            self.history.broken(fault.kind, now, until=until, forgets=fault.kind == "power_loss")
        for consumer in consumers:
            self.history.broken(fault.kind, now, until=until, consumer=consumer)
            if fault.kind in ("kill", "power_loss"):
                self.history.gone(consumer, now)

    # --- the processes --------------------------------------------------------------------------

    async def _serve(self, process: Process) -> None:
        await serve(process, self.config)

    async def _produce(self, process: Process) -> None:
        name = f"{process.name}.{process.lives}"
        draw = random.Random(f"{self.simulation.seed} {name}")
        while self.sending:
            try:
                async with process.connect(ADDRESS, client_id=name) as client:
                    while self.sending:
                        await self._send(process, client, draw)
                        await self.simulation.sleep(draw.expovariate(1.0 / 0.15))
            except PlaitError:
                # The broker is down: try again.
                await self.simulation.sleep(1.0)

    async def _send(self, process: Process, client: plait.Client, draw: random.Random) -> None:
        """Send one or several messages, with one of the client's methods."""
        way = draw.choices(["send", "post", "send_many", "delay"], [6, 1, 1, 1])[0]
        count = draw.randint(2, 10) if way in ("post", "send_many") else 1
        messages = [self._message(client, draw) for _ in range(count)]
        numbers = [record.value for record, _ in messages]
        self._sending[numbers[0]] = process, process.lives
        if way == "post":
            tickets = [client.post(SUBJECT, body, key=record.key) for record, body in messages]
            for (record, _), ticket in zip(messages, tickets, strict=True):
                await self._outcome([record], _one(ticket))
        else:
            records = [record for record, _ in messages]
            [record, *_], body = records, messages[0][1]
            if way == "send_many":
                bodies = [body for _, body in messages]
                await self._outcome(records, client.send_many(SUBJECT, bodies, keys=[each.key for each in records]))
            elif way == "delay":
                await self._outcome(
                    records, _one(client.send(SUBJECT, body, key=record.key, delay=draw.uniform(0.05, 3)))
                )
            else:
                await self._outcome(records, _one(client.send(SUBJECT, body, key=record.key)))
        del self._sending[numbers[0]]

    def _message(self, client: plait.Client, draw: random.Random) -> tuple[RecordedSend, bytes]:
        number = self._number = self._number + 1
        key = draw.choice([None, "a", "b", "c"])
        record = self.history.send(key, number, self.simulation.now, producer=client.client_id)
        return record, f"{number}|".encode() + bytes(draw.choice((0, 100, 3000)))

    async def _outcome(self, records: list[RecordedSend], sending: Awaitable[Iterable[plait.Receipt]]) -> None:
        try:
            receipts = list(await sending)
        except FlowControl as error:
            for record in records:
                # Of several messages, only some may have been refused.
                (record.failed if len(records) == 1 else record.unknown)(error, self.simulation.now)
        except PlaitError as error:
            for record in records:
                record.unknown(error, self.simulation.now)
        else:
            for record, receipt in zip(records, receipts, strict=True):
                place = None if receipt.sequence is None else (str(receipt.partition), receipt.sequence)
                record.ok(place, self.simulation.now)
                if record.value not in self.done:
                    self.waiting.add(int(record.value))

    async def _consume(self, process: Process) -> None:
        draw = random.Random(f"{self.simulation.seed} {process.name}.{process.lives}")
        while True:
            try:
                async with process.connect(ADDRESS, client_id=process.name) as client:
                    # Now and then it closes and attaches again, with the same client or a new one.
                    while draw.random() < 0.9:
                        consumer = client.consumer(SUBJECT, GROUP, retry=RETRY)
                        if await self._at_some_step(consumer.__aenter__(), draw) is not None:
                            await self._fetch(process, consumer, draw)
                            await self._at_some_step(consumer.close(), draw)
                            still = [
                                str(each.partition) for each in consumer._fetcher.clients if each.session is not None
                            ]
                            assert not still, f"{process.name} is attached to {still} after it was closed"
            except PlaitError:
                await self.simulation.sleep(1.0)

    async def _fetch(self, process: Process, consumer: plait.Consumer, draw: random.Random) -> None:
        while draw.random() < 0.97:
            fetching = consumer.fetch(draw.choice((1, 5, 50)), wait=draw.uniform(0.0, 2.0))
            batch = await self._at_some_step(fetching, draw)
            handled = [await self._handle(process, message, draw) for message in batch or ()]
            await self._acked(consumer, [each for each in handled if each is not None], draw)

    async def _at_some_step(self, call: Coroutine[Any, Any, T], draw: random.Random) -> T | None:
        """The result of a call; None if the call was cancelled at a random step, which happens now and then."""
        if draw.random() >= CANCELLED:
            return await call
        task = asyncio.ensure_future(call)
        await asyncio.wait([task], timeout=draw.choice((0.0001, 0.001, 0.01, 0.1)) * draw.random())
        task.cancel()
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    async def _handle(self, process: Process, message: plait.Message, draw: random.Random) -> Handling | None:
        """Handle a message; returns the handling if it succeeded."""
        handling = self._begin(process, message)
        if draw.random() < 0.3:
            await self.simulation.sleep(draw.uniform(0.0, 0.3))
        if draw.random() < 0.1:
            handling.failed(self.simulation.now)
            message.nack(delay=draw.uniform(0.0, 0.5))
            return None
        self._end(handling)
        message.ack()
        return handling

    async def _acked(self, consumer: plait.Consumer, handled: list[Handling], draw: random.Random) -> None:
        try:
            flushed = await self._at_some_step(_flush(consumer), draw)
        except PlaitError:
            for handling in handled:
                handling.ack_unknown(self.simulation.now)
            raise
        for handling in handled:
            (handling.ack_ok if flushed else handling.ack_unknown)(self.simulation.now)

    async def _run_app(self, process: Process) -> None:
        draw = random.Random(f"{self.simulation.seed} {process.name}.{process.lives}")
        app = process.app(ADDRESS, group=GROUP, client_id=process.name)

        @app.subscriber(SUBJECT, concurrency=3, retry=RETRY)
        async def handle(message: plait.Message) -> None:
            handling = self._begin(process, message)
            await self.simulation.sleep(draw.uniform(0.0, 0.2))
            if draw.random() < 0.1:
                handling.failed(self.simulation.now)
                raise plait.RetryLater(draw.uniform(0.0, 0.5))
            self._end(handling)

        while True:
            try:
                running = asyncio.ensure_future(app.run())
                # Now and then it is stopped or cancelled, and runs again.
                await asyncio.wait([running], timeout=draw.expovariate(1.0 / 20.0))
                draw.choice((app.stop, running.cancel))()
                if draw.random() < 0.3:
                    await asyncio.wait([running], timeout=0.05 * draw.random())
                    running.cancel()
                await asyncio.wait([running])
                if not running.cancelled():
                    running.result()
            except PlaitError:
                await self.simulation.sleep(1.0)

    async def _consume_once(self, process: Process) -> None:
        draw = random.Random(f"{self.simulation.seed} {process.name}.{process.lives}")
        while True:
            try:
                async with (
                    process.connect(ADDRESS, client_id=process.name) as client,
                    client.consumer(SUBJECT, "once", delivery="at_most_once") as consumer,
                ):
                    async for message in consumer:
                        self.got_once[_number_of(message)] += 1
                        if draw.random() < 0.03:
                            # After a clean close the next consumer receives the rows that this one pulled ahead.
                            break
            except PlaitError:
                await self.simulation.sleep(1.0)

    def _begin(self, process: Process, message: plait.Message) -> Handling:
        place = (str(message.partition), message.sequence)
        return self.history.handle(
            process.name,
            message.key,
            _number_of(message),
            message.attempt,
            place=place,
            time=self.simulation.now,
            group=GROUP,
        )

    def _end(self, handling: Handling) -> None:
        handling.done(self.simulation.now)
        number = int(handling.value)
        self.done.add(number)
        self.waiting.discard(number)


async def _flush(consumer: plait.Consumer) -> bool:
    await consumer.flush()
    return True


def _number_of(message: plait.Message) -> int:
    return int(message.body.split(b"|")[0])


async def _one(sending: Awaitable[plait.Receipt]) -> list[plait.Receipt]:
    return [await sending]
