"""Which locks an ordered consumer asks for, and where (R4).

An LP's rows lie in the spans of its history, oldest first. Its lock is wanted on the partition of the first span that
has not been drained, and on no other: so its rows are handled in their order over any number of changes of the route,
and brokers need not know of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plait.client.consume.ordered.lock_rights import LockReport, LpEpochs, Numbers, no_lps
from plait.client.net.router import RouteSpan, SubjectRoute
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, runs_alike
from plait.wire import messages as m


class WantedLocks(NamedTuple):
    """What one partition is asked for."""

    lps: LpSet
    #: Up to which sequence each is wanted; 0: all that there will be.
    until: Numbers


def with_passed(route: SubjectRoute, group: str, reports: Sequence[LockReport]) -> list[LockReport]:
    """What the partitions have said, and what the group had finished there before, as the meta server knows.

    So a broker that holds nothing for the group need not be there (R26).
    """
    found = list(reports)
    for partition, first, end, fence in route.passed.get(group, ()):
        done = found[partition].done.copy()
        done[first:end] = np.maximum(done[first:end], fence)
        found[partition] = found[partition]._replace(done=done)
    return found


def wanted(route: SubjectRoute, mine: LpSet, reports: Sequence[LockReport]) -> list[WantedLocks]:
    """For each partition of the route the logical partitions to ask it for.

    What has parked keys stays wanted where they are, so that it is heard when they are resumed; so does what has rows
    again. A key that was parked only because it was so before goes on at one partition after the other: what is behind
    is not wanted until it does.
    """
    chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
    heard_of = [_lps_of(report.parked) | report.again for report in reports]
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
                # It left before there was anything.
                continue
            report = reports[span.partition]
            passed = report.done[first:end] >= span.fence
            here = left & (~passed | heard_of[span.partition][first:end])
            chosen[span.partition].lps[first:end] |= here
            chosen[span.partition].until[first:end][here] = span.fence
            left &= passed & ~_going_on(report, before)[first:end]
            if _comes_back(spans, at):
                # What the key has there is behind what it has in between.
                left &= ~_lps_of(report.own)[first:end]
            before |= report.own
        last = chosen[spans[-1].partition]
        last.lps[first:end] |= left
        last.until[first:end][left] = 0
    return chosen


def _going_on(report: LockReport, before: set[int]) -> LpSet:
    """What has keys that are parked where they were not told to be any more: they are told to go on first."""
    return _lps_of(report.inherited - before)


def _comes_back(spans: Sequence[RouteSpan], at: int) -> bool:
    """The route leads from there to a partition where it was before."""
    known = {span.partition for span in spans[: at + 1] if span.fence}
    return any(span.partition in known for span in spans[at + 1 :])


def wanted_at_once(route: SubjectRoute, mine: LpSet) -> list[WantedLocks]:
    """The same where order does not matter: all of them, wherever they have rows."""
    chosen = [WantedLocks(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
    for first, end, spans in route.histories:
        for span in spans:
            chosen[span.partition].lps[first:end] = mine[first:end]
    return chosen


def left_behind(route: SubjectRoute) -> list[LpSet]:
    """For each partition the logical partitions that the route leads on from."""
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
    """For each partition the hashes of keys that are parked where their rows were before those that it is asked for."""
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
            # Of two that end at one place the later one has nothing.
            if span not in seen:
                found[span.partition] |= {
                    key
                    for key in before
                    if some.lps[key % LOGICAL_PARTITIONS] and some.until[key % LOGICAL_PARTITIONS] == fence
                }
            seen.add(span)
            before |= {key for key in reports[span.partition].own if first <= key % LOGICAL_PARTITIONS < end}
    return found


def wants(lps: LpSet, epochs: LpEpochs, until: Numbers) -> list[m.LpWant]:
    """What is asked for, as runs of one epoch and one end."""
    return [(first, end, int(epochs[first]), int(until[first])) for first, end in runs_alike(lps, epochs, until)]
