"""A subject's route: which partition takes each logical partition (LP) now, and where its rows lay before.

For each LP the route has a list of *spans*, oldest first: a partition, and the fence, the sequence at which the LP was
sealed there. The last span is open (its fence is None) and takes what is sent. Nothing is ever changed in a span but
its fence, once; so whoever follows an LP along its spans sees its rows in the order they were sent, whatever became of
the partitions meanwhile.

Where a route's LPs are to be, its *target*, is set at once; where they are follows, partition by partition: the LPs are
sealed at the broker that has them (durably, which gives the fence), then a version is published in which they have a
new span. Between the two a crash, a lost answer or another target may come; whatever LP *may* be sealed where it is
stays in the list of moves, so that it always gets a new span, if need be in the very same partition.
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
from plait.meta.members.balance import balance, shares
from plait.model.lp_runs import NumberedRun, Numbers, Run, cut, mark, runs_of, runs_where, spread


class PartitionId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What identifies a partition: its name, and the broker group that has it."""

    name: str
    group: str

    def __str__(self) -> str:
        return f"{self.name}@{self.group}"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Rows of an LP in one partition: all below the fence; None: it is open."""

    #: Index in the route's partitions.
    partition: int
    fence: int | None = None
    #: The version that opened it; 0 once it is closed.
    opened: int = 0


class SpanHistory(msgspec.Struct, frozen=True, array_like=True):
    """LPs [first, end), which all have these spans."""

    first: int
    end: int
    spans: tuple[Span, ...]


class Route(msgspec.Struct, frozen=True, array_like=True):
    """One version of a subject's route. An index of a partition means nothing beside another version."""

    subject: str
    #: Counts up by one with each change. A subject that is created again begins above its former routes, not at 1.
    version: int
    partitions: tuple[PartitionId, ...]
    #: In the order of the LPs, without gap or overlap.
    histories: tuple[SpanHistory, ...]
    #: (first, end, partition): where the LPs are to be. The same as where they are once nothing is left to move.
    target: tuple[NumberedRun, ...]
    #: LPs that are to stay where they are and may be sealed there: another target was set before.
    doubt: tuple[Run, ...] = ()
    #: For each partition: the version in which it was listed or last got an LP, so its broker has to know this one.
    gained: tuple[int, ...] = ()
    #: Groups that partitions knew which have left the route → the version that each began with (``remembered.py``).
    began: dict[str, int] = {}


def current(route: Route) -> Numbers:
    """For each LP the index of the partition that takes it."""
    return spread([(history.first, history.end, history.spans[-1].partition) for history in route.histories])


def target(route: Route) -> Numbers:
    """For each LP the index of the partition that is to take it."""
    return spread(route.target)


def spans(route: Route, lp: int) -> tuple[Span, ...]:
    """The spans of one LP, oldest first."""
    for history in route.histories:
        if history.first <= lp < history.end:
            return history.spans
    raise IndexError(f"LP {lp}: there are {LOGICAL_PARTITIONS}")


def openings(route: Route) -> list[list[Run]]:
    """The LPs that each partition's broker is to take, once it hears of this version.

    Those that are to be sealed are not among them: an order to open them that comes late must not undo the seal.
    """
    here = current(route)
    found: list[list[Run]] = [[] for _ in route.partitions]
    for first, end, partition in runs_of(np.where(_moving(route, here), -1, here)):
        found[partition].append((first, end))
    return found


class RouteMoves(NamedTuple):
    """LPs that have to be sealed in one partition (an index of the route's)."""

    partition: int
    lps: list[Run]


def default_route(subject: str, places: Sequence[PartitionId], version: int = 1) -> Route:
    """The first version: equal shares, in order. A subject that is made anew goes on with another version."""
    check_places(places)
    runs = [(first, end, index) for index, (first, end) in enumerate(shares(len(places)))]
    histories = tuple(SpanHistory(first, end, (Span(index, None, version),)) for first, end, index in runs)
    return Route(subject, version, tuple(places), histories, tuple(runs), (), (version,) * len(places))


def check_places(places: Sequence[PartitionId]) -> None:
    """Refuse what a route cannot be made of."""
    if not 1 <= len(places) <= LOGICAL_PARTITIONS:
        raise InvalidArgument(f"{len(places)} partitions: a subject has 1 to {LOGICAL_PARTITIONS}")
    if len(set(places)) != len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise InvalidArgument(f"partition {twice} is named twice")


def retarget(route: Route, places: Sequence[PartitionId]) -> Route:
    """The next version, with these partitions to take all LPs, equal shares; the same route if that is its target.

    As many LPs as can be stay where they are. Partitions that are not named any more give all their LPs away, and stay
    listed while rows may be left in them.
    """
    check_places(places)
    here, before = current(route), target(route)
    if {route.partitions[index] for index in set(before.tolist())} == set(places):
        return route
    listed = [*route.partitions, *(place for place in places if place not in route.partitions)]
    version = route.version + 1
    # Indexes among the named ones and back.
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
            target=tuple(runs_of(after)),
            doubt=tuple(runs_where(maybe_sealed & (after == here))),
            gained=(*route.gained, *[version] * (len(listed) - len(route.partitions))),
        )
    )


