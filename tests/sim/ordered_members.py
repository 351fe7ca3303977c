"""Ordered consumers of the simulated cluster: they join, leave, fail now and then, and record a history.

There are three kinds of consumers: one iterates with two tasks, one fetches batches, and one is an ``App``. A consumer
that fetches and an ``App`` may be paused after they receive a message and before they begin with it, so that the lease
ends unnoticed. So they do what the documentation recommends: they check that no consumer has handled the key under a
higher epoch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Literal

import plait
from plait.errors import PlaitError
from plait.model.logical_partitions import lp_of_key
from plait.testing.history import Handling, History
from plait.testing.sim import Main, Process, Simulation
from tests.sim.meta_servers import ADDRESSES
from tests.sim.users import CLIENT_LIMITS, until_it_leaves

STRICT, LOOSE = "orders", "prices"
GROUP = "billing"
RETRY = plait.Retry(attempts=5, first=0.1, longest=0.5)


class _Fenced(Exception):
    """Another consumer has handled the key under a higher epoch."""


class Members:
    """State that all consumers share."""

    def __init__(
        self,
        simulation: Simulation,
        histories: dict[str, History],
        *,
        on_begin: Callable[[Process, plait.Message, int], None],
        on_done: Callable[[Handling], None],
        slow: float = 0.0,
        affinity: bool = False,
    ) -> None:
        self.simulation = simulation
        self.histories = histories
        #: Called with each message that a consumer begins with without checking epochs, and with its lock.
        self._on_begin = on_begin
        self._on_done = on_done
        #: Handling a message takes about this long, so that a backlog forms.
        self._slow = slow
        #: False for a group by affinity, whose order is not checked.
        self._ordered = not affinity
        self._affinity: Literal["key"] | None = "key" if affinity else None
        #: True when all faults have ended. Then members stay, and handlers succeed.
        self.settled = False
        #: The highest epoch seen, by (subject, key) for keys under their own lock, and by (partition, lock) for rows
        #: without keys.
        self._epochs: dict[tuple[str, str | int], int] = {}
        #: Keys of the best-tried subject that have messages in another partition, because their own partition could not
        #: be reached. These messages are under other locks, and their order is not promised.
        self.moved: set[str] = set()

    def settle(self) -> None:
        self.settled = True

    def main(self, number: int, subjects: Sequence[str]) -> Main:
        async def run(process: Process) -> None:
            draw = random.Random(f"{self.simulation.seed} {process.name}.{process.lives}")
            while True:
                try:
                    await (self._app if number % 3 == 2 else self._client)(process, number, subjects, draw)
                except PlaitError:
                    await self.simulation.sleep(0.5)
                await self.simulation.sleep(draw.uniform(0.0, 1.0))

        return run

    # --- kinds ----------------------------------------------------------------------------------

    async def _client(self, process: Process, number: int, subjects: Sequence[str], draw: random.Random) -> None:
        async with process.connect(ADDRESSES, client_id=process.name, limits=CLIENT_LIMITS) as client:
            await asyncio.gather(*(self._members(process, client, number, subject, draw) for subject in subjects))

    async def _members(
        self, process: Process, client: plait.Client, number: int, subject: str, draw: random.Random
    ) -> None:
        """Be a member of each subject's group until it leaves; an error of one subject does not end the others."""
        while True:
            try:
                return await self._member(process, client, number, subject, draw)
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _member(
        self, process: Process, client: plait.Client, number: int, subject: str, draw: random.Random
    ) -> None:
        prefetch = 200 if self._slow else draw.choice((1, 10, 200))
        async with client.consumer(
            subject, GROUP, retry=RETRY, ordered=self._ordered, affinity=self._affinity, prefetch=prefetch
        ) as consumer:
            if number % 3 == 0:
                tasks = [asyncio.create_task(self._iterate(process, consumer, draw)) for _ in range(2)]
            else:
                tasks = [asyncio.create_task(self._fetch(process, consumer, draw))]
            await until_it_leaves(tasks, self._stay(draw))

    async def _stay(self, draw: random.Random) -> None:
        await self.simulation.sleep(draw.expovariate(1.0 / 8.0))
        if self.settled:
            await asyncio.get_running_loop().create_future()

    async def _iterate(self, process: Process, consumer: plait.Consumer, draw: random.Random) -> None:
        done = []
        async for message in consumer:
            handling = await self._handle(process, message, draw, fenced=False)
            if handling is not None:
                done.append(handling)
            if draw.random() < 0.3:
                await self._acked(consumer, done)
                done = []

    async def _fetch(self, process: Process, consumer: plait.Consumer, draw: random.Random) -> None:
        while True:
            batch = await consumer.fetch(draw.choice((1, 5, 50)), wait=draw.uniform(0.0, 2.0))
            failed: set[str | None] = set()
            done = []
            for message in batch:
                if message.key is not None and message.key in failed and self._in_order(message):
                    # It is delivered again, after the one that failed.
                    continue
                handling = await self._handle(process, message, draw, fenced=True)
                if handling is None:
                    failed.add(message.key)
                else:
                    done.append(handling)
            await self._acked(consumer, done)

    async def _acked(self, consumer: plait.Consumer, handled: list[Handling]) -> None:
        try:
            await consumer.flush()
        except PlaitError:
            for handling in handled:
                handling.ack_unknown(self.simulation.now)
            raise
        for handling in handled:
            handling.ack_ok(self.simulation.now)

    async def _app(self, process: Process, number: int, subjects: Sequence[str], draw: random.Random) -> None:
        app = process.app(ADDRESSES, group=GROUP, client_id=process.name, limits=CLIENT_LIMITS)
        for subject in subjects:

            @app.subscriber(subject, concurrency=3, retry=RETRY, ordered=self._ordered, affinity=self._affinity)
            async def handle(message: plait.Message) -> None:
                await self._in_app(process, message, draw)

        stop = asyncio.get_running_loop().create_task(self._stay(draw))
        stop.add_done_callback(lambda _: app.stop())
        try:
            await app.run()
        finally:
            stop.cancel()

    # --- handling -------------------------------------------------------------------------------

    def _in_order(self, message: plait.Message) -> bool:
        return self._ordered and message.subject == STRICT

    def _begin(self, process: Process, message: plait.Message, *, fenced: bool) -> Handling:
        key, lp = message.key, None
        lock = int(message._delivered.lps[message._row])
        if key is None:
            # A row without a key is under any lock of the consumer on that partition.
            self._fence((str(message.partition), lock), message.epoch, fenced=fenced)
        else:
            lp = lp_of_key(key)
            if self._ordered and (message.subject == STRICT or lock == lp):
                self._fence((message.subject, key), message.epoch, fenced=fenced)
            elif lock != lp:
                # The message is not under the lock of its key's LP.
                self.moved.add(key)
                lp = None
        if not fenced:
            self._on_begin(process, message, lock)
        return self.histories[message.subject].handle(
            process.name,
            message.key,
            int(message.body.split(b"|")[0]),
            message.attempt,
            message.epoch,
            lp,
            (str(message.partition), message.sequence),
            self.simulation.now,
            group=GROUP,
        )

    def _fence(self, what: tuple[str, str | int], epoch: int, *, fenced: bool) -> None:
        highest = self._epochs.get(what, 0)
        if fenced and epoch < highest:
            raise _Fenced
        self._epochs[what] = max(highest, epoch)

    async def _work(self, handling: Handling, draw: random.Random) -> bool:
        """Do the handler's work; returns whether it succeeded."""
        if self._slow and not self.settled:
            await self.simulation.sleep(self._slow * draw.uniform(0.8, 1.2))
        elif draw.random() < 0.4:
            await self.simulation.sleep(draw.uniform(0.0, 0.3))
        if not self.settled and (draw.random() < 0.05 or int(handling.value) % 97 == 0):
            handling.failed(self.simulation.now)
            return False
        handling.done(self.simulation.now)
        self._on_done(handling)
        return True

    async def _handle(
        self, process: Process, message: plait.Message, draw: random.Random, *, fenced: bool
    ) -> Handling | None:
        """Handle a message; returns the handling if it succeeded."""
        try:
            handling = self._begin(process, message, fenced=fenced)
        except _Fenced:
            message.nack(delay=0)
            return None
        work = asyncio.ensure_future(self._finish(message, handling, draw))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A member that leaves finishes its current message.
            await work
            raise

    async def _finish(self, message: plait.Message, handling: Handling, draw: random.Random) -> Handling | None:
        if await self._work(handling, draw):
            message.ack()
            return handling
        message.nack(delay=draw.choice((None, draw.uniform(0.0, 0.5))))
        return None

    async def _in_app(self, process: Process, message: plait.Message, draw: random.Random) -> None:
        try:
            handling = self._begin(process, message, fenced=True)
        except _Fenced:
            raise plait.RetryLater(0.1) from None
        if not await self._work(handling, draw):
            raise plait.RetryLater(draw.uniform(0.0, 0.5))
