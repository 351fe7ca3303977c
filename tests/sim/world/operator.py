"""The operator of a simulated world: creates and deletes subjects, changes partitions, resends dead letters."""

from __future__ import annotations

from collections.abc import Callable

import plait
from plait.errors import PlaitError, SubjectExists
from plait.testing.sim import Process
from tests.sim.ordered_changes import Change
from tests.sim.users import empty
from tests.sim.world.ledger import Part
from tests.sim.world.plan import DOOMED, RatePlan


class Operator(Part):
    """Administers one world, by its plan."""

    @property
    def _process(self) -> Process:
        return self.simulation.process("operator")

    def _connect(self) -> plait.Client:
        return self.connect(self._process)

    async def create(self) -> None:
        async with self._connect() as client:
            while len(await client._router.find_brokers()) < len(self.plan.brokers):
                await self.simulation.sleep(0.1)
            for subject in self.plan.subjects:
                try:
                    await client.admin.create_subject(
                        subject.name, order=subject.order, partitions=subject.partitions, retention=subject.retention
                    )
                except SubjectExists:
                    continue

    def play(self) -> None:
        for change in self.plan.changes:
            self.simulation.call_later(change.at, self._begin, change)
        for rate in self.plan.rates:
            self.simulation.call_later(rate.at, lambda rate=rate: self._process.start(self._limit(rate)))
        if self.plan.deleted_at is not None:
            self.simulation.call_later(self.plan.deleted_at, lambda: self._process.start(self._delete()))

    async def _limit(self, plan: RatePlan) -> None:
        """Set a limit, as soon as the group exists."""
        self.simulation.log("operator", f"{plan}")
        limits = {"messages_per_second": plan.messages_per_second, "bytes_per_second": plan.bytes_per_second}
        for _ in range(20):
            try:
                async with self._connect() as client:
                    if plan.group is None:
                        await client.admin.set_send_rate(plan.subject, **limits)
                    else:
                        await client.admin.set_group_rate(plan.subject, plan.group, **limits)
                return
            except PlaitError as error:
                self.simulation.log("operator", f"not limited: {error}")
                await self.simulation.sleep(0.3)

    def _begin(self, change: Change) -> None:
        self.simulation.log("operator", f"{change.subject} is to have {change.partitions} partitions")
        self._process.start(self._expand(change))

    async def _expand(self, change: Change) -> None:
        try:
            async with self._connect() as client:
                await client.admin.expand_subject(change.subject, change.partitions)
        except PlaitError as error:
            self.simulation.log("operator", f"not done: {error}")

    async def _delete(self) -> None:
        while True:
            try:
                async with self._connect() as client:
                    await client.admin.delete_subject(DOOMED)
                return
            except plait.SubjectNotFound:
                return
            except PlaitError as error:
                self.simulation.log("operator", f"not deleted: {error}")
                await self.simulation.sleep(0.5)

    async def empty(self, group: str) -> None:
        """Route all subjects away from a broker group, so that it can be switched off."""
        self.simulation.log("operator", f"{group} is emptied")
        others = [broker for broker in self.plan.brokers if broker != group]
        subjects = [subject.name for subject in self.plan.subjects]
        await empty(self.simulation, self._connect(), subjects, group, others)

    async def forget(self, group: str) -> None:
        """Remove an emptied broker group that is switched off from the routes, once it counts as lost."""
        while True:
            try:
                async with self._connect() as client:
                    left = await client.admin.forget_broker(group)
                if left:
                    self.simulation.fail(f"{group} was emptied, and yet it has {left}")
                return
            except PlaitError as error:
                self.simulation.log("operator", f"{group} is not forgotten: {error}")
                await self.simulation.sleep(1.0)

    async def resume(self, drained: Callable[[], bool]) -> None:
        """Resend dead letters and resume parked keys until everything is handled."""
        groups = [group for group in self.plan.groups if group.mode not in ("broadcast", "once")]
        while not drained():
            try:
                async with self._connect() as client:
                    while not drained():
                        for group in groups:
                            await self._resend(client, group.subject, group.name, group.mode == "ordered")
                        await self.simulation.sleep(1.0)
            except PlaitError:
                await self.simulation.sleep(1.0)

    async def _resend(self, client: plait.Client, subject: str, group: str, ordered: bool) -> None:
        try:
            await client.admin.resend_dead(subject, group)
            if ordered and self.plan.subject(subject).order == "strict":
                await client.admin.resume_all(subject, group)
        except (plait.GroupNotFound, plait.SubjectNotFound):
            pass
