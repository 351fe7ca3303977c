"""What became of each row in a group, and which promises that breaks.

All of it is arrays: a row's events stand together in log order (``touches``), and a judgement is a comparison of
neighbours. What counts as broken is said, for users, in docs/audit.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.inputs.block_rows import BlockRows, Flags, Numbers
from plait.spark.auditing.inputs.cursor_layout import tenures
from plait.spark.auditing.inputs.events import Events
from plait.spark.auditing.touches import Touches
from plait.storage.logs.action_log import FLAG_UNCOUNTED, Action

#: Behind every place of a log: what has not happened yet.
NEVER: Final = 1 << 62


class Fate(IntEnum):
    """What became of a row, as of the end of the log."""

    #: Before the group began, or before where it was reset to.
    OUTSIDE = 0
    ACKED = 1
    DEAD = 2
    EXPIRED = 3
    HELD = 4
    #: Came back, and is to be handed out again.
    RETURNED = 5
    #: Not handed out yet; where pulls are not told, not acked yet.
    PENDING = 6
    LOST = 7
    #: The log does not go back far enough to say.
    UNKNOWN = 8


@dataclass
class GroupVerdict:
    """A group's part of a block."""

    fates: npt.NDArray[np.uint8]
    #: Row numbers of the broken promises, by name.
    broken: dict[str, Numbers] = field(default_factory=dict)
    #: Further counts, by name.
    counts: dict[str, int] = field(default_factory=dict)
    #: For each row, the event that first acked it, and the one that settled it; -1: none.
    first_acks: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    settled_by: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    #: For each row, the log offset of its ack in this era (``NEVER``: none), and whether its order says nothing.
    acked_at: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    excused: Flags = field(default_factory=lambda: np.empty(0, bool))
    #: Of an ordered group: the log offset of its first failure (``NEVER``: none), and how many owners its logical
    #: partition had had before the one that acked it; of a row without an ack, before now.
    failed_at: Numbers | None = None
    tenures: Numbers | None = None


class _ReportedRows:
    """The columns of a row's events, one for each touch."""

    def __init__(self, rows: BlockRows, events: Events, found: Touches, group: GroupFacts) -> None:
        self.rows, self.of = found.rows, found.events
        told = events[found.events]
        self.action: npt.NDArray[Any] = told["action"]
        self.attempt: npt.NDArray[Any] = told["attempt"]
        self.epoch: npt.NDArray[Any] = told["epoch"]
        #: Nothing was lost with the power since the row was stored.
        self.unbroken: Flags = told["epoch"] == rows.epochs[found.rows]
        self.place: Numbers = told["place"]
        self.counted: Flags = (told["flags"] & FLAG_UNCOUNTED) == 0
        resets = np.array(group.resets, np.int64)
        self.era: Numbers = np.searchsorted(resets, self.place)
        self.current: Flags = self.era == len(resets)
        self.client = _clients(told["consumer"], group) if group.logs_pulls else told["consumer"].astype(np.int64)
        self._count = len(rows)

    def any(self, mask: Flags) -> Flags:
        """Which rows have such a touch."""
        found = np.zeros(self._count, bool)
        found[self.rows[mask]] = True
        return found

    def last(self, mask: Flags) -> Numbers:
        """The last such touch of each row; -1: none."""
        found = np.full(self._count, -1, np.int64)
        chosen = np.flatnonzero(mask)
        # Of one row the last assignment counts.
        found[self.rows[chosen]] = chosen
        return found

    def first(self, mask: Flags) -> Numbers:
        """The first such touch of each row; -1: none."""
        found = np.full(self._count, -1, np.int64)
        chosen = np.flatnonzero(mask)[::-1]
        found[self.rows[chosen]] = chosen
        return found

    def events_of(self, touches: Numbers) -> Numbers:
        """The event of each touch; -1: none."""
        found = np.full(len(touches), -1, np.int64)
        found[touches >= 0] = self.of[touches[touches >= 0]]
        return found

    def is_any(self, touches: Numbers, *actions: Action) -> Flags:
        """Where there is a touch, and it is one of these."""
        found = touches >= 0
        found[found] = np.isin(self.action[touches[found]], actions)
        return found


