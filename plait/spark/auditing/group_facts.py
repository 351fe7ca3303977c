"""Facts about each group as a whole, from the whole action log.

One pass in log order collects them and keeps nothing per row: where the group began and was rewound, when consumers
went offline, how its cursors changed, and up to where its scan has provably passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from plait.spark.auditing.block_arrays import Events, merged
from plait.storage.logs.action_events import Action
from plait.storage.logs.action_log import ConsumerDefinition, Definition, GroupDefinition

#: Actions that change which cursor of an ordered group a row belongs to.
_CHANGES_CURSORS: Final = np.isin(np.arange(256), [Action.MOVE, Action.HOLD, Action.JOIN, Action.REWIND])
_GONE: Final = np.isin(np.arange(256), [Action.OFFLINE, Action.FORGET_CONSUMER])
_MOVES_SCAN: Final = np.isin(np.arange(256), [Action.PULL, Action.ACK, Action.BURY, Action.SKIP, Action.FILTERED])
_NAMES_ROWS: Final = np.isin(np.arange(256), [Action.PULL, Action.ACK, Action.NACK, Action.BURY])
AT_MOST_ONCE: Final = "at_most_once"
STRICT: Final = "strict"
#: A cursor (of LPs or of one key) changed at ``place``: (place, action, number, start, end, value, epoch).
Change = tuple[int, int, int, int, int, int, int]


@dataclass
class GroupFacts:
    """A group of one partition, as of the end of the log that was read."""

    id: int
    name: str
    partition: int
    #: The sequence that it consumes from: as defined (``first``), and since its last rewind (``start``).
    first: int
    start: int
    broadcast: bool = False
    at_most_once: bool = False
    ordered: bool = False
    affinity: bool = False
    #: True if the group is ordered and a failed message holds back its key.
    strict: bool = False
    #: True if the log that was read has all events of the group, from its definition on.
    whole: bool = True
    #: If ``whole`` is False: the log has the events of the group from this time on.
    begins: int = 0
    forgotten: bool = False
    #: Places of rewinds. The log between two of them is an *era*.
    rewinds: list[int] = field(default_factory=list)
    #: The time of the last rewind.
    rewind_time: int = 0
    #: Consumer number → client number. A client may have had several consumers.
    clients: dict[int, int] = field(default_factory=dict)
    #: Client → the places where it left or was declared lost.
    gone: dict[int, list[int]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    #: Of an ordered group: the lock of LPs [first, end) went to an owner (0: none): (place, owner, first, end).
    locks: list[tuple[int, int, int, int]] = field(default_factory=list)
    #: The sequence that the scan of this era has reached.
    scan: int = 0
    #: The last sequence from which the group delivered new rows that overtook no others. So every row below it was
    #: begun.
    passed: int = 0
    #: One past the highest sequence that was delivered, acked, nacked or buried.
    reach: int = 0
    #: Rows that the group skipped because retention removed them or damage destroyed them.
    skips: list[tuple[int, int]] = field(default_factory=list)

    @property
    def logs_pulls(self) -> bool:
        """True if the log records deliveries with their consumers: as pulls or, for at most once, as acks."""
        return (self.at_most_once or not self.broadcast) and not self.ordered

    @property
    def keeps_order(self) -> bool:
        """True if the messages of a key are handled in order."""
        return self.ordered and not self.affinity

    def learn_order(self, order: str) -> None:
        """Set the order strategy of its subject."""
        self.strict = self.keeps_order and order == STRICT

    @property
    def kind(self) -> str:
        """How the group distributes messages, as the command line names it."""
        if self.affinity:
            return "affinity"
        return "broadcast" if self.broadcast else "ordered" if self.ordered else "shared"


class GroupTable:
    """All groups of a log. ``define`` and ``take`` must be called in log order."""

    def __init__(self, *, whole: bool = True) -> None:
        self.groups: dict[int, GroupFacts] = {}
        #: The log begins with the broker's first event.
        self._whole = whole
        self._begins = 0
        self._client_numbers: dict[tuple[int, str], int] = {}

    def define(self, definition: Definition, *, head: bool = False) -> None:
        """Add a group or a consumer. ``head``: the definition is repeated in a segment header."""
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
        """Record that events are missing here and the log resumes at time ``begins``. The earlier state is unknown."""
        self._whole, self._begins = False, begins
        for group in self.groups.values():
            group.whole, group.begins = False, begins

    def take(self, events: Events) -> None:
        """Add the next events."""
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
            fields = ["place", "action", "holder", "start", "end", "value", "epoch"]
            group.changes += events[_CHANGES_CURSORS[action]][fields].tolist()
            group.locks += events[action == Action.LOCK][["place", "holder", "start", "end"]].tolist()
        group.forgotten |= bool((action == Action.FORGET_GROUP).any())
        made = events[_NAMES_ROWS[action]]
        if len(made):
            group.reach = max(group.reach, int(made["end"].max()))
        rewinds = np.flatnonzero(action == Action.REWIND)
        for piece in np.split(events, rewinds):
            if len(piece) and piece["action"][0] == Action.REWIND:
                group.rewinds.append(int(piece["place"][0]))
                group.rewind_time = int(piece["time"][0])
                to = int(piece["start"][0])
                if group.logs_pulls and not piece["flag"][0]:
                    # Nothing is skipped: the scan continues where it is, if it has not reached the position.
                    to = min(to, group.scan)
                group.start = group.scan = group.passed = to
            if group.logs_pulls:
                self._follow_scan(group, piece[_MOVES_SCAN[piece["action"]] & (piece["start"] < piece["end"])])
        skips = events[(action == Action.SKIP)]
        if len(skips):
            group.skips = merged([*group.skips, *zip(skips["start"].tolist(), skips["end"].tolist(), strict=True)])

    @staticmethod
    def _follow_scan(group: GroupFacts, events: Events) -> None:
        """Advance the scan. Rows that a first delivery gets from there on are new: the rows below came before them."""
        if not len(events):
            return
        reached = np.maximum.accumulate(np.concatenate([[group.scan], events["end"]]))
        delivered = events["action"] == (Action.ACK if group.at_most_once else Action.PULL)
        new = delivered & (events["attempt"] == 1) & (events["start"] == reached[:-1]) & ~events["flag"]
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
