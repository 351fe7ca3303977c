"""Queries of a simulated world: while faults play, and after everything is repaired.

A query that succeeds finds every message of its key that was acknowledged before. In the end stored messages are found
by header and by id, and explained.
"""

from __future__ import annotations

import random

import plait
from plait.errors import PlaitError
from plait.testing.sim import Process, Simulation
from tests.sim.world.ledger import Ledger, Part, Sent
from tests.sim.world.plan import DOOMED, Plan

#: The process that looks up messages.
QUERIER = "querying"
#: Messages that are looked up in the end.
LOOKED_UP = 4
#: What a message that a group has handled cannot be.
IMPOSSIBLE = {"unknown", "delayed", "undecided", "invisible", "next", "before"}


class Querying(Part):
    """Looks up messages that senders know to be stored, in subjects without retention."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        super().__init__(simulation, plan, ledger)
        self._draw = random.Random(f"{plan.seed} query")
        self._kept = {each.name for each in plan.subjects if each.name != DOOMED and each.retention is None}
        self.settled = False

    def _stored(self) -> list[Sent]:
        return [
            each for each in self.ledger.sent.values() if each.subject in self._kept and each.record.place is not None
        ]

    # --- during the faults ----------------------------------------------------------------------

    async def run(self, process: Process) -> None:
        """Look for the messages of one key after another, until the faults end."""
        while not self.settled:
            await self.simulation.sleep(self._draw.uniform(0.1, 1.0))
            try:
                async with self.connect(process) as client:
                    while not self.settled:
                        await self._look(client)
                        await self.simulation.sleep(self._draw.uniform(0.0, 0.5))
            except PlaitError as error:
                self.simulation.log(process.name, f"a query failed: {error}")

    async def _look(self, client: plait.Client) -> None:
        stored = self._stored()
        if not stored:
            return
        chosen = self._draw.choice(stored)
        subject, key = chosen.subject, chosen.record.key
        expected = {
            int(each.record.value): each.record.place
            for each in stored
            if (each.subject, each.record.key) == (subject, key)
        }
        where = "key IS NULL" if key is None else self._draw.choice((None, "number >= 0", f"key = '{key}'"))
        limit = self._draw.choice((3, 1000))
        found = await client.query(subject, key=str(key) if key is not None else None, where=where, limit=limit)
        messages = list(found)
        while found.token is not None:
            found = await client.query(subject, token=found.token, limit=1000)
            messages += found
        places = {int(each.headers["number"]): (str(each.partition), each.sequence) for each in messages}
        wrong = {number: place for number, place in expected.items() if places.get(number) != place}
        if wrong or any(each.key != key for each in messages):
            self.simulation.fail(f"a query of {subject} by key {key} where {where} found {places}, and not {wrong}")

    # --- in the end -----------------------------------------------------------------------------

    async def check(self) -> None:
        async with self.connect(self.simulation.process(QUERIER)) as client:
            stored = self._stored()
            for sent in self._draw.sample(stored, min(LOOKED_UP, len(stored))):
                number, place = int(sent.record.value), sent.record.place
                found = await client.query(sent.subject, where=f"number = {number}", limit=1000)
                places = [(str(message.partition), message.sequence) for message in found]
                if place not in places:
                    self.simulation.fail(f"a query found message {number} at {places}, not at {place}")
                message = found[places.index(place)]
                by_id = await client.query(sent.subject, message_id=message, key=message.key)
                if [(str(each.partition), each.sequence) for each in by_id] != [place]:
                    self.simulation.fail(f"a query by id and key found {by_id}, not {message}")
                done = self.ledger.done.items()
                handled = [
                    name for (subject, name, _), numbers in done if subject == sent.subject and number in numbers
                ]
                for group in sorted(set(handled)):
                    why = await client.why(message, group=group)
                    if why.state in IMPOSSIBLE:
                        self.simulation.fail(f"{number} was handled by {group}, but: {why.text}")
