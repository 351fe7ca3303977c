"""A subject's route: which partition takes each logical partition (LP) now, and where its rows lay before.

For each LP the route has a list of *spans*, oldest first: a partition, and the fence, the sequence at which the LP was
sealed there. The last span is open (its fence is None) and takes what is sent. Nothing is ever changed in a span but
its fence, once; so whoever follows an LP along its spans sees its rows in the order they were sent, whatever became of
the partitions meanwhile. How a route changes is decided in ``plait/meta/routes.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from plait.limits import LOGICAL_PARTITIONS

#: LPs [first, end).
Run = tuple[int, int]
#: LPs [first, end) and a number that all of them have: a partition's index, a fence, an epoch.
NumberedRun = tuple[int, int, int]
#: A number for each LP.
Numbers = NDArray[np.int64]


class Place(msgspec.Struct, frozen=True, array_like=True, order=True):
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


class History(msgspec.Struct, frozen=True, array_like=True):
    """LPs [first, end), which all have these spans."""

    first: int
    end: int
    spans: tuple[Span, ...]


class Route(msgspec.Struct, frozen=True, array_like=True):
    """One version of a subject's route. An index of a partition means nothing beside another version."""

    subject: str
    #: 1, 2, 3... without gaps.
    version: int
    partitions: tuple[Place, ...]
    #: In the order of the LPs, without gap or overlap.
    histories: tuple[History, ...]
    #: (first, end, partition): where the LPs are to be. The same as where they are once nothing is left to move.
    target: tuple[NumberedRun, ...]
    #: LPs that are to stay where they are and may be sealed there: another target was set before.
    doubt: tuple[Run, ...] = ()
    #: For each partition: the version in which it was listed or last got an LP, so its broker has to know this one.
    gained: tuple[int, ...] = ()


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


def served(route: Route, partition: int) -> list[Run]:
    """The LPs that the partition takes in this version."""
    return runs_where(current(route) == partition)


# --- LPs and runs of them -----------------------------------------------------------------------


def spread(runs: Sequence[NumberedRun], missing: int = -1) -> Numbers:
    """The number of each LP; ``missing`` for those in no run."""
    numbers = np.full(LOGICAL_PARTITIONS, missing, dtype=np.int64)
    for first, end, number in runs:
        numbers[first:end] = number
    return numbers


def mark(runs: Sequence[Run]) -> NDArray[np.bool_]:
    """For each LP whether it is in one of the runs."""
    marked = np.zeros(LOGICAL_PARTITIONS, dtype=np.bool_)
    for first, end in runs:
        marked[first:end] = True
    return marked


def cut(*columns: NDArray[np.generic]) -> list[int]:
    """Where runs begin in which every column stays the same, and the end of the last one."""
    changes = np.zeros(LOGICAL_PARTITIONS - 1, dtype=np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return [0, *(np.flatnonzero(changes) + 1).tolist(), LOGICAL_PARTITIONS]


def runs_where(marked: NDArray[np.bool_]) -> list[Run]:
    """The runs of LPs that are marked."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_of(numbers: Numbers) -> list[NumberedRun]:
    """The runs of LPs with the same number; those with a negative one are left out."""
    edges = cut(numbers)
    values = numbers[edges[:-1]].tolist()
    return [run for run in zip(edges, edges[1:], values, strict=False) if run[2] >= 0]
