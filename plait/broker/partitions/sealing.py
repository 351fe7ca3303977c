"""Which logical partitions a partition takes rows of (R5): opened and sealed as the meta server says.

Both are rows of the catalog in the message log, in line with the rows that they let in or shut out: after a crash the
fence is where it was. A seal is answered when it is durable, as the next partition takes rows on the strength of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from plait.broker import subjects
from plait.broker.groups.ordered_group import OrderedGroup
from plait.broker.partitions.partition import Partition
from plait.errors import InvalidArgument, StaleRoute, SubjectNotFound
from plait.frame.header import SEQUENCE_MAX
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, lp_set, runs_alike, runs_of, runs_with
from plait.storage.catalog import Fence, Lps, PartitionRow, Reopened, SubjectSettings

if TYPE_CHECKING:
    from plait.broker.broker import Broker

#: An order is late by less than this: meta servers give up, and ask what is to be done now, long before. It comes over
#: a connection, so none outlives the broker's process.
LATE_SECONDS = 600.0
#: So many places at which logical partitions began anew are told apart.
REOPENED_MAX = 8


def open_lps(
    broker: Broker, subject: str, name: str, lps: Iterable[Lps], version: int, settings: SubjectSettings
) -> Partition:
    """The partition takes rows of these from now on; it is made where there is none. Twice is as once."""
    chosen = checked(lps)
    broker.numbers.check("route", version)
    subjects.check_settings(settings)
    partition = broker.subjects.get(name)
    if partition is None:
        broker.dropped.refuse_late(name, version, broker.clock.monotonic())
        broker.refuse_when_full()
        subjects.refuse_more(broker)
        row = PartitionRow(broker.next_partition, subject, name, broker.clock.now(), settings)
        return subjects.create_partition(broker, _with(row, chosen, [], version, 0))
    row = partition.row
    if row.subject != subject:
        raise InvalidArgument(f"partition {name!r} is one of {row.subject!r}, not of {subject!r}")
    if version < row.route:
        raise StaleRoute(f"partition {name!r} has heard of route {row.route}, this is of {version}")
    accepts = np.ones(LOGICAL_PARTITIONS, bool) if partition.accepts is None else partition.accepts
    opened = accepts | chosen
    fences = [] if partition.fences is None else runs_with(partition.fences, ~opened & (partition.fences > 0))
    new, place = chosen & ~accepts, partition.next
    row = msgspec.structs.replace(row, reopened=_reopened(partition, new, version))
    _change(broker, partition, _with(row, opened, fences, version, place), settings)
    for group in partition.groups.values():
        if isinstance(group, OrderedGroup) and new.any():
            group.reopened(new, place)
    return partition


def seal(broker: Broker, name: str, lps: Iterable[Lps], version: int, reply: Callable[[list[Fence]], None]) -> None:
    """The partition takes rows of these no more; ``reply`` gets the fences, once that is durable.

    ``FlowControl``: stages have begun to be published to it, and more remains of them than is done at once; ask again.
    """
    chosen = checked(lps)
    broker.numbers.check("route", version)
    partition = broker.subjects.get(name)
    if partition is None:
        raise SubjectNotFound(f"there is no partition {name!r} here", subject=name)
    if version < partition.row.route:
        raise StaleRoute(f"partition {name!r} has heard of route {partition.row.route}, this is of {version}")
    # What this turn brought was taken before, and so was a stage that has begun to be published.
    broker.stages.finish(partition)
    accepts = np.ones(LOGICAL_PARTITIONS, bool) if partition.accepts is None else partition.accepts
    fences = np.zeros(LOGICAL_PARTITIONS, np.int64) if partition.fences is None else partition.fences.copy()
    closing = accepts & chosen
    fences[closing] = partition.next
    left = accepts & ~chosen
    row = _with(partition.row, left, runs_with(fences, ~left & (fences > 0)), version, partition.next)
    _change(broker, partition, row, partition.row.settings)
    answer = runs_with(fences, chosen)
    broker.answer_when_durable(lambda: reply(answer))


def drop(broker: Broker, subject: str, name: str, version: int) -> None:
    """The partition goes with all that is in it, unless it is another subject's; twice is as once."""
    broker.numbers.check("route", version)
    partition = broker.subjects.get(name)
    if partition is None or partition.row.subject != subject:
        return
    if version < partition.row.route:
        # It was dropped by then, and made anew.
        raise StaleRoute(f"partition {name!r} has heard of route {partition.row.route}, this is of {version}")
    broker.delete_subject(name)
    broker.dropped.note(name, version, broker.clock.monotonic())


