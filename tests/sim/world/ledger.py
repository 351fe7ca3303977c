"""``Ledger``: which messages were sent, which of them each group must handle, and which it has handled."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import plait
from plait.testing.history import Handling, History, RecordedSend
from plait.testing.sim import Process, Simulation
from tests.sim.meta_servers import ADDRESSES
from tests.sim.users import CLIENT_LIMITS
from tests.sim.world.plan import GroupPlan, Plan

#: Keys of delayed messages begin with this letter. These messages are ordered by due time, not by their sends.
DELAYED = "d"


class Sent(NamedTuple):
    """A message whose send succeeded."""

    record: RecordedSend
    subject: str
    #: The due time on the simulation's clock; None: not delayed.
    due: float | None


class Ledger:
    """The sends, outcomes and handlings of one world."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: For each subject: its sends, the groups' handlings, and the faults that excuse duplicates.
        self.histories = {subject.name: History() for subject in plan.subjects}
        self.sent: dict[int, Sent] = {}
        #: Number of a send without an outcome → (process, life): the process that sends, and the number of its start.
        self.running: dict[int, tuple[Process, int]] = {}
        #: Messages that were cancelled and must never be handled.
        self.cancelled: set[int] = set()
        #: Messages whose cancellation has an unknown outcome: they may be handled or not.
        self.perhaps_cancelled: set[int] = set()
        #: Message → its transaction; and the transactions that are committed in the local database of the producers.
        self.transactions: dict[int, str] = {}
        self.committed: set[str] = set()
        #: (subject, group, member of a broadcast) → the messages that were handled with success.
        self.done: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        #: When a group, or a member of a broadcast, attached first: it must handle everything that is sent later.
        self.since: dict[tuple[str, str, str], float] = {}
        #: (subject, group, number) of handlings that failed and whose nack the broker confirmed.
        self.failed: set[tuple[str, str, int]] = set()
        #: When a message was handled last.
        self.progress = 0.0
        self._number = 0
        for group in plan.groups:
            if group.start == "earliest" and group.mode != "broadcast":
                self.since[self.holder(group, "")] = -1.0

    # --- sending --------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def stored(self, record: RecordedSend, subject: str, due: float | None) -> None:
        self.sent[int(record.value)] = Sent(record, subject, due)

    def revoked(self, number: int) -> bool:
        """Whether the message belongs to a transaction that must not be committed."""
        return number in self.transactions and self.transactions[number] not in self.committed

    # --- handling -------------------------------------------------------------------------------

    @staticmethod
    def holder(group: GroupPlan, consumer: str) -> tuple[str, str, str]:
        """Which party must handle everything: the group, or the single member of a broadcast."""
        return group.subject, group.name, consumer if group.mode == "broadcast" else ""

    def attached(self, group: GroupPlan, consumer: str, now: float) -> None:
        self.since.setdefault(self.holder(group, consumer), now)

    def handled(self, group: GroupPlan, handling: Handling, now: float) -> None:
        self.progress = now
        self.done[self.holder(group, handling.consumer)].add(int(handling.value))

    # --- messages to handle ---------------------------------------------------------------------

    def wanted(self, group: GroupPlan, holder: tuple[str, str, str]) -> set[int]:
        """The messages that a group, or a member of a broadcast, must have handled in the end."""
        subject = self.plan.subject(group.subject)
        return {
            number
            for number, sent in self.sent.items()
            if sent.subject == group.subject
            and sent.record.begun > self.since[holder]
            and not group.leaves_out(number)
            and number not in self.cancelled
            and number not in self.perhaps_cancelled
            # Retention may remove messages that were not delivered in time; failed messages are retained.
            and (subject.retention is None or (group.subject, group.name, number) in self.failed)
        }

    def missing(self, group: GroupPlan) -> dict[tuple[str, str, str], set[int]]:
        """The messages that each holder of a group still has to handle."""
        return {holder: self.wanted(group, holder) - self.done[holder] for holder in self.holders(group)}

    def holders(self, group: GroupPlan) -> list[tuple[str, str, str]]:
        """The parties of a group that must handle everything."""
        return [holder for holder in self.since if holder[:2] == (group.subject, group.name)]

    def sending(self) -> bool:
        """Whether a send of a live process has no outcome yet."""
        return any(process.lives == life for process, life in self.running.values())


class Part:
    """A part of a world: the state that its processes share."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        self.simulation = simulation
        self.plan = plan
        self.ledger = ledger

    def connect(self, process: Process, *, limits: plait.ClientLimits = CLIENT_LIMITS, **options: Any) -> plait.Client:
        return process.connect(ADDRESSES, limits=limits, **options)