def judge(rows: BlockRows, events: Events, found: Touches, group: GroupFacts) -> GroupVerdict:
    """Rows of a partition and one group."""
    told = _ReportedRows(rows, events, found, group)
    action = told.action
    old = rows.store_times < group.begins if not group.whole else np.zeros(len(rows), bool)
    is_ack = action == Action.ACK
    handed = is_ack & (told.attempt > 0) if group.at_most_once else action == Action.PULL
    acks = told.first(is_ack & told.current)
    fates = _fates(rows, told, group, old)
    if found.joined_at is not None:
        _find_forgotten(fates, told, found.joined_at)
    acked = acks >= 0
    if group.at_most_once:
        # What is handed out counts as acked, unless it is given back.
        last = told.last(told.current & np.isin(action, (Action.ACK, Action.NACK)))
        acked &= ~told.is_any(last, Action.NACK)
    fates[acked] = Fate.ACKED
    settled = told.first(is_ack | np.isin(action, (Action.BURY, Action.SKIP)))
    first_acks = told.first(is_ack)
    if group.ordered and not group.whole:
        # Events name strands, and which rows were whose when the log began is not known.
        fates[:] = Fate.UNKNOWN
    verdict = GroupVerdict(fates)
    verdict.first_acks, verdict.settled_by = told.events_of(first_acks), told.events_of(settled)
    verdict.broken["lost"] = np.flatnonzero(fates == Fate.LOST)
    failed = (action == Action.NACK) & told.counted
    verdict.counts["retried"] = int(failed.sum())
    verdict.counts["died"] = int((action == Action.BURY).sum())
    if group.whole or not group.ordered:
        # Of rows whose strand is not known, others' acks seem to be theirs.
        doubtful = old | rows.loose if group.ordered and rows.loose is not None else old
        _find_duplicates(verdict, told, group, handed, doubtful)
    verdict.acked_at = np.full(len(rows), NEVER)
    verdict.acked_at[acks >= 0] = events["offset"][told.of[acks[acks >= 0]]]
    excused = told.any(np.isin(action, (Action.BURY, Action.REVIVE, Action.SKIP)))
    excused |= np.isin(fates, (Fate.OUTSIDE, Fate.DEAD, Fate.EXPIRED, Fate.UNKNOWN)) | old
    if not group.strict:
        # The next ones of a key come while one that failed waits, and while one that nobody acked comes again.
        excused |= told.any(failed) | (acks < 0)
    verdict.excused = excused
    if group.ordered and not group.affinity:
        fails = told.first(failed & told.current)
        verdict.failed_at = np.full(len(rows), NEVER)
        verdict.failed_at[fails >= 0] = events["offset"][told.of[fails[fails >= 0]]]
        places = np.full(len(rows), NEVER)
        places[acks >= 0] = told.place[acks[acks >= 0]]
        verdict.tenures = tenures(rows.lps, places, group.locks)
    return verdict


def _fates(rows: BlockRows, told: _ReportedRows, group: GroupFacts, old: Flags) -> npt.NDArray[np.uint8]:
    """Of all rows that no ack settled."""
    action, sequences = told.action, rows.sequences
    fates = np.full(len(rows), Fate.PENDING, np.uint8)
    if group.logs_pulls:
        fates[sequences < group.scan] = Fate.RETURNED
        fates[sequences < group.passed] = Fate.LOST
    fates[old] = Fate.UNKNOWN
    fates[sequences < group.start] = Fate.OUTSIDE
    told_now = told.current & np.isin(action, (Action.PULL, Action.NACK, Action.REVIVE, Action.RETURN))
    last = told.last(told_now)
    held = told.is_any(last, Action.PULL)
    fates[last >= 0] = Fate.RETURNED
    fates[held] = Fate.HELD
    if held.any():
        at = last[held]
        gone = _gone_between(told.client[at], told.place[at], np.full(len(at), NEVER), group)
        fates[np.flatnonzero(held)[gone]] = Fate.RETURNED
    fates[told.any(told.current & (action == Action.SKIP))] = Fate.EXPIRED
    ends = told.last(np.isin(action, (Action.BURY, Action.PURGE, Action.REVIVE, Action.PULL)))
    dead = told.is_any(ends, Action.BURY, Action.PURGE)
    if group.logs_pulls:
        # A reset went back before it, and the scan has come by since: whoever was handed it then would be told of.
        passed_by = (sequences >= group.start) & (sequences < group.scan) & ~told.any(told.current)
        dead &= ~passed_by | old
    fates[dead] = Fate.DEAD
    if group.logs_pulls:
        # A reset went back before it: whatever is said of the dead letter, the scan comes by.
        fates[told.is_any(ends, Action.REVIVE, Action.PURGE) & (sequences >= group.scan)] = Fate.PENDING
    return fates


def _find_forgotten(fates: npt.NDArray[np.uint8], told: _ReportedRows, joined_at: Numbers) -> None:
    """What was not done when its strand joined another, and was not told to have come back, is handed out no more."""
    last = told.last(told.current)
    places = np.full(len(fates), -1, np.int64)
    places[last >= 0] = told.place[last[last >= 0]]
    open_still = (fates == Fate.PENDING) | (fates == Fate.RETURNED)
    fates[open_still & (joined_at > places)] = Fate.LOST


def _find_duplicates(
    verdict: GroupVerdict, told: _ReportedRows, group: GroupFacts, handed: Flags, doubtful: Flags
) -> None:
    if group.logs_pulls:
        _find_redelivered(verdict, told, group, handed)
    if group.ordered:
        _find_double_acks_of_strands(verdict, told)
    elif group.at_most_once:
        at = np.flatnonzero(handed | (told.action == Action.NACK))
        before, now = at[:-1], at[1:]
        twice = (
            handed[before] & handed[now] & (told.rows[before] == told.rows[now]) & (told.era[before] == told.era[now])
        )
        verdict.broken["double_acks"] = np.unique(told.rows[now[twice]])
    elif not group.broadcast:
        _find_double_acks(verdict, told, handed)
    for name, numbers in verdict.broken.items():
        if name != "lost":
            verdict.broken[name] = numbers[~doubtful[numbers]]
    is_ack = told.action == Action.ACK
    verdict.counts["acked_again"] = int(_after_first(told, is_ack).sum()) if not group.at_most_once else 0


