"""Defects that ordered groups had and that are fixed. When one is patched in again, the model must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.broker.granted_numbers import GrantedNumbers
from plait.broker.groups.attachments import Attachments
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.in_flight import InFlightRows
from plait.broker.groups.ordered.lease_grants import LeaseGrants
from plait.broker.groups.ordered.ordered_delivery import OrderedDelivery, RowTake
from plait.broker.groups.ordered.row_reader import Count, RowCounter
from plait.broker.partitions.frame_search import KnownRows
from plait.broker.partitions.partition import Partition
from plait.storage.cursor import Cursor

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]


def take_a_row_that_does_not_fit_again(patch: Patch) -> None:
    """A pull tries the next row of a failed key again and again although it does not fit."""

    def naive(self: OrderedDelivery, cursor: Cursor, taking: RowTake) -> None:
        while taking.more:
            start, end, attempt = cursor.next, self._cursors.parent(cursor).next, 0
            if cursor.returned:
                start, end, attempt = cursor.returned.head()
            if attempt:
                taking.limit(0 if cursor.held else 1)
            if start >= cursor.until(end) or not taking.more:
                break
            self._serve([cursor], start, cursor.until(end), attempt, taking)
            taking.full = False

    patch.setattr(OrderedDelivery, "_take_key", naive)


def believe_any_number(patch: Patch) -> None:
    """Any epoch or route version is accepted, however high it is."""
    patch.setattr(GrantedNumbers, "check", lambda self, what, number: None)


def believe_any_name(patch: Patch) -> None:
    """R28: a client id alone, without its session token, proves that a consumer is the same one."""
    patch.setattr(Attachments, "_displace", lambda self, consumer, now: consumer)


def keep_recovered_keys_apart(patch: Patch) -> None:
    """A key that failed and recovered keeps its own cursor until nothing else is in flight."""
    rejoin = InFlightRows.rejoin

    def naive(self: InFlightRows, keys: list[Cursor]) -> list[Cursor]:
        alone = [key for key in keys if not self._cursors.parent(key).begun(0, 1 << 62)]
        return [key for key in keys if key not in alone] + rejoin(self, alone)

    patch.setattr(InFlightRows, "rejoin", naive)


def count_rows_of_others(patch: Patch) -> None:
    """Lag and lost rows are counted by the lengths of ranges, which include rows of other owners."""

    def naive(self: RowCounter, cursor: Cursor, ranges: list[tuple[int, int]]) -> Count:
        return Count(sum(end - start for start, end in ranges), True)

    patch.setattr(RowCounter, "_count", naive)


def remember_every_key(patch: Patch) -> None:
    """The keys of rows that were read stay in memory."""

    def naive(self: KnownRows, place: Any, facts: Any, rows: int) -> None:
        self._known[place] = facts, rows
        self._rows += rows

    patch.setattr(KnownRows, "put", naive)


def believe_any_key(patch: Patch) -> None:
    """A parked key may be any number, of any logical partition."""
    patch.setattr(LeaseGrants, "_checked_keys", lambda self, keys, lps, what: keys)


def rewind_over_returned_rows(patch: Patch) -> None:
    """A rewind forgets rows before its position that were returned or wait for a retry."""

    def naive(self: Cursor, sequence: int) -> None:
        self.drop()
        self.returned.clear()
        self.waiting.clear()
        self.next = min(self.next, sequence)

    patch.setattr(Cursor, "rewound", naive)


def forget_pauses_at_a_restart(patch: Patch) -> None:
    """A group that is loaded at a start is not paused, whatever the settings of its subject say."""
    add = Partition.add_group

    def naive(self: Partition, group: Group) -> None:
        add(self, group)
        group.paused = 0

    patch.setattr(Partition, "add_group", naive)
