"""A subject's route: which partition accepts the rows of each logical partition (LP), and which ones have older rows.

For each LP the route has a list of *spans*, oldest first. A span names a partition and a fence: the sequence at which
the LP was sealed there. The last span is open: its fence is None, and its partition accepts new rows. A span changes
only once, when it gets its fence. So a consumer that reads the spans of an LP one after another gets the rows in the
order in which they were sent.

The *target* of a route says which partition should accept each LP. A new target is stored at once. The LPs then move in
two steps, partition by partition:

1. The broker that has the LPs seals them. The seal is durable and gives the fence.
2. The meta server publishes a route version in which the LPs have a new span.

A crash, a lost reply or another target may come between the two steps. So an LP that *may* be sealed stays in the list
of moves until it gets a new span, which may be in the same partition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import (
    LpSet,
    NumberedRun,
    Numbers,
    Run,
    balance,
    edges,
    lp_set,
    runs_of,
    runs_with,
    shares,
    spread,
)


class PartitionId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The identity of a partition: its name, and the broker group that stores it."""

    name: str
    group: str

    def __str__(self) -> str:
        return f"{self.name}@{self.group}"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Rows of an LP in one partition, with sequences below the fence. An open span has no fence."""

    #: Index in ``Route.partitions``.
    partition: int
    fence: int | None = None
    #: The version that opened the span; 0 once it has a fence.
    opened: int = 0


class SpanHistory(msgspec.Struct, frozen=True, array_like=True):
    """The spans of LPs [first, end), oldest first."""

    first: int
    end: int
    spans: tuple[Span, ...]


class Route(msgspec.Struct, frozen=True, array_like=True):
    """One version of a subject's route. Indexes of partitions are valid within one version only."""

    subject: str
    #: Grows by one with each change. A subject that is deleted and created again starts above its former versions.
    version: int
    partitions: tuple[PartitionId, ...]
    #: Ordered by LP, without gap or overlap.
    histories: tuple[SpanHistory, ...]
    #: (first, end, partition): the partition that should accept the LPs. If no LP has to move, it is the partition that
    #: accepts them now.
    target: tuple[NumberedRun, ...]
    #: LPs that stay in their partition but may be sealed there, because an earlier target was to move them away.
    doubt: tuple[Run, ...] = ()
    #: For each partition, the version that added it or last gave it an LP. Its broker has to know this version.
    gained: tuple[int, ...] = ()
    #: Group → the version that it began with, for groups that retired partitions knew (``meta/subjects.py``).
    began: dict[str, int] = {}


def current(route: Route) -> Numbers:
    """For each LP, the index of the partition that accepts its new rows."""
    return spread([(history.first, history.end, history.spans[-1].partition) for history in route.histories])


def target(route: Route) -> Numbers:
    """For each LP, the index of the partition that should accept it."""
    return spread(route.target)


def spans(route: Route, lp: int) -> tuple[Span, ...]:
    """The spans of one LP, oldest first."""
    for history in route.histories:
        if history.first <= lp < history.end:
            return history.spans
    raise IndexError(f"LP {lp} does not exist; use 0 to {LOGICAL_PARTITIONS - 1}")


def openings(route: Route) -> list[list[Run]]:
    """For each partition, the LPs that its broker opens when it gets this version.

    LPs that have to be sealed are left out, because a late broker order to open them must not undo the seal.
    """
    here = current(route)
    found: list[list[Run]] = [[] for _ in route.partitions]
    for first, end, partition in runs_with(here, ~_moving(route, here)):
        found[partition].append((first, end))
    return found


class RouteMoves(NamedTuple):
    """LPs that have to be sealed in one partition, given by its index."""

    partition: int
    lps: list[Run]


def default_route(subject: str, places: Sequence[PartitionId], version: int = 1) -> Route:
    """The first route of a subject: equal shares, in order. ``version`` is above 1 when the subject existed before."""
    check_places(places)
    runs = [(first, end, index) for index, (first, end) in enumerate(shares(len(places)))]
    histories = tuple(SpanHistory(first, end, (Span(index, None, version),)) for first, end, index in runs)
    return Route(subject, version, tuple(places), histories, tuple(runs), (), (version,) * len(places))