def moves(route: Route, made: Collection[int] | None = None) -> list[RouteMoves]:
    """What has to be sealed, and where, so that the route reaches its target.

    ``made`` are the partitions that their brokers have; LPs do not move to others yet (None: all are made).
    """
    here, there = current(route), target(route)
    moving = _moving(route, here)
    if made is not None:
        moving &= np.isin(there, list(made))
    return [RouteMoves(index, runs_where(moving & (here == index))) for index in np.unique(here[moving]).tolist()]


def sealed(route: Route, version: int, partition: int, fences: Sequence[NumberedRun]) -> Route:
    """The next version, after LPs were sealed in a partition: (first, end, fence) of each run of them.

    ``version`` is that of the route whose ``moves`` asked for it. What is sealed gets a new span where it is to be. LPs
    that have got one since are passed over, as the fence is not that of their newest; with nothing else the route
    stays as it is.
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
        doubt=tuple(runs_where(mark(route.doubt) & (fence < 0))),
        gained=tuple(after if index in gaining else seen for index, seen in enumerate(route.gained)),
    )


def announced(route: Route) -> Route:
    """The next version, which differs in nothing but that every broker has to hear of it."""
    version = route.version + 1
    return msgspec.structs.replace(route, version=version, gained=(version,) * len(route.gained))


def retire(route: Route, partition: int, below: int) -> Route:
    """The next version, without the oldest spans that end at ``below`` or before in the partition.

    The caller knows that nobody needs those rows any more: they are expired, or done by every group. A partition
    that no span and no target names is listed no more.
    """

    def kept(history: SpanHistory) -> SpanHistory:
        first = 0
        for span in history.spans:
            if span.partition != partition or span.fence is None or span.fence > below:
                break
            first += 1
        return SpanHistory(history.first, history.end, history.spans[first:])

    histories = joined([kept(history) for history in route.histories])
    if histories == route.histories:
        return route
    return _delisted(msgspec.structs.replace(route, version=route.version + 1, histories=histories))


def give_up(route: Route, group: str, places: Sequence[PartitionId]) -> Route:
    """The next version, without the partitions of a broker group; what they took goes to ``places``, in equal shares.

    The spans there are left out: no fence is known of the last ones, and nothing can be read there any more.
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
    for first, end in pairwise(cut(number, here, after)):
        kept = tuple(span for span in route.histories[number[first]].spans if not lost[span.partition])
        if lost[here[first]]:
            kept = (*kept, Span(int(after[first]), None, version))
        histories.append(SpanHistory(first, end, kept))
    gaining = set(after[lost[here]].tolist())
    gained = [*route.gained, *[version] * (len(listed) - len(route.partitions))]
    return _delisted(
        msgspec.structs.replace(
            route,
            version=version,
            partitions=tuple(listed),
            histories=joined(histories),
            target=tuple(runs_of(after)),
            # What was to move and may be sealed where it is stays in doubt, wherever it is to be by now.
            doubt=tuple(runs_where((_moving(route, here) & (after == here)) & ~lost[here])),
            gained=tuple(version if index in gaining else seen for index, seen in enumerate(gained)),
        )
    )


def _moving(route: Route, here: Numbers) -> NDArray[np.bool_]:
    """The LPs that have to be sealed where they are, and so may be already."""
    moving: NDArray[np.bool_] = (here != target(route)) | mark(route.doubt)
    return moving


def _with_spans(route: Route, fence: Numbers, there: Numbers, version: int) -> tuple[SpanHistory, ...]:
    """Histories in which every LP that has a fence goes on in its target."""
    number = spread([(history.first, history.end, at) for at, history in enumerate(route.histories)])
    edges = cut(number, fence, np.where(fence >= 0, there, -1))
    made = []
    for first, end in pairwise(edges):
        before = route.histories[number[first]].spans
        if fence[first] >= 0:
            closed = Span(before[-1].partition, int(fence[first]))
            before = (*before[:-1], closed, Span(int(there[first]), None, version))
        made.append(SpanHistory(first, end, before))
    return joined(made)


def joined(histories: Sequence[SpanHistory]) -> tuple[SpanHistory, ...]:
    """Neighbours with the same spans as one."""
    joined: list[SpanHistory] = []
    for history in histories:
        if joined and joined[-1].spans == history.spans:
            history = SpanHistory(joined.pop().first, history.end, history.spans)
        joined.append(history)
    return tuple(joined)


def _delisted(route: Route) -> Route:
    """The route without partitions that nothing of it names; the others get new indexes."""
    used: NDArray[np.bool_] = np.zeros(len(route.partitions), dtype=np.bool_)
    used[[span.partition for history in route.histories for span in history.spans]] = True
    used[[partition for _, _, partition in route.target]] = True
    if used.all():
        return route
    index = (np.cumsum(used) - 1).tolist()
    return msgspec.structs.replace(
        route,
        partitions=tuple(place for place, kept in zip(route.partitions, used, strict=True) if kept),
        histories=tuple(
            SpanHistory(
                each.first,
                each.end,
                tuple(msgspec.structs.replace(span, partition=index[span.partition]) for span in each.spans),
            )
            for each in route.histories
        ),
        target=tuple((first, end, index[partition]) for first, end, partition in route.target),
        gained=tuple(version for version, kept in zip(route.gained, used, strict=True) if kept),
    )
