"""Decides which locks an ordered consumer asks for, and at which partition (R4).

The rows of an LP are in the spans of its history, oldest first. The consumer asks for the lock only at the partition of
the first span that is not drained. So rows are handled in order across any number of route changes, and brokers need
not know of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plait.client.consume.ordered.ordered_delivered import Numbers, no_lps
from plait.client.net.router import RouteSpan, SubjectRoute
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, runs_alike
from plait.wire import messages as m


class LockReport(NamedTuple):
    """The state of a group's LPs in one partition, as its broker reported it."""

    #: The sequence up to which each LP is drained.
    done: Numbers
    #: Hashes of the keys parked here; ``inherited`` are those parked only because an earlier partition parks them.
    parked: frozenset[int]
    inherited: frozenset[int]
    #: Sealed LPs that have unfinished rows, or have some again.
    again: LpSet

    @property
    def own(self) -> frozenset[int]:
        """Keys whose own dead letter is in this partition: they wait for ``resume`` or ``skip`` there."""
        return self.parked - self.inherited


def empty_report() -> LockReport:
    """The report of a partition that has not answered yet."""
    return LockReport(np.zeros(LOGICAL_PARTITIONS, np.int64), frozenset(), frozenset(), no_lps())


class WantedLocks(NamedTuple):
    """The locks to ask one partition for."""

    lps: LpSet
    #: The fence up to which each LP is wanted; 0: no fence, the LP is not sealed there.
    until: Numbers


def with_passed(route: SubjectRoute, group: str, reports: Sequence[LockReport]) -> list[LockReport]:
    """The partitions' reports, raised to what the group has finished according to the meta server.

    So a broker that holds nothing for the group need not be reachable (R26).
    """
    found = list(reports)
    for partition, first, end, fence in route.passed.get(group, ()):
        done = found[partition].done.copy()
        done[first:end] = np.maximum(done[first:end], fence)
        found[partition] = found[partition]._replace(done=done)
    return found


def wanted(route: SubjectRoute, mine: LpSet, reports: Sequence[LockReport]) -> list[WantedLocks]:
    """The locks to ask for, for each partition of the route.

    An LP with parked keys stays wanted at the partition that parks them, so that the consumer learns when they are
    resumed; so does an LP that has rows again. An inherited parked key is resumed at one partition after the other:
    later spans of its LP are not wanted until that is done.
    """
    chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
    watched = [_lps_of(report.parked) | report.again for report in reports]
    for first, end, spans in route.histories:
        if len(spans) == 1:
            chosen[spans[0].partition].lps[first:end] |= mine[first:end]
            continue
        left = mine[first:end].copy()
        if not left.any():
            continue
        before: set[int] = set()
        for at, span in enumerate(spans[:-1]):
            if not span.fence:
                # The LP moved on before the partition had any row of it.
                continue
            report = reports[span.partition]
            passed = report.done[first:end] >= span.fence
            here = left & (~passed | watched[span.partition][first:end])
            chosen[span.partition].lps[first:end] |= here
            chosen[span.partition].until[first:end][here] = span.fence
            left &= passed & ~_to_resume_first(report, before)[first:end]
            if _comes_back(spans, at):
                # The key's rows in the later span come after those of the spans in between.
                left &= ~_lps_of(report.own)[first:end]
            before |= report.own
        last = chosen[spans[-1].partition]
        last.lps[first:end] |= left
        last.until[first:end][left] = 0
    return chosen


def _to_resume_first(report: LockReport, before: set[int]) -> LpSet:
    """LPs with inherited parked keys that no earlier partition parks any more: these keys are resumed first."""
    return _lps_of(report.inherited - before)


def _comes_back(spans: Sequence[RouteSpan], at: int) -> bool:
    """True if a later span is at a partition that already had a span up to ``at``."""
    known = {span.partition for span in spans[: at + 1] if span.fence}
    return any(span.partition in known for span in spans[at + 1 :])


def wanted_at_once(route: SubjectRoute, mine: LpSet) -> list[WantedLocks]:
    """The locks to ask for where order does not matter: each LP at every partition of its history."""
    chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
    for first, end, spans in route.histories:
        for span in spans:
            chosen[span.partition].lps[first:end] = mine[first:end]
    return chosen


def left_behind(route: SubjectRoute) -> list[LpSet]:
    """For each partition, the LPs whose route has moved on to a later span."""
    left = [no_lps() for _ in route.partitions]
    for first, end, spans in route.histories:
        for span in spans[:-1]:
            left[span.partition][first:end] = True
    return left


def _lps_of(keys: frozenset[int]) -> LpSet:
    lps = no_lps()
    if keys:
        lps[[key % LOGICAL_PARTITIONS for key in keys]] = True
    return lps


def parked_before(route: SubjectRoute, reports: Sequence[LockReport], chosen: Sequence[WantedLocks]) -> list[set[int]]:
    """For each partition, the hashes of keys that an earlier partition parks, of the LPs that it is asked for."""
    found: list[set[int]] = [set() for _ in route.partitions]
    if not any(report.parked for report in reports):
        return found
    for first, end, spans in route.histories:
        before: set[int] = set()
        seen: set[RouteSpan] = set()
        for span in spans:
            if span.fence == 0:
                continue
            some, fence = chosen[span.partition], span.fence or 0
            # Of two equal spans the later one has no rows.
            if span not in seen:
                found[span.partition] |= {
                    key
                    for key in before
                    if some.lps[key % LOGICAL_PARTITIONS] and some.until[key % LOGICAL_PARTITIONS] == fence
                }
            seen.add(span)
            before |= {key for key in reports[span.partition].own if first <= key % LOGICAL_PARTITIONS < end}
    return found


def wants(lps: LpSet, epochs: Numbers, until: Numbers) -> list[m.LpWant]:
    """The wanted LPs as runs with one epoch and one fence."""
    return [(first, end, int(epochs[first]), int(until[first])) for first, end in runs_alike(lps, epochs, until)]