def check_places(places: Sequence[PartitionId]) -> None:
    """Raise ``InvalidArgument`` unless a route can consist of these partitions."""
    if not 1 <= len(places) <= LOGICAL_PARTITIONS:
        raise InvalidArgument(f"{len(places)} partitions are not possible; a subject has 1 to {LOGICAL_PARTITIONS}")
    if len(set(places)) != len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise InvalidArgument(f"partition {twice} is named twice; name each partition once")


def retarget(route: Route, places: Sequence[PartitionId]) -> Route:
    """The next version, whose target is to give these partitions equal shares of the LPs.

    Returns the route unchanged if these partitions are its target already. As few LPs as possible move. A partition
    that is not in ``places`` gives all its LPs away, but stays in the route while it may have rows.
    """
    check_places(places)
    here, before = current(route), target(route)
    if {route.partitions[index] for index in set(before.tolist())} == set(places):
        return route
    listed = [*route.partitions, *(place for place in places if place not in route.partitions)]
    version = route.version + 1
    # Indexes in ``places`` → indexes in ``listed``, and back.
    named = np.array([listed.index(place) for place in places])
    among = np.full(len(listed), -1, dtype=np.int64)
    among[named] = np.arange(len(named))
    maybe_sealed = _moving(route, here)
    after = named[balance(among[here], len(named), loose=maybe_sealed, wished=among[before])]
    return _delisted(
        msgspec.structs.replace(
            route,
            version=version,
            partitions=tuple(listed),
            target=tuple(runs_with(after, after >= 0)),
            doubt=tuple(runs_of(maybe_sealed & (after == here))),
            gained=(*route.gained, *[version] * (len(listed) - len(route.partitions))),
        )
    )


def moves(route: Route, made: Collection[int] | None = None) -> list[RouteMoves]:
    """The LPs that have to be sealed, by partition, for the route to reach its target.

    ``made`` has the partitions that exist at their brokers (None: all exist). An LP does not move to a partition that
    does not exist yet.
    """
    here, there = current(route), target(route)
    moving = _moving(route, here)
    if made is not None:
        moving &= np.isin(there, list(made))
    return [RouteMoves(index, runs_of(moving & (here == index))) for index in np.unique(here[moving]).tolist()]


def sealed(route: Route, version: int, partition: int, fences: Sequence[NumberedRun]) -> Route:
    """The next version after LPs were sealed in a partition. ``fences`` has (first, end, fence) of each run of LPs.

    ``version`` is the version whose ``moves`` asked for the seal. Each sealed LP gets a new span in its target
    partition. An LP that got a new span after ``version`` is skipped, because the fence belongs to an older span. If
    every LP is skipped, the route is returned unchanged.
    """
    here, there = current(route), target(route)
    opened = spread([(history.first, history.end, history.spans[-1].opened) for history in route.histories])
    fence = np.where((here == partition) & (opened <= version), spread(fences), -1)
    if not (fence >= 0).any():
        return route
    after = route.version + 1
    gaining = set(there[fence >= 0].tolist())
    return msgspec.structs.replace(
        route,
        version=after,
        histories=_with_spans(route, fence, there, after),
        doubt=tuple(runs_of(lp_set(route.doubt) & (fence < 0))),
        gained=tuple(after if index in gaining else seen for index, seen in enumerate(route.gained)),
    )


def announced(route: Route) -> Route:
    """The next version, which has the same contents, but which every broker has to get."""
    version = route.version + 1
    return msgspec.structs.replace(route, version=version, gained=(version,) * len(route.gained))


def retire(route: Route, partition: int, below: int) -> Route:
    """The next version, without those oldest spans in the partition whose fence is at most ``below``.

    The caller guarantees that the rows of these spans are expired, or finished by every group. A partition that is in
    no span and no target is removed from the route.
    """

    def without_retired(history: SpanHistory) -> SpanHistory:
        first = 0
        for span in history.spans:
            if span.partition != partition or span.fence is None or span.fence > below:
                break
            first += 1
        return SpanHistory(history.first, history.end, history.spans[first:])

    histories = joined([without_retired(history) for history in route.histories])
    if histories == route.histories:
        return route
    return _delisted(msgspec.structs.replace(route, version=route.version + 1, histories=histories))


