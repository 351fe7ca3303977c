"""Recurring messages of a simulated world, in a subject of their own; in the end each firing is there once."""

from __future__ import annotations

from collections import Counter

import plait
from plait.errors import PlaitError, SubjectExists
from plait.testing.sim import Process
from tests.sim.world.ledger import Part
from tests.sim.world.plan import RECURRING

#: How long the last firings may take: wall clocks of brokers may be behind, and hold them back.
SECONDS_MAX = 150.0
#: How long the reader looks for messages that should not be there.
QUIET_SECONDS = 2.0


class Recurring(Part):
    """The recurrences of one world."""

    @property
    def _process(self) -> Process:
        return self.simulation.process("operator")

    async def create(self) -> None:
        if not self.plan.recurrences:
            return
        async with self.connect(self._process) as client:
            try:
                await client.admin.create_subject(RECURRING, partitions=self.plan.recurrences[0].partitions)
            except SubjectExists:
                pass
            for number, each in enumerate(self.plan.recurrences):
                name = f"r{number}"
                await client.admin.create_recurrence(
                    name, RECURRING, name, every=each.every, key=each.key, catch_up=each.catch_up
                )

    def play(self) -> None:
        """Schedule the pauses and changes of the plan."""
        for number, each in enumerate(self.plan.recurrences):
            for at in each.pauses:
                self.simulation.call_later(at, lambda name=f"r{number}": self._process.start(self._pause(name)))  # type: ignore[misc]
            for at, partitions in each.changes:
                self.simulation.call_later(at, lambda count=partitions: self._process.start(self._expand(count)))  # type: ignore[misc]

    async def _pause(self, name: str) -> None:
        """Pause a recurrence shortly."""
        try:
            async with self.connect(self._process) as client:
                await client.admin.pause_recurrence(name)
                await self.simulation.sleep(0.3)
                await client.admin.resume_recurrence(name)
        except PlaitError as error:
            self.simulation.log("operator", f"{name} is not paused or resumed: {error}")

    async def _expand(self, partitions: int) -> None:
        try:
            async with self.connect(self._process) as client:
                await client.admin.expand_subject(RECURRING, partitions)
        except PlaitError as error:
            self.simulation.log("operator", f"not done: {error}")

    async def check(self) -> None:
        """Pause all recurrences, and read until all their firings are found."""
        if not self.plan.recurrences:
            return
        seen: Counter[tuple[str, int]] = Counter()
        async with self.connect(self._process) as client:
            names = [f"r{number}" for number in range(len(self.plan.recurrences))]
            rows = [await client.admin.pause_recurrence(name) for name in names]
            wanted = {(row.name, number) for row in rows for number in range(1, row.firings + 1)}
            end = self.simulation.now + SECONDS_MAX
            async with client.reader(RECURRING, start="earliest") as reader:
                while self.simulation.now < end:
                    messages = await reader.fetch(500, wait=QUIET_SECONDS)
                    for message in messages:
                        self._note(message, seen)
                    if not messages and seen.keys() >= wanted:
                        break
        lost, more = sorted(wanted - seen.keys()), sorted(seen.keys() - wanted)
        if lost or more:
            self.simulation.fail(f"firings are lost: {lost[:10]}, or were never decided: {more[:10]}")

    def _note(self, message: plait.Message, seen: Counter[tuple[str, int]]) -> None:
        place = str(message.headers["plait-recurrence"]), int(message.headers["plait-firing"])
        seen[place] += 1
        if seen[place] > 1 or message.body.decode() != place[0]:
            self.simulation.fail(f"firing {place} is there {seen[place]} times, with the body {message.body!r}")
        # A forwarded message gets its time from another broker, whose clock may be behind.
        alone = len(self.plan.brokers) == 1
        if alone and message.store_time.timestamp() * 1e6 + 0.5 < int(message.headers["plait-due"]):
            self.simulation.fail(f"firing {place} is early: stored at {message.store_time}")
