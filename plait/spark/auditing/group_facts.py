"""What all of the action log says of each group, beside what it says of single rows.

Learned in one pass in log order that keeps nothing row by row: where the group began and was reset, when consumers went
away, how its strands changed, and how far it has surely come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from plait.spark.auditing.inputs.events import Events, merged
from plait.storage.logs.action_log import Action, ConsumerDefinition, Definition, GroupDefinition

#: How the strands of an ordered group came to be.
_OF_STRANDS: Final = np.isin(np.arange(256), [Action.MOVE, Action.HOLD, Action.JOIN, Action.RESET])
_GONE: Final = np.isin(np.arange(256), [Action.OFFLINE, Action.FORGET_CONSUMER])
_MOVES_SCAN: Final = np.isin(np.arange(256), [Action.PULL, Action.ACK, Action.BURY, Action.SKIP])
_ROWS_MADE: Final = np.isin(np.arange(256), [Action.PULL, Action.ACK, Action.NACK, Action.BURY])
AT_MOST_ONCE: Final = "at_most_once"
STRICT: Final = "strict"
#: A strand or a key's strand, changed at ``place``: (place, action, number, start, end, value, epoch).
Change = tuple[int, int, int, int, int, int, int]


@dataclass
class GroupFacts:
    """A group of one partition, as far as the log was read."""

    id: int
    name: str
    partition: int
    #: From which sequence on it consumes, as it was defined and since it was last reset.
    first: int
    start: int
    broadcast: bool = False
    at_most_once: bool = False
    ordered: bool = False
    affinity: bool = False
    #: Of an ordered group: a failed message holds its key. None: it is not known whether it does.
    strict: bool | None = False
    #: The log has it from its definition on...
    whole: bool = True
    #: ...or only from this time on.
    begins: int = 0
    forgotten: bool = False
    #: Places of resets: what is between two of them is an *era*.
    resets: list[int] = field(default_factory=list)
    #: When the last of them was.
    reset_time: int = 0
    #: Consumer number → one number for all that the same client had.
    clients: dict[int, int] = field(default_factory=dict)
    #: Client → the places where it left or was taken for lost.
    gone: dict[int, list[int]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    #: Of an ordered group: logical partitions [first, end) went to an owner (0: none): (place, owner, first, end).
    locks: list[tuple[int, int, int, int]] = field(default_factory=list)
    #: The scan has come so far in this era...
    scan: int = 0
    #: ...and took something new from here, which it does when nothing below is left to be handed out.
    passed: int = 0
    #: Behind the highest sequence that anybody was handed, acked, gave back or buried.
    reach: int = 0
    #: Rows that retention or damage took.
    skips: list[tuple[int, int]] = field(default_factory=list)

    @property
    def logs_pulls(self) -> bool:
        """Who was handed what is told: by pulls or, at most once, by the acks in their place."""
        return (self.at_most_once or not self.broadcast) and not self.ordered

    def learn_order(self, order: str | None) -> None:
        """The order of its subject; None: it is not known."""
        if self.ordered and not self.affinity:
            self.strict = None if order is None else order == STRICT

    @property
    def kind(self) -> str:
        """In a word, as the command line calls it."""
        if self.affinity:
            return "affinity"
        return "broadcast" if self.broadcast else "ordered" if self.ordered else "shared"


class GroupTable:
    """All groups of a log; ``define`` and ``take`` in log order."""

    def __init__(self, *, whole: bool = True) -> None:
        self.groups: dict[int, GroupFacts] = {}
        #: The log begins where the broker began.
        self._whole = whole
        self._begins = 0
        self._client_numbers: dict[tuple[int, str], int] = {}

    def define(self, definition: Definition, *, head: bool = False) -> None:
        """A group or a consumer; ``head``: said again where a segment begins."""
        if isinstance(definition, ConsumerDefinition):
            group = self.groups.get(definition.group)
            if group is not None:
                name = (definition.group, definition.client)
                group.clients[definition.id] = self._client_numbers.setdefault(name, len(self._client_numbers) + 1)
            return
        known = self.groups.get(definition.id)
        if known is None:
            self.groups[definition.id] = _facts(definition, whole=self._whole or not head, begins=self._begins)

    def cut(self, begins: int) -> None:
        """Events are missing here, and the log goes on at this time: what was before it is not known."""
        self._whole, self._begins = False, begins
        for group in self.groups.values():
            group.whole, group.begins = False, begins

    def take(self, events: Events) -> None:
        """The next events."""
        for number in np.unique(events["group"]).tolist():
            group = self.groups.get(number)
            if group is not None:
                self._take(group, events[events["group"] == number])

    def _take(self, group: GroupFacts, events: Events) -> None:
        action = events["action"]
        for event in events[_GONE[action]].tolist():
            client = group.clients.get(event[4], -event[4])
            group.gone.setdefault(client, []).append(event[11])
        if group.ordered:
            fields = ["place", "action", "consumer", "start", "end", "value", "epoch"]
            group.changes += events[_OF_STRANDS[action]][fields].tolist()
            group.locks += events[action == Action.LOCK][["place", "consumer", "start", "end"]].tolist()
        group.forgotten |= bool((action == Action.FORGET_GROUP).any())
        made = events[_ROWS_MADE[action]]
        if len(made):
            group.reach = max(group.reach, int(made["end"].max()))
        resets = np.flatnonzero(action == Action.RESET)
        for piece in np.split(events, resets):
            if len(piece) and piece["action"][0] == Action.RESET:
                group.resets.append(int(piece["place"][0]))
                group.reset_time = int(piece["time"][0])
                group.start = group.scan = group.passed = int(piece["start"][0])
            if group.logs_pulls:
                self._follow_scan(group, piece[_MOVES_SCAN[piece["action"]] & (piece["start"] < piece["end"])])
        skips = events[(action == Action.SKIP)]
        if len(skips):
            group.skips = merged([*group.skips, *zip(skips["start"].tolist(), skips["end"].tolist(), strict=True)])

    @staticmethod
    def _follow_scan(group: GroupFacts, events: Events) -> None:
        """A pull that begins where the scan is took something new: everything that came back went out before."""
        if not len(events):
            return
        reached = np.maximum.accumulate(np.concatenate([[group.scan], events["end"]]))
        handed = events["action"] == (Action.ACK if group.at_most_once else Action.PULL)
        new = handed & (events["attempt"] == 1) & (events["start"] == reached[:-1])
        if new.any():
            group.passed = max(group.passed, int(events["start"][new].max()))
        group.scan = int(reached[-1])


def _facts(definition: GroupDefinition, *, whole: bool, begins: int) -> GroupFacts:
    start = definition.start
    return GroupFacts(
        definition.id,
        definition.name,
        definition.partition,
        start,
        start,
        broadcast=definition.broadcast,
        at_most_once=definition.delivery == AT_MOST_ONCE,
        ordered=definition.ordered or definition.affinity,
        affinity=definition.affinity,
        whole=whole,
        begins=begins,
        scan=start,
        passed=start,
    )