def give_up(route: Route, group: str, places: Sequence[PartitionId]) -> Route:
    """The next version, without the partitions of a lost broker group. ``places`` get all LPs, in equal shares.

    The spans in the lost partitions are removed, because their rows cannot be read, and because the fences of open
    spans are unknown.
    """
    check_places(places)
    listed = [*route.partitions, *(place for place in places if place not in route.partitions)]
    lost = np.array([place.group == group for place in listed])
    version = route.version + 1
    named = np.array([listed.index(place) for place in places])
    among = np.full(len(listed), -1, dtype=np.int64)
    among[named] = np.arange(len(named))
    here, before = current(route), target(route)
    after = named[balance(among[here], len(named), loose=lost[here], wished=among[before])]
    number = spread([(history.first, history.end, at) for at, history in enumerate(route.histories)])
    histories = []
    for first, end in pairwise(edges(number, here, after).tolist()):
        left = tuple(span for span in route.histories[number[first]].spans if not lost[span.partition])
        if lost[here[first]]:
            left = (*left, Span(int(after[first]), None, version))
        histories.append(SpanHistory(first, end, left))
    gaining = set(after[lost[here]].tolist())
    gained = [*route.gained, *[version] * (len(listed) - len(route.partitions))]
    return _delisted(
        msgspec.structs.replace(
            route,
            version=version,
            partitions=tuple(listed),
            histories=joined(histories),
            target=tuple(runs_with(after, after >= 0)),
            # An LP that had to move may be sealed already. If its new target is its present partition, it is in doubt.
            doubt=tuple(runs_of((_moving(route, here) & (after == here)) & ~lost[here])),
            gained=tuple(version if index in gaining else seen for index, seen in enumerate(gained)),
        )
    )


def _moving(route: Route, here: Numbers) -> LpSet:
    """The LPs that have to be sealed in their present partition, and so may be sealed already."""
    moving: LpSet = (here != target(route)) | lp_set(route.doubt)
    return moving


def _with_spans(route: Route, fence: Numbers, there: Numbers, version: int) -> tuple[SpanHistory, ...]:
    """Histories in which every LP with a fence has its last span closed and a new span in its target."""
    number = spread([(history.first, history.end, at) for at, history in enumerate(route.histories)])
    made = []
    for first, end in pairwise(edges(number, fence, np.where(fence >= 0, there, -1)).tolist()):
        before = route.histories[number[first]].spans
        if fence[first] >= 0:
            closed = Span(before[-1].partition, int(fence[first]))
            before = (*before[:-1], closed, Span(int(there[first]), None, version))
        made.append(SpanHistory(first, end, before))
    return joined(made)


def joined(histories: Sequence[SpanHistory]) -> tuple[SpanHistory, ...]:
    """Join neighbouring histories with equal spans."""
    joined: list[SpanHistory] = []
    for history in histories:
        if joined and joined[-1].spans == history.spans:
            history = SpanHistory(joined.pop().first, history.end, history.spans)
        joined.append(history)
    return tuple(joined)


def _delisted(route: Route) -> Route:
    """The route without partitions that are in no span and no target; the others get new indexes."""
    used: NDArray[np.bool_] = np.zeros(len(route.partitions), dtype=np.bool_)
    used[[span.partition for history in route.histories for span in history.spans]] = True
    used[[partition for _, _, partition in route.target]] = True
    if used.all():
        return route
    index = (np.cumsum(used) - 1).tolist()
    return msgspec.structs.replace(
        route,
        partitions=tuple(place for place, listed in zip(route.partitions, used, strict=True) if listed),
        histories=tuple(
            SpanHistory(
                each.first,
                each.end,
                tuple(msgspec.structs.replace(span, partition=index[span.partition]) for span in each.spans),
            )
            for each in route.histories
        ),
        target=tuple((first, end, index[partition]) for first, end, partition in route.target),
        gained=tuple(version for version, listed in zip(route.gained, used, strict=True) if listed),
    )