def _find_redelivered(verdict: GroupVerdict, told: _ReportedRows, group: GroupFacts, handed: Flags) -> None:
    """Count what was handed out again by what went before; in two hands at once is broken."""
    told_of = handed | np.isin(told.action, (Action.NACK, Action.REVIVE, Action.ACK, Action.BURY))
    at = np.flatnonzero(told_of)
    before, now = at[:-1], at[1:]
    again = handed[now] & (told.rows[before] == told.rows[now]) & (told.era[before] == told.era[now])
    before, now = before[again], now[again]
    by = told.action[before]
    was_handed = handed[before]
    mine = was_handed & (told.client[before] == told.client[now])
    left = _gone_between(told.client[before], told.place[before], told.place[now], group)
    restarted = told.epoch[before] != told.epoch[now]
    # A consumer that comes back names what it still has in its hands, and is told to keep it.
    kept = mine & (told.attempt[now] <= told.attempt[before])
    causes = {
        "redelivered_failed": by == Action.NACK,
        "redelivered_resent": by == Action.REVIVE,
        "redelivered_consumer_lost": was_handed & ~kept & (left | mine),
        "redelivered_restart": was_handed & ~kept & ~left & ~mine & restarted,
        "redelivered_after_ack": (by == Action.ACK) & ~was_handed,
    }
    for name, mask in causes.items():
        verdict.counts[name] = int(mask.sum())
    if not group.at_most_once:
        two = was_handed & ~mine & ~left & ~restarted
        verdict.broken["two_hands"] = np.unique(told.rows[now[two]])


def _find_double_acks(verdict: GroupVerdict, told: _ReportedRows, handed: Flags) -> None:
    """Acked by a client that was never handed the row, after another one's ack."""
    is_ack = told.action == Action.ACK
    again = np.flatnonzero(_after_first(told, is_ack))
    if not len(again):
        verdict.broken["double_acks"] = np.empty(0, np.int64)
        return
    eras = _heads(told, is_ack)
    first = eras[np.searchsorted(eras, again, "right") - 1]
    # After a crash an ack may be all that is left of a pull that was lost.
    again = again[(told.client[first] != told.client[again]) & told.unbroken[again]]
    got = _pair(told.rows[handed], told.client[handed])
    stranger = ~np.isin(_pair(told.rows[again], told.client[again]), got)
    verdict.broken["double_acks"] = np.unique(told.rows[again[stranger]])


def _find_double_acks_of_strands(verdict: GroupVerdict, told: _ReportedRows) -> None:
    """An ack of an ordered group is of what its one owner has in hands: a second one without a way back is broken."""
    action = told.action
    at = np.flatnonzero(np.isin(action, (Action.ACK, Action.NACK, Action.RETURN, Action.REVIVE, Action.BURY)))
    before, now = at[:-1], at[1:]
    double = (action[before] == Action.ACK) & (action[now] == Action.ACK)
    double &= (told.rows[before] == told.rows[now]) & (told.era[before] == told.era[now])
    verdict.broken["double_acks"] = np.unique(told.rows[now[double]])


def _heads(told: _ReportedRows, mask: Flags) -> Numbers:
    """The first of such touches of each row in each era, ascending."""
    at = np.flatnonzero(mask)
    new = np.ones(len(at), bool)
    new[1:] = (told.rows[at[1:]] != told.rows[at[:-1]]) | (told.era[at[1:]] != told.era[at[:-1]])
    return at[new]


def _after_first(told: _ReportedRows, mask: Flags) -> Flags:
    """Such touches but for the first of each row in each era."""
    rest = mask.copy()
    rest[_heads(told, mask)] = False
    return rest


def _pair(rows: Numbers, clients: Numbers) -> Numbers:
    return (rows << 32) + (clients & 0xFFFF_FFFF)


def _clients(consumers: npt.NDArray[Any], group: GroupFacts) -> Numbers:
    """The client of each consumer number; one that nobody defined stands for itself."""
    numbers, which = np.unique(consumers, return_inverse=True)
    known = np.array([group.clients.get(number, -number) for number in numbers.tolist()], np.int64)
    clients: Numbers = known[which] if len(known) else np.empty(0, np.int64)
    return clients


def _gone_between(clients: Numbers, after: Numbers, before: Numbers, group: GroupFacts) -> Flags:
    """Whether each client was lost or left between two places."""
    gone = np.zeros(len(clients), bool)
    for client in np.unique(clients).tolist():
        places = np.array(group.gone.get(client, ()), np.int64)
        if len(places):
            mine = clients == client
            gone[mine] = np.searchsorted(places, after[mine]) < np.searchsorted(places, before[mine])
    return gone
