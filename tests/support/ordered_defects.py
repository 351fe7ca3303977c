"""Defects of ordered groups that were mended: put one back into the shipped classes, and the model must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.broker.group import Journal
from plait.broker.keys import FrameKeys, KnownRows
from plait.broker.leases import Leases
from plait.broker.membership import Membership
from plait.broker.numbers import Numbers
from plait.broker.ordered import OrderedGroup
from plait.broker.row_counts import Count, RowCounter
from plait.broker.strand_rows import Taking
from plait.storage.strand import Strand

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]


def take_a_row_that_does_not_fit_again(patch: Patch) -> None:
    """A pull tries the next row of a key that failed again and again though it does not fit."""

    def naive(self: OrderedGroup, strand: Strand, taking: Taking, journal: Journal) -> None:
        while taking.more:
            start, end, attempt = strand.next, self._parent(strand).next, 0
            if strand.returned:
                start, end, attempt = strand.returned.head()
            if attempt:
                taking.limit(0 if strand.held else 1)
            if start >= strand.until(end) or not taking.more:
                break
            self._serve([strand], start, strand.until(end), attempt, taking, journal)
            taking.full = False

    patch.setattr(OrderedGroup, "_take_key", naive)


def believe_any_number(patch: Patch) -> None:
    """An epoch or a route version counts, however high it is."""
    patch.setattr(Numbers, "check", lambda self, what, number: None)


def believe_any_name(patch: Patch) -> None:
    """R28: who comes under a client id is who had it before."""
    patch.setattr(Membership, "_another", lambda self, consumer, now: consumer)


def keep_recovered_keys_apart(patch: Patch) -> None:
    """A key that failed and recovered is a strand of its own until nothing else is in flight."""
    rejoin = OrderedGroup._rejoin

    def naive(self: OrderedGroup, keys: list[Strand], journal: Journal) -> list[Strand]:
        alone = [key for key in keys if not self._parent(key).begun(0, 1 << 62)]
        return [key for key in keys if key not in alone] + rejoin(self, alone, journal)

    patch.setattr(OrderedGroup, "_rejoin", naive)


def count_rows_of_others(patch: Patch) -> None:
    """Lag and lost rows are counted by the lengths of ranges, which reach over rows of other owners."""

    def naive(self: RowCounter, strand: Strand, ranges: list[tuple[int, int]]) -> Count:
        return Count(sum(end - start for start, end in ranges), True)

    patch.setattr(RowCounter, "_count", naive)


def remember_every_key(patch: Patch) -> None:
    """The keys of rows that were looked at stay in memory."""

    def naive(self: KnownRows, place: tuple[int, int], keys: FrameKeys) -> None:
        self._known[place] = keys
        self._rows += len(keys.lps)

    patch.setattr(KnownRows, "put", naive)


def believe_any_key(patch: Patch) -> None:
    """A parked key may be any number, of any logical partition."""
    patch.setattr(Leases, "_checked_keys", lambda self, keys, lps: keys)
