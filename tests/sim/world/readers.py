"""Readers of a simulated world, which browse a subject from its beginning.

One must see every row once, in order. The other has a filter, and must see every row that matches, in order.
"""

from __future__ import annotations

import random

import plait
from plait.errors import PlaitError
from plait.testing.sim import Process, Simulation
from tests.sim.world.calls import Calls, Interrupted
from tests.sim.world.ledger import Ledger, Part
from tests.sim.world.plan import DOOMED, Plan, SubjectPlan

#: What the filtered reader wants: a third of the messages, and some of the others.
FILTER = "third = 'yes' OR number % 7 = 1"


def matches(number: int) -> bool:
    """Whether ``FILTER`` wants the message with this number."""
    return number % 3 == 0 or number % 7 == 1


class Reading(Part):
    """The main of the reader's process, and the rows it has seen."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        super().__init__(simulation, plan, ledger)
        self._calls: list[Calls] = []
        self.settled = False
        #: The subject that it reads, one without retention; None: there is none.
        kept = [subject for subject in plan.subjects if subject.name != DOOMED and subject.retention is None]
        self.subject: SubjectPlan | None = random.Random(f"{plan.seed} reader").choice(kept) if kept else None
        #: The last sequence of each partition that the current reader has seen.
        self.seen: dict[str, int] = {}
        #: The sequences of each partition that the current filtered reader has seen.
        self.chosen: dict[str, list[int]] = {}

    def settle(self) -> None:
        self.settled = True
        for calls in self._calls:
            calls.probability = 0.0

    def end(self) -> None:
        """End the check: a broker with rows is switched off."""
        self.subject = None

    async def run(self, process: Process) -> None:
        """Read until the end of the run; after an error a new reader starts from the beginning."""
        draw = random.Random(f"{self.plan.seed} {process.name}.{process.lives}")
        calls = Calls(draw, 0.0 if self.settled else self.plan.cancels)
        self._calls.append(calls)
        while self.subject is not None:
            self.seen, self.chosen = {}, {}
            try:
                async with (
                    self.connect(process) as client,
                    client.reader(self.subject.name, start="earliest") as reader,
                    client.reader(self.subject.name, start="earliest", where=FILTER) as filtered,
                ):
                    while True:
                        await self._read(reader, draw, calls)
                        await self._read_filtered(filtered, draw, calls)
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _read(self, reader: plait.Reader, draw: random.Random, calls: Calls) -> None:
        try:
            messages = await calls(reader.fetch(draw.choice((1, 10, 500)), wait=draw.choice((0.0, 0.5))))
        except Interrupted:
            return
        if not messages:
            await self.simulation.sleep(0.2)
        for message in messages:
            partition = str(message.partition)
            expected = self.seen.get(partition, -1) + 1
            if message.sequence != expected:
                self.simulation.fail(f"the reader got {message.sequence} of {partition}, expected {expected}")
            self.seen[partition] = message.sequence

    async def _read_filtered(self, reader: plait.Reader, draw: random.Random, calls: Calls) -> None:
        try:
            messages = await calls(reader.fetch(draw.choice((1, 10, 500)), wait=draw.choice((0.0, 0.5))))
        except Interrupted:
            return
        for message in messages:
            seen = self.chosen.setdefault(str(message.partition), [])
            number = int(message.headers["number"])
            if not matches(number) or (seen and message.sequence <= seen[-1]):
                self.simulation.fail(f"the filtered reader got {number} at {message.sequence} after {seen[-1:]}")
            seen.append(message.sequence)

    def missing(self) -> list[tuple[str, int]]:
        """The places of stored messages that the reader has not seen."""
        if self.subject is None:
            return []
        sent = [sent for sent in self.ledger.sent.values() if sent.subject == self.subject.name]
        places = [each.record.place for each in sent]
        missing = [place for place in places if place is not None and place[1] > self.seen.get(place[0], -1)]
        chosen = {name: set(sequences) for name, sequences in self.chosen.items()}
        wanted = [each.record.place for each in sent if matches(int(each.record.value))]
        return missing + [place for place in wanted if place is not None and place[1] not in chosen.get(place[0], ())]
