"""``Ledger``: what was sent, what must come of it, and what each group made of it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from plait.testing.history import Handling, History, RecordedSend
from plait.testing.sim import Process
from tests.sim.world.plan import GroupPlan, Plan

#: Keys of delayed messages begin with this: their order is that of their due times, not that of their sends.
DELAYED = "d"


class Sent(NamedTuple):
    """A message that is known to be stored."""

    record: RecordedSend
    subject: str
    #: On the simulation's clock: not delivered before; None: at once.
    due: float | None


class Ledger:
    """See the module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: What was sent to each subject, what groups handled of it, and the faults that excuse duplicates.
        self.histories = {subject.name: History() for subject in plan.subjects}
        self.sent: dict[int, Sent] = {}
        #: Sends that run, and the life of the process that made each.
        self.running: dict[int, tuple[Process, int]] = {}
        #: Cancelled for certain: must never be handled.
        self.cancelled: set[int] = set()
        #: Whether it is cancelled is unknown, as the request failed: it may be handled or not.
        self.perhaps_cancelled: set[int] = set()
        #: Handled with success, by (group, member of a broadcast).
        self.done: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        #: When a group, or a member of a broadcast, was attached first: what is sent later is for it.
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
        """A message's value."""
        self._number += 1
        return self._number

    def stored(self, record: RecordedSend, subject: str, due: float | None) -> None:
        """A send succeeded."""
        self.sent[int(record.value)] = Sent(record, subject, due)

    # --- handling -------------------------------------------------------------------------------

    @staticmethod
    def holder(group: GroupPlan, consumer: str) -> tuple[str, str, str]:
        """Who has to handle everything: the group, or each member of a broadcast by itself."""
        return group.subject, group.name, consumer if group.mode == "broadcast" else ""

    def attached(self, group: GroupPlan, consumer: str, now: float) -> None:
        """A member was attached."""
        self.since.setdefault(self.holder(group, consumer), now)

    def handled(self, group: GroupPlan, handling: Handling, now: float) -> None:
        """A message was handled with success."""
        self.progress = now
        self.done[self.holder(group, handling.consumer)].add(int(handling.value))

    # --- what is still to come ------------------------------------------------------------------

    def wanted(self, group: GroupPlan, holder: tuple[str, str, str]) -> set[int]:
        """What a group, or a member of a broadcast, must have handled in the end."""
        subject = self.plan.subject(group.subject)
        return {
            number
            for number, sent in self.sent.items()
            if sent.subject == group.subject
            and sent.record.begun > self.since[holder]
            and number not in self.cancelled
            and number not in self.perhaps_cancelled
            # Retention may take what no member got in time; what failed is kept beyond it.
            and (subject.retention is None or (group.subject, group.name, number) in self.failed)
        }

    def missing(self, group: GroupPlan) -> dict[tuple[str, str, str], set[int]]:
        """What each holder of a group still has to handle."""
        return {holder: self.wanted(group, holder) - self.done[holder] for holder in self.holders(group)}

    def holders(self, group: GroupPlan) -> list[tuple[str, str, str]]:
        """Those that have to handle everything of a group."""
        return [holder for holder in self.since if holder[:2] == (group.subject, group.name)]

    def sending(self) -> bool:
        """A send runs whose process is still there."""
        return any(process.lives == life for process, life in self.running.values())
