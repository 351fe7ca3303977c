"""Queries of a simulated world, after everything is repaired: stored messages are found, and explained."""

from __future__ import annotations

import random

from plait.testing.sim import Simulation
from tests.sim.world.ledger import Ledger, Part
from tests.sim.world.plan import DOOMED, Plan

#: Messages that are looked up.
LOOKED_UP = 4
#: What a message that a group has handled cannot be.
IMPOSSIBLE = {"unknown", "delayed", "invisible", "next", "before"}


class Querying(Part):
    """Looks up messages that senders know to be stored, in subjects without retention."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        super().__init__(simulation, plan, ledger)
        self._draw = random.Random(f"{plan.seed} query")

    async def check(self) -> None:
        kept = {subject.name for subject in self.plan.subjects if subject.name != DOOMED and subject.retention is None}
        stored = [each for each in self.ledger.sent.values() if each.subject in kept and each.record.place is not None]
        async with self.connect(self.simulation.process("querying")) as client:
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