class Dropped:
    """Partitions that were dropped lately, and the versions of the routes that said so."""

    def __init__(self) -> None:
        #: Version, and until when it is of use; the oldest first.
        self._of: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def note(self, name: str, version: int, now: float) -> None:
        """A partition was dropped."""
        self._of.pop(name, None)
        self._of[name] = (version, now + LATE_SECONDS)
        while (oldest := next(iter(self._of))) and self._of[oldest][1] <= now:
            del self._of[oldest]

    def refuse_late(self, name: str, version: int, now: float) -> None:
        """An order that is older than the drop would make a partition to which nothing leads."""
        dropped, until = self._of.get(name, (-1, 0.0))
        if version <= dropped and now < until:
            raise StaleRoute(f"partition {name!r} was dropped by route {dropped}, this is of {version}")


def checked(lps: Iterable[Lps]) -> LpSet:
    """The logical partitions of runs that somebody sent."""
    runs = list(lps)
    for first, end in runs:
        if not 0 <= first < end <= LOGICAL_PARTITIONS:
            raise InvalidArgument(f"[{first}, {end}) is not a run of logical partitions")
    return lp_set(runs)


def _with(row: PartitionRow, accepts: LpSet, fences: list[Fence], version: int, at: int) -> PartitionRow:
    everything = [(0, LOGICAL_PARTITIONS)]
    lps = runs_of(accepts)
    taken = row.taken or ([(0, everything)] if at else [])
    if lps and (not taken or taken[-1][1] != lps):
        # Where it takes nothing at all, nothing is stored either.
        taken = [*(entry for entry in taken if entry[0] < at), (at, lps)]
    if all(each == everything for _, each in taken):
        taken = []
    # One that takes all needs no check of what it takes; what it took before still says whose rows without keys are.
    return msgspec.structs.replace(
        row,
        lps=None if lps == everything and not fences else lps,
        fences=fences,
        route=version,
        since=row.since or (version if lps else 0),
        taken=taken,
    )


def _reopened(partition: Partition, lps: LpSet, version: int) -> list[Reopened]:
    """What begins here anew, with what did before. The oldest places become one: an old route gets no more by that."""
    entries = [*partition.row.reopened, *((first, end, partition.next, version) for first, end in runs_of(lps))]
    places = sorted({sequence for _, _, sequence, _ in entries})
    lowest = max(places[:-REOPENED_MAX], default=0)
    groups: dict[int, list[Reopened]] = {}
    for entry in entries:
        groups.setdefault(max(entry[2], lowest), []).append(entry)
    found: list[Reopened] = []
    for group in groups.values():
        begins = np.full(LOGICAL_PARTITIONS, SEQUENCE_MAX, np.int64)
        versions = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, sequence, by in group:
            begins[first:end] = np.minimum(begins[first:end], sequence)
            versions[first:end] = np.maximum(versions[first:end], by)
        runs = runs_alike(begins < SEQUENCE_MAX, begins, versions)
        found += [(first, end, int(begins[first]), int(versions[first])) for first, end in runs]
    return found


def _change(broker: Broker, partition: Partition, row: PartitionRow, settings: SubjectSettings) -> None:
    row = msgspec.structs.replace(row, settings=settings)
    if row.settings != partition.row.settings:
        broker.retention_wanted = True
    if row != partition.row:
        broker.heads.define([row])
        partition.row = row
        broker.touch(partition)
