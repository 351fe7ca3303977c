"""Transactions of a simulated world: messages that must all be handled, or none, by the outcome of a local database.

The database is a set of committed transactions. It survives every process, as a real one does. Producers send, write
their outcome there, and then decide; some stop before that, and some never decide. Producers answer the checks of
brokers from the database, and at the end an operator decides what is parked.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

import plait
from plait.errors import PlaitError
from plait.testing.history import RecordedSend
from plait.testing.sim import Process, Simulation
from tests.sim.world.calls import Interrupted
from tests.sim.world.ledger import Ledger, Part
from tests.sim.world.plan import DOOMED, Plan

if TYPE_CHECKING:
    from tests.sim.world.senders import Burst

PRODUCER_GROUP = "shop"
#: Stands for the transaction of messages whose send was cancelled; it is never committed.
CANCELLED = "cancelled"

Ending = Literal["commit", "rollback", "late", "never", "by itself"]


class Half(NamedTuple):
    """A message that a transaction sends."""

    record: RecordedSend
    subject: str
    body: bytes
    headers: dict[str, str | int]
    delay: float | None
    to_group: str | None


class LocalRollback(Exception):
    """A block fails on purpose."""


class Transacting(Part):
    """The transactions of all producers, and the local database."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        super().__init__(simulation, plan, ledger)
        #: Transactions that are committed in the local database.
        self.committed: set[str] = set()
        #: Transactions whose block still runs → (process, life).
        self.running: dict[str, tuple[Process, int]] = {}
        #: True after the run: transactions without an outcome in the database are rolled back.
        self.settling = False

    def check(self, transaction: plait.TransactionInfo) -> Literal["commit", "rollback", "unknown"]:
        """The outcome, by the local database."""
        if transaction.id in self.committed:
            return "commit"
        process, life = self.running.get(transaction.id, (None, 0))
        alive = process is not None and process.lives == life and process.alive
        return "unknown" if alive and not self.settling else "rollback"

    async def answer(self, transaction: plait.TransactionInfo) -> Literal["commit", "rollback", "unknown"]:
        # A coroutine function, because the simulation has no threads.
        return self.check(transaction)

    async def run(self, burst: Burst, records: list[Half]) -> None:
        """Send messages in one transaction, and end it in some way; the call may be interrupted."""
        draw = burst.draw
        ending: Ending = draw.choices(("commit", "rollback", "late", "never", "by itself"), (4, 2, 2, 1, 4))[0]
        transaction = burst.client.transaction(PRODUCER_GROUP)
        for half in records:
            self.ledger.transactions[int(half.record.value)] = transaction.id
        self.running[transaction.id] = burst.process, burst.process.lives
        try:
            await burst.calls(self._block(burst, transaction, records, ending))
        except (LocalRollback, PlaitError, Interrupted, TimeoutError):
            pass
        finally:
            if ending != "never":
                self.running.pop(transaction.id, None)

    async def _block(self, burst: Burst, transaction: plait.Transaction, records: list[Half], ending: Ending) -> None:
        draw = burst.draw
        if ending in ("late", "never"):
            # No block: nothing decides when this ends.
            sent = await self._send(transaction, records)
            await self.simulation.sleep(draw.uniform(0.0, 1.5))
            if ending == "late":
                self._commit_locally(transaction, sent)
            return
        async with transaction:
            sent = await self._send(transaction, records)
            await self.simulation.sleep(draw.choice((0.0, draw.uniform(0.0, 1.0))))
            if ending == "rollback":
                raise LocalRollback
            self._commit_locally(transaction, sent)
            if ending == "by itself":
                if not self.plan.calm and draw.random() < 0.3:
                    self._cut_off(burst.process, draw.uniform(0.0, 0.5))
                # A caller who gives up does not know the outcome; the end of the block must not change it.
                async with asyncio.timeout(draw.choice((None, 0.05, 0.3))):
                    await transaction.commit()

    def _cut_off(self, process: Process, seconds: float) -> None:
        """No broker gets a request of the process for some time."""
        for name in self.plan.brokers:
            broker = self.simulation.process(name)
            self.simulation.network.cut(process, broker)
            self.simulation.call_later(seconds, self.simulation.network.mend, process, broker)

    async def _send(self, transaction: plait.Transaction, records: list[Half]) -> list[Half]:
        """Send messages; returns those that are part of the transaction. The block leaves out a cancelled one."""
        draw = random.Random(f"{self.plan.seed} half messages {records[0].record.value}")
        sent: list[Half] = []
        for half in records:
            key = half.record.key
            assert key is None or isinstance(key, str)
            # Also times in which a frame is stored and its sender has no answer yet.
            patience = draw.uniform(0.0, draw.choice((0.001, 0.005, 0.03))) if draw.random() < 0.2 else None
            try:
                async with asyncio.timeout(patience):
                    options: dict[str, Any] = {"delay": half.delay, "to_group": half.to_group}
                    await transaction.send(half.subject, half.body, key=key, headers=half.headers, **options)
            except PlaitError:
                raise
            except TimeoutError:
                self.ledger.transactions[int(half.record.value)] = CANCELLED
            else:
                sent.append(half)
        if records[-1] not in sent[-1:]:
            # Only another send reports that the transaction can be rolled back only.
            raise LocalRollback
        return sent

    def _commit_locally(self, transaction: plait.Transaction, records: list[Half]) -> None:
        """From here on every message must be handled."""
        if self.settling:
            # A check may have rolled it back.
            raise LocalRollback
        self.committed.add(transaction.id)
        self.ledger.committed.add(transaction.id)
        for half in records:
            if half.subject != DOOMED:
                self.ledger.stored(half.record, half.subject, None)

    # --- the end --------------------------------------------------------------------------------

    async def settle(self, process: Process) -> None:
        """Answer checks and decide parked transactions until the world ends."""
        while True:
            try:
                async with self.connect(process) as client:
                    client.transaction_checks(PRODUCER_GROUP, self.answer)
                    while True:
                        for transaction in await client.admin.transactions(state="parked"):
                            await self._decide(client, transaction)
                        await self.simulation.sleep(0.5)
            except PlaitError:
                await self.simulation.sleep(0.5)

    async def _decide(self, client: plait.Client, transaction: plait.TransactionInfo) -> None:
        outcome = self.check(transaction)
        try:
            if outcome == "commit":
                await client.admin.commit_transaction(transaction.id)
            elif outcome == "rollback":
                await client.admin.rollback_transaction(transaction.id)
        except (plait.TransactionDecided, plait.TransactionNotFound):
            pass


def with_quick_checks(limits: plait.limits.ServerLimits) -> plait.limits.ServerLimits:
    """Limits under which producers are asked within the seconds of a world, and some transactions are parked."""
    return msgspec.structs.replace(
        limits, transaction_check_first_seconds=0.6, transaction_check_seconds=0.4, transaction_checks=3
    )
