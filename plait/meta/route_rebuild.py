"""Rebuilds the route of a subject from the catalogs of its brokers, after the meta database was lost.

A catalog row has the LPs that a partition accepts, the fences of its sealed LPs, and the sequences from which LPs were
opened again. The spans of each LP follow from these. They are ordered by the route version that opened them. For a span
that was opened when its partition was created, only the partition's creation time is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

import numpy as np

from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import Numbers, runs_with
from plait.model.route import PartitionId, Route, Span, SpanHistory, joined
from plait.wire.admin.cluster import RegisteredPartition

#: The most runs of one partition: its open, sealed and reopened LPs.
_RUNS_MAX: Final = 16 * LOGICAL_PARTITIONS
#: All sequences and versions are below this.
_NUMBER_MAX: Final = 1 << 62
Found = Mapping[PartitionId, RegisteredPartition]


def owners(places: list[PartitionId], found: Found) -> Numbers:
    """For each LP the index of the partition that accepts it, or -1.

    If several partitions accept it (brokers of two merged clusters), the partition with the newest route is chosen.
    """
    numbers: Numbers = np.full(LOGICAL_PARTITIONS, -1, np.int64)
    order = sorted(places, key=lambda place: (found[place].route, place.name == found[place].subject))
    for place in order:
        for first, end in _lps(found[place]):
            numbers[first:end] = places.index(place)
    return numbers


def missing(found: Found) -> int:
    """The number of LPs that no found partition accepts."""
    return int((owners(list(found), found) < 0).sum())


def rebuilt(subject: str, found: Found, version: int) -> Route:
    """The route of partitions that together accept all LPs."""
    places = sorted(found)
    used = set(owners(places, found).tolist())
    places = [place for index, place in enumerate(places) if index in used or found[place].fences]
    owner = owners(places, found)
    edges = {0, LOGICAL_PARTITIONS, *(edge for first, end, _ in runs_with(owner, owner >= 0) for edge in (first, end))}
    for place in places:
        edges.update(edge for first, end, *_ in [*found[place].fences, *found[place].reopened] for edge in (first, end))
    histories = []
    for first, end in pairwise(sorted(edges)):
        closed = sorted(span for index, place in enumerate(places) for span in _closed(index, found[place], first))
        spans = [Span(index, fence) for _, _, index, fence in closed]
        histories.append(SpanHistory(first, end, (*spans, Span(int(owner[first]), None, version))))
    gained = (version,) * len(places)
    return Route(subject, version, tuple(places), joined(histories), tuple(runs_with(owner, owner >= 0)), (), gained)


def _closed(index: int, facts: RegisteredPartition, lp: int) -> Iterator[tuple[int, int, int, int]]:
    """(opening route version, creation time, partition, fence) of an LP's closed spans in one partition."""
    opened = 0
    for first, end, sequence, by in sorted(facts.reopened, key=lambda entry: entry[3]):
        if first <= lp < end:
            if sequence:
                yield opened, facts.created, index, sequence
            opened = by
    for first, end, fence in facts.fences:
        if first <= lp < end and fence:
            yield opened, facts.created, index, fence


def check(facts: RegisteredPartition) -> None:
    """Raise ``InvalidArgument`` for invalid runs of LPs, or too many of them."""
    runs = [*(facts.lps or []), *facts.fences, *facts.reopened]
    for first, end, *numbers in runs:
        if not 0 <= first < end <= LOGICAL_PARTITIONS or not all(0 <= number < _NUMBER_MAX for number in numbers):
            raise InvalidArgument(
                f"partition {facts.name!r}: {(first, end, *numbers)} is not a run of logical partitions"
            )
    if len(runs) > _RUNS_MAX:
        raise InvalidArgument(
            f"partition {facts.name!r} has {len(runs)} runs of logical partitions; at most {_RUNS_MAX} are allowed"
        )


def _lps(facts: RegisteredPartition) -> list[tuple[int, int]]:
    return [(0, LOGICAL_PARTITIONS)] if facts.lps is None else facts.lps
