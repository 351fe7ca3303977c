"""The outcome of each row in a group, and the promises that it breaks.

All state is in arrays: the events of a row are adjacent and in log order (``touches``), and a judgement compares
neighbours. docs/audit.md defines for users what counts as broken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.spark.auditing.block_arrays import BlockRows, Events, Flags, Numbers, begins_of
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.touches import Touches, tenures
from plait.storage.logs.action_events import Action

#: The place of an event that has not happened. It is after every place of a log.
NEVER: Final = 1 << 62


class Fate(IntEnum):
    """The state of a row in a group at the end of the log."""

    #: Before the first sequence of the group, or before the sequence that it was rewound to.
    OUTSIDE = 0
    ACKED = 1
    DEAD = 2
    EXPIRED = 3
    HELD = 4
    #: Returned or failed; is to be delivered again.
    RETURNED = 5
    #: Not delivered yet. Where the log does not record pulls: not acked yet.
    PENDING = 6
    LOST = 7
    #: The log begins too late to tell.
    UNKNOWN = 8
    #: The group's filter left it out.
    FILTERED = 9


@dataclass
class GroupVerdict:
    """The verdict on the rows of a block for one group."""

    fates: npt.NDArray[np.uint8]
    #: Row numbers of the broken promises, by name.
    broken: dict[str, Numbers] = field(default_factory=dict)
    #: Further counts, by name.
    counts: dict[str, int] = field(default_factory=dict)
    #: For each row, the event that first acked it, and the event that gave it its outcome. -1: none.
    first_acks: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    settled_by: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    #: For each row, the log offset of its ack in this era (``NEVER``: none), and whether no row has to wait for it.
    acked_at: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    excused: Flags = field(default_factory=lambda: np.empty(0, bool))
    #: Of an ordered group: the log offset of the row's first failure (``NEVER``: none), and how many owners its LP had
    #: before the owner that acked the row; for a row without an ack, before the end of the log.
    failed_at: Numbers | None = None
    tenures: Numbers | None = None


class _TouchColumns:
    """The columns of the events, one element for each touch (a pair of a row and an event)."""

    def __init__(self, rows: BlockRows, events: Events, found: Touches, group: GroupFacts) -> None:
        self.rows, self.of = found.rows, found.events
        touching = events[found.events]
        self.action: npt.NDArray[Any] = touching["action"]
        self.attempt: npt.NDArray[Any] = touching["attempt"]
        self.epoch: npt.NDArray[Any] = touching["epoch"]
        #: No power failure lost events since the row was stored.
        self.unbroken: Flags = touching["epoch"] == rows.epochs[found.rows]
        self.place: Numbers = touching["place"]
        self.offset: Numbers = touching["offset"]
        self.counted: Flags = ~touching["flag"]
        rewinds = np.array(group.rewinds, np.int64)
        self.era: Numbers = np.searchsorted(rewinds, self.place)
        self.current: Flags = self.era == len(rewinds)
        holders = touching["holder"]
        self.client = _clients(holders, group) if group.logs_pulls else holders.astype(np.int64)
        self._count = len(rows)

    def any(self, mask: Flags) -> Flags:
        """Which rows have a touch in ``mask``."""
        found = np.zeros(self._count, bool)
        found[self.rows[mask]] = True
        return found

    def last(self, mask: Flags) -> Numbers:
        """The last touch in ``mask`` of each row. -1: none."""
        found = np.full(self._count, -1, np.int64)
        chosen = np.flatnonzero(mask)
        # The last assignment to a row wins.
        found[self.rows[chosen]] = chosen
        return found

    def first(self, mask: Flags) -> Numbers:
        """The first touch in ``mask`` of each row. -1: none."""
        found = np.full(self._count, -1, np.int64)
        chosen = np.flatnonzero(mask)[::-1]
        found[self.rows[chosen]] = chosen
        return found

    @staticmethod
    def pick(values: Numbers, touches: Numbers, none: int = -1) -> Numbers:
        """The value of each touch. ``none``: there is no touch (-1)."""
        found = np.full(len(touches), none, np.int64)
        found[touches >= 0] = values[touches[touches >= 0]]
        return found

    def is_any(self, touches: Numbers, *actions: Action) -> Flags:
        """Whether each is a touch with one of these actions."""
        found = touches >= 0
        found[found] = np.isin(self.action[touches[found]], actions)
        return found


def judge(rows: BlockRows, events: Events, found: Touches, group: GroupFacts) -> GroupVerdict:
    """Judge rows of a partition for one group."""
    touched = _TouchColumns(rows, events, found, group)
    action = touched.action
    # Events of the same microsecond may precede the first one that is left.
    old = rows.store_times <= group.begins if not group.whole else np.zeros(len(rows), bool)
    is_ack = action == Action.ACK
    delivered = is_ack & (touched.attempt > 0) if group.at_most_once else action == Action.PULL
    acks = touched.first(is_ack & touched.current)
    fates = _fates(rows, touched, group, old)
    if found.joined_at is not None:
        _find_forgotten(fates, touched, found.joined_at)
    acked = acks >= 0
    if group.at_most_once:
        # A delivered row counts as acked, unless it is returned.
        last = touched.last(touched.current & np.isin(action, (Action.ACK, Action.NACK)))
        acked &= ~touched.is_any(last, Action.NACK)
    fates[acked] = Fate.ACKED
    settled = touched.first(is_ack | np.isin(action, (Action.BURY, Action.SKIP, Action.FILTERED)))
    first_acks = touched.first(is_ack)
    if group.ordered and not group.whole:
        # Events name cursors, and the rows of each cursor are not known where the log begins.
        fates[:] = Fate.UNKNOWN
    verdict = GroupVerdict(fates)
    verdict.first_acks, verdict.settled_by = (touched.pick(touched.of, each) for each in (first_acks, settled))
    verdict.broken["lost"] = np.flatnonzero(fates == Fate.LOST)
    failed = (action == Action.NACK) & touched.counted
    verdict.counts["retried"] = int(failed.sum())
    verdict.counts["died"] = int((action == Action.BURY).sum())
    if group.whole or not group.ordered:
        _find_duplicates(verdict, touched, group, delivered, old)
    verdict.acked_at = touched.pick(touched.offset, acks, NEVER)
    excused = touched.any(np.isin(action, (Action.BURY, Action.REVIVE, Action.SKIP)))
    excused |= np.isin(fates, (Fate.OUTSIDE, Fate.DEAD, Fate.EXPIRED, Fate.FILTERED, Fate.UNKNOWN)) | old
    if not group.strict:
        # Later messages of a key are delivered while a failed one waits, and while an unacked one is redelivered.
        excused |= touched.any(failed) | (acks < 0)
    verdict.excused = excused
    if group.keeps_order:
        fails = touched.first(failed & touched.current)
        verdict.failed_at = touched.pick(touched.offset, fails, NEVER)
        verdict.tenures = tenures(rows.lps, touched.pick(touched.place, acks, NEVER), group.locks)
    return verdict


def _fates(rows: BlockRows, touched: _TouchColumns, group: GroupFacts, old: Flags) -> npt.NDArray[np.uint8]:
    """The fates of the rows. Acks are not considered yet."""
    action, sequences = touched.action, rows.sequences
    fates = np.full(len(rows), Fate.PENDING, np.uint8)
    if group.logs_pulls:
        fates[sequences < group.passed] = Fate.LOST
    fates[old] = Fate.UNKNOWN
    fates[sequences < group.start] = Fate.OUTSIDE
    moves = touched.current & np.isin(action, (Action.PULL, Action.NACK, Action.REVIVE, Action.RETURN, Action.FILTERED))
    last = touched.last(moves)
    held = touched.is_any(last, Action.PULL)
    fates[last >= 0] = Fate.RETURNED
    fates[held] = Fate.HELD
    fates[touched.is_any(last, Action.FILTERED)] = Fate.FILTERED
    if held.any():
        at = last[held]
        gone = _gone_between(touched.client[at], touched.place[at], np.full(len(at), NEVER), group)
        fates[np.flatnonzero(held)[gone]] = Fate.RETURNED
    fates[touched.any(touched.current & (action == Action.SKIP))] = Fate.EXPIRED
    # A late ack removes a dead letter.
    ends = touched.last(np.isin(action, (Action.BURY, Action.PURGE, Action.REVIVE, Action.PULL, Action.ACK)))
    dead = touched.is_any(ends, Action.BURY, Action.PURGE)
    # Dead letters from the position of a rewind on are rows again.
    dead &= (touched.pick(touched.current.astype(np.int64), ends) == 1) | (sequences < group.start)
    fates[dead] = Fate.DEAD
    if group.logs_pulls:
        # A rewind moved the group back before the row. The scan will reach it, whether its dead letter was resent or
        # purged.
        fates[touched.is_any(ends, Action.REVIVE, Action.PURGE) & (sequences >= group.scan)] = Fate.PENDING
    return fates


def _find_forgotten(fates: npt.NDArray[np.uint8], touched: _TouchColumns, joined_at: Numbers) -> None:
    """Find lost rows: they were not done when their cursor joined another one, and were not returned since."""
    places = touched.pick(touched.place, touched.last(touched.current))
    open_still = (fates == Fate.PENDING) | (fates == Fate.RETURNED)
    fates[open_still & (joined_at > places)] = Fate.LOST


def _find_duplicates(
    verdict: GroupVerdict, touched: _TouchColumns, group: GroupFacts, delivered: Flags, old: Flags
) -> None:
    if group.logs_pulls:
        _find_redelivered(verdict, touched, group, delivered)
    if group.ordered:
        _find_double_acks_of_cursors(verdict, touched)
    elif group.at_most_once:
        at = np.flatnonzero(delivered | (touched.action == Action.NACK))
        before, now = at[:-1], at[1:]
        twice = delivered[before] & delivered[now]
        twice &= (touched.rows[before] == touched.rows[now]) & (touched.era[before] == touched.era[now])
        verdict.broken["double_acks"] = np.unique(touched.rows[now[twice]])
    elif not group.broadcast:
        _find_double_acks(verdict, touched, delivered)
    for name, numbers in verdict.broken.items():
        if name != "lost":
            verdict.broken[name] = numbers[~old[numbers]]
    is_ack = touched.action == Action.ACK
    verdict.counts["acked_again"] = int(_after_first(touched, is_ack).sum()) if not group.at_most_once else 0


def _find_redelivered(verdict: GroupVerdict, touched: _TouchColumns, group: GroupFacts, delivered: Flags) -> None:
    """Count redeliveries by the event before them. A row that two consumers hold at once is a broken promise."""
    relevant = delivered | np.isin(touched.action, (Action.NACK, Action.REVIVE, Action.ACK, Action.BURY))
    at = np.flatnonzero(relevant)
    before, now = at[:-1], at[1:]
    again = delivered[now] & (touched.rows[before] == touched.rows[now]) & (touched.era[before] == touched.era[now])
    before, now = before[again], now[again]
    by = touched.action[before]
    was_delivered = delivered[before]
    same_client = was_delivered & (touched.client[before] == touched.client[now])
    left = _gone_between(touched.client[before], touched.place[before], touched.place[now], group)
    restarted = touched.epoch[before] != touched.epoch[now]
    # A consumer that reconnects names the rows that it still holds, and the broker confirms them.
    confirmed = same_client & (touched.attempt[now] <= touched.attempt[before])
    causes = {
        "redelivered_failed": by == Action.NACK,
        "redelivered_resent": by == Action.REVIVE,
        "redelivered_consumer_lost": was_delivered & ~confirmed & (left | same_client),
        "redelivered_restart": was_delivered & ~confirmed & ~left & ~same_client & restarted,
        "redelivered_after_ack": (by == Action.ACK) & ~was_delivered,
    }
    for name, mask in causes.items():
        verdict.counts[name] = int(mask.sum())
    if not group.at_most_once:
        two = was_delivered & ~same_client & ~left & ~restarted
        verdict.broken["delivered_twice"] = np.unique(touched.rows[now[two]])


def _find_double_acks(verdict: GroupVerdict, touched: _TouchColumns, delivered: Flags) -> None:
    """Rows acked by a client that the row was never delivered to, after the ack of another client."""
    is_ack = touched.action == Action.ACK
    again = np.flatnonzero(_after_first(touched, is_ack))
    if not len(again):
        verdict.broken["double_acks"] = np.empty(0, np.int64)
        return
    eras = _firsts(touched, is_ack)
    first = eras[np.searchsorted(eras, again, "right") - 1]
    # After a crash, the log may have the ack of a delivery whose pull event was lost.
    again = again[(touched.client[first] != touched.client[again]) & touched.unbroken[again]]
    got = _pair(touched.rows[delivered], touched.client[delivered])
    stranger = ~np.isin(_pair(touched.rows[again], touched.client[again]), got)
    verdict.broken["double_acks"] = np.unique(touched.rows[again[stranger]])


def _find_double_acks_of_cursors(verdict: GroupVerdict, touched: _TouchColumns) -> None:
    """Find second acks in an ordered group without a return or failure before them: only the owner holds a row."""
    action = touched.action
    at = np.flatnonzero(np.isin(action, (Action.ACK, Action.NACK, Action.RETURN, Action.REVIVE, Action.BURY)))
    before, now = at[:-1], at[1:]
    double = (action[before] == Action.ACK) & (action[now] == Action.ACK)
    double &= (touched.rows[before] == touched.rows[now]) & (touched.era[before] == touched.era[now])
    verdict.broken["double_acks"] = np.unique(touched.rows[now[double]])


def _firsts(touched: _TouchColumns, mask: Flags) -> Numbers:
    """The first touch in ``mask`` of each row in each era, ascending."""
    at = np.flatnonzero(mask)
    return at[begins_of(touched.rows[at], touched.era[at])]


def _after_first(touched: _TouchColumns, mask: Flags) -> Flags:
    """The touches in ``mask`` except the first of each row in each era."""
    rest = mask.copy()
    rest[_firsts(touched, mask)] = False
    return rest


def _pair(rows: Numbers, clients: Numbers) -> Numbers:
    return (rows << 32) + (clients & 0xFFFF_FFFF)


def _clients(consumers: npt.NDArray[Any], group: GroupFacts) -> Numbers:
    """The client of each consumer number. A consumer without a definition counts as a client of its own."""
    numbers, which = np.unique(consumers, return_inverse=True)
    known = np.array([group.clients.get(number, -number) for number in numbers.tolist()], np.int64)
    clients: Numbers = known[which] if len(known) else np.empty(0, np.int64)
    return clients


def _gone_between(clients: Numbers, after: Numbers, before: Numbers, group: GroupFacts) -> Flags:
    """Whether each client left or was lost between two places."""
    gone = np.zeros(len(clients), bool)
    for client in np.unique(clients).tolist():
        places = np.array(group.gone.get(client, ()), np.int64)
        if len(places):
            mine = clients == client
            gone[mine] = np.searchsorted(places, after[mine]) < np.searchsorted(places, before[mine])
    return gone
