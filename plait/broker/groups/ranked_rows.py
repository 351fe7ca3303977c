"""Delivers the rows of a shared group by priority and tenant: what the group's look-ahead chooses."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import groupby
from operator import attrgetter

from plait.broker.groups.group import Group
from plait.broker.groups.look_ahead import LookAhead
from plait.broker.groups.waking import wake_group
from plait.storage.ranges import Ranges
from plait.storage.shared_cursor import SharedCursor

#: Rows that one pull chooses at most: it delivers about as many of them as it has room for.
CHOSEN_MAX = 4_096


class RankedRows:
    """The rows that a group delivers next, in the order of their priorities. Valid during one pull."""

    __slots__ = ("_cursor", "_group", "_look", "_parts")

    def __init__(self, group: Group, cursor: SharedCursor) -> None:
        self._group, self._cursor = group, cursor
        self._look = LookAhead(cursor, group.partition, group.journal.message_log, group.definition.fair_by)
        #: The chosen rows that are not delivered yet, in parts of one priority each.
        self._parts: deque[Ranges] = deque()

    def returned(self, start: int, end: int) -> None:
        """A consumer returned rows that it had not begun."""
        self._look.add(start, end)

    def next(self, count: int, runs: int) -> Ranges | None:
        """Rows of one priority to deliver next, of which at most ``count`` are chosen; None: there are none now."""
        while True:
            while self._parts:
                part = self._parts[0]
                while part:
                    start, end, _ = part.head()
                    rest = self._cursor.unbegun(start, end)
                    first = rest[0][0] if rest else end
                    if first == start:
                        return part
                    part.remove(start, first)
                self._parts.popleft()
            self.settle()
            if not self._choose(min(count, CHOSEN_MAX), runs):
                return None

    def _choose(self, count: int, runs: int) -> bool:
        scans = self._group.journal.scans
        if not self._look.examine(scans.budget):
            scans.later(self._group, partial(wake_group, self._group))
        for _, chosen in groupby(self._look.choose(count, runs), attrgetter("priority")):
            part = Ranges()
            for _, _, start, end in chosen:
                part.add(start, end, 0)
            self._parts.append(part)
        return bool(self._parts)

    def settle(self) -> None:
        """End a pull: rows that were chosen and not delivered come first in the next one."""
        self._parts.clear()
        self._look.settle()
