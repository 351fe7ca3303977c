"""Requests of a simulated world: each ends with its own reply, with a failure of its handler, or with an error.

The producers' processes ask, and the clients' processes answer, while the partitions of the questions and of the
replies change. Handlers fail, answer twice and give up. In the end, without faults, every request has a reply.
"""

from __future__ import annotations

import asyncio
import random

import plait
from plait.client.requests.requesting import DEFAULT_REPLY_SUBJECT
from plait.errors import PlaitError, SubjectExists
from plait.testing.sim import Main, Process, Simulation
from tests.sim.meta_servers import ADDRESSES
from tests.sim.users import CLIENT_LIMITS
from tests.sim.world.calls import Calls, Interrupted
from tests.sim.world.ledger import Ledger, Part
from tests.sim.world.plan import Plan

QUESTIONS = "questions"
#: A question whose number is a multiple of this is refused by its handler.
REFUSED_EVERY = 7
#: How long the last requests may take: their messages may wait behind those of handlers that were killed.
SECONDS_MAX = 60.0


class Requests(Part):
    """The requests of one world."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        super().__init__(simulation, plan, ledger)
        self._number = 0
        self.settled = False
        #: Requests by outcome.
        self.replies = self.refusals = self.errors = self.dropped = 0

    @property
    def _process(self) -> Process:
        return self.simulation.process("operator")

    async def create(self) -> None:
        if self.plan.requests is None:
            return
        async with self.connect(self._process) as client:
            try:
                await client.admin.create_subject(QUESTIONS, partitions=self.plan.requests.partitions)
            except SubjectExists:
                pass

    def play(self) -> None:
        """Schedule the changes of partitions."""
        for at, subject, partitions in self.plan.requests.changes if self.plan.requests is not None else ():
            name = QUESTIONS if subject == "questions" else DEFAULT_REPLY_SUBJECT
            self.simulation.call_later(
                at,
                lambda name=name, count=partitions: self._process.start(self._expand(name, count)),  # type: ignore[misc]
            )

    async def _expand(self, subject: str, partitions: int) -> None:
        try:
            async with self.connect(self._process) as client:
                await client.admin.expand_subject(subject, partitions)
        except PlaitError as error:
            self.simulation.log("operator", f"not done: {error}")

    # --- asking ---------------------------------------------------------------------------------

    def asking(self, main: Main) -> Main:
        """The main of a process that also asks."""
        if self.plan.requests is None:
            return main

        async def run(process: Process) -> None:
            await asyncio.gather(main(process), self._ask(process))

        return run

    async def _ask(self, process: Process) -> None:
        name = f"{process.name}.{process.lives}.asks"
        draw = random.Random(f"{self.plan.seed} {name}")
        calls = Calls(draw, self.plan.cancels)
        while not self.settled:
            try:
                async with self.connect(process, client_id=name) as client:
                    while not self.settled:
                        count = draw.choice((1, 1, 2, 8))
                        await asyncio.gather(*(self._request(client, draw, calls) for _ in range(count)))
                        await self.simulation.sleep(draw.uniform(0.0, 0.5))
                    self.dropped += client.dropped_replies
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _request(self, client: plait.Client, draw: random.Random, calls: Calls) -> None:
        self._number += 1
        number, timeout = self._number, draw.choice((0.05, 0.5, 3.0))
        begun = self.simulation.now
        try:
            await calls(self._one(client, number, timeout, draw.choice(("k1", "k2", None))))
        except Interrupted:
            return
        except plait.RequestTimeout:
            self.errors += 1
            if self.simulation.now - begun < timeout - 0.001:
                self.simulation.fail(f"request {number} timed out after {self.simulation.now - begun} of {timeout} s")
        except PlaitError:
            self.errors += 1

    async def _one(self, client: plait.Client, number: int, timeout: float, key: str | None) -> None:
        """One request; fails the simulation if its outcome is that of another one."""
        try:
            reply = await client.request(QUESTIONS, b"%d" % number, timeout=timeout, key=key)
        except plait.RequestFailed as error:
            self.refusals += 1
            if number % REFUSED_EVERY or error.details["reason"] != f"refused {number}":
                self.simulation.fail(f"request {number} failed with another one's failure: {error}")
        else:
            self.replies += 1
            if reply.body != b"answer %d" % number:
                self.simulation.fail(f"request {number} got another one's reply: {reply.body!r}")

    # --- answering ------------------------------------------------------------------------------

    def answering(self, main: Main) -> Main:
        """The main of a process that also answers."""
        if self.plan.requests is None:
            return main

        async def run(process: Process) -> None:
            answer = self._answer_as_app if self.plan.seed % 2 else self._answer
            await asyncio.gather(main(process), answer(process))

        return run

    async def _answer(self, process: Process) -> None:
        name = f"{process.name}.{process.lives}.answers"
        draw = random.Random(f"{self.plan.seed} {name}")
        while True:
            try:
                async with (
                    self.connect(process, client_id=name) as client,
                    client.consumer(QUESTIONS, "answers", retry=plait.Retry(first=0.1, longest=0.5)) as consumer,
                ):
                    async for message in consumer:
                        if not self.settled and draw.random() < self.plan.failures:
                            message.nack()
                            continue
                        await self.simulation.sleep(draw.choice((0.0, 0.0, 0.1)))
                        number = int(message.body)
                        if number % REFUSED_EVERY == 0:
                            await message.reply(failure=f"refused {number}")
                        else:
                            for _ in range(draw.choice((1, 1, 2))):
                                await message.reply(b"answer %d" % number)
                        message.ack()
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _answer_as_app(self, process: Process) -> None:
        name = f"{process.name}.{process.lives}.answers"
        draw = random.Random(f"{self.plan.seed} {name}")
        while True:
            app = process.app(ADDRESSES, group="answers", client_id=name, limits=CLIENT_LIMITS)

            @app.subscriber(QUESTIONS, retry=plait.Retry(first=0.1, longest=0.5), concurrency=2)
            async def answer(message: plait.Message) -> bytes | None:
                if not self.settled and draw.random() < self.plan.failures:
                    raise plait.RetryLater(0.1)
                await self.simulation.sleep(draw.choice((0.0, 0.0, 0.1)))
                number = int(message.body)
                if number % REFUSED_EVERY == 0:
                    await message.reply(failure=f"refused {number}")
                    return None
                return b"answer %d" % number

            try:
                await app.run()
            except PlaitError:
                await self.simulation.sleep(0.5)

    # --- the end --------------------------------------------------------------------------------

    async def check(self) -> None:
        """Without faults, each of several requests has its reply."""
        if self.plan.requests is None:
            return
        before = self.replies + self.refusals
        async with self.connect(self._process) as client:
            first = self._number + 1
            self._number += 10
            await asyncio.gather(*(self._one(client, first + n, SECONDS_MAX, None) for n in range(10)))
        # Earlier requests may end meanwhile.
        if self.replies + self.refusals < before + 10:
            self.simulation.fail("a request without faults has no outcome")
