"""Which locks an ordered consumer asks for, and where (R4).

An LP's rows lie in the spans of its history, oldest first. Its lock is wanted on the partition of the first span that
has not been drained, and on no other: so its rows are handled in their order over any number of changes of the route,
and brokers need not know of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plait.client.rights import LpEpochs, Numbers, Report, no_lps
from plait.client.router import SubjectRoute
from plait.frame.lp import LpSet, runs_alike
from plait.limits import LOGICAL_PARTITIONS
from plait.wire import messages as m


class Wanted(NamedTuple):
    """What one partition is asked for."""

    lps: LpSet
    #: Up to which sequence each is wanted; 0: all that there will be.
    until: Numbers


def wanted(route: SubjectRoute, mine: LpSet, reports: Sequence[Report]) -> list[Wanted]:
    """For each partition of the route the logical partitions to ask it for.

    What has parked keys stays wanted where they are, so that it is heard when they are resumed; so does what has rows
    again.
    """
    chosen = [Wanted(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
    heard_of = [_lps_of(report.parked) | report.again for report in reports]
    for first, end, spans in route.histories:
        if len(spans) == 1:
            chosen[spans[0].partition].lps[first:end] |= mine[first:end]
            continue
        left = mine[first:end].copy()
        if not left.any():
            continue
        for at, span in enumerate(spans[:-1]):
            assert span.fence is not None
            report = reports[span.partition]
            passed = report.done[first:end] >= span.fence
            here = left & (~passed | heard_of[span.partition][first:end])
            chosen[span.partition].lps[first:end] |= here
            chosen[span.partition].until[first:end][here] = span.fence
            left &= passed
            if any(later.partition == span.partition for later in spans[at + 1 :]):
                # The route comes back here: what the key has there is behind what it has in between.
                left &= ~_lps_of(report.own)[first:end]
        last = chosen[spans[-1].partition]
        last.lps[first:end] |= left
        last.until[first:end][left] = 0
    return chosen


def wanted_at_once(route: SubjectRoute, mine: LpSet) -> list[Wanted]:
    """The same where order does not matter: all of them, wherever they have rows."""
    chosen = [Wanted(no_lps(), np.zeros(LOGICAL_PARTITIONS, np.int64)) for _ in route.partitions]
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


def parked_before(route: SubjectRoute, reports: Sequence[Report]) -> list[set[int]]:
    """For each partition the hashes of keys that are parked on partitions where their rows were before."""
    found: list[set[int]] = [set() for _ in route.partitions]
    if not any(report.parked for report in reports):
        return found
    for first, end, spans in route.histories:
        before: set[int] = set()
        for span in spans:
            found[span.partition] |= before
            before |= {key for key in reports[span.partition].own if first <= key % LOGICAL_PARTITIONS < end}
    return found


def wants(lps: LpSet, epochs: LpEpochs, until: Numbers) -> list[m.LpWant]:
    """What is asked for, as runs of one epoch and one end."""
    return [(first, end, int(epochs[first]), int(until[first])) for first, end in runs_alike(lps, epochs, until)]
