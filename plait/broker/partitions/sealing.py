"""Opens and seals logical partitions of a partition, as the meta server orders (R5).

Openings and seals are catalog rows in the message log, in order with the rows that the partition accepts. So a crash
does not move a fence. The broker replies to a seal when it is durable, because the next partition then starts to accept
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.partitions.partition import Partition
from plait.errors import InvalidArgument, StaleRoute, SubjectNotFound
from plait.frame.header import SEQUENCE_MAX
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, lp_set, runs_alike, runs_of, runs_with
from plait.model.settings import SubjectSettings
from plait.storage.catalog import Fence, Lps, PartitionRow, Reopened

#: Sequences at which logical partitions were reopened that are stored separately.
REOPENED_MAX = 8


def open_lps(
    broker: Broker, subject: str, name: str, lps: Iterable[Lps], version: int, settings: SubjectSettings
) -> Partition:
    """Open logical partitions, and create the partition if it does not exist. Idempotent."""
    chosen = checked(lps)
    broker.numbers.check("route", version)
    partition = broker.subjects.get(name)
    if partition is None:
        broker.dropped.refuse_late(name, version, broker.clock.monotonic())
        broker.turn.refuse_when_full()
        broker.catalog.refuse_more()
        row = PartitionRow(broker.catalog.next_partition, subject, name, broker.clock.now(), settings)
        return broker.catalog.create(_with(row, chosen, [], version, 0))
    row = partition.row
    if row.subject != subject:
        raise InvalidArgument(f"partition {name!r} belongs to subject {row.subject!r}, not to {subject!r}")
    if version < row.route:
        raise StaleRoute(_stale(partition, version))
    accepts = np.ones(LOGICAL_PARTITIONS, bool) if partition.accepts is None else partition.accepts
    opened = accepts | chosen
    fences = [] if partition.fences is None else runs_with(partition.fences, ~opened & (partition.fences > 0))
    new, place = chosen & ~accepts, partition.next
    row = msgspec.structs.replace(row, reopened=_reopened(partition, new, version))
    _change(broker, partition, _with(row, opened, fences, version, place), settings)
    for group in partition.groups.values():
        if isinstance(group, OrderedGroup) and new.any():
            group.handover.reopened(new, place)
    return partition


def seal(broker: Broker, name: str, lps: Iterable[Lps], version: int, reply: Callable[[list[Fence]], None]) -> None:
    """Seal logical partitions; ``reply`` gets the fences once the seal is durable.

    ``FlowControl``: the publishing of stages to the partition has begun and takes more than one turn; ask again.
    """
    chosen = checked(lps)
    broker.numbers.check("route", version)
    partition = broker.subjects.get(name)
    if partition is None:
        raise SubjectNotFound(f"this broker has no partition {name!r}", subject=name)
    if version < partition.row.route:
        raise StaleRoute(_stale(partition, version))
    # Rows of this turn are below the fence, and so are all rows of a stage whose publishing has begun.
    broker.publisher.finish(partition)
    accepts = np.ones(LOGICAL_PARTITIONS, bool) if partition.accepts is None else partition.accepts
    fences = np.zeros(LOGICAL_PARTITIONS, np.int64) if partition.fences is None else partition.fences.copy()
    closing = accepts & chosen
    fences[closing] = partition.next
    left = accepts & ~chosen
    row = _with(partition.row, left, runs_with(fences, ~left & (fences > 0)), version, partition.next)
    _change(broker, partition, row, partition.row.settings)
    answer = runs_with(fences, chosen)
    broker.turn.answer_when_durable(lambda: reply(answer))


def drop(broker: Broker, subject: str, name: str, version: int) -> None:
    """Delete the partition with all its data, unless it belongs to another subject. Idempotent."""
    broker.numbers.check("route", version)
    partition = broker.subjects.get(name)
    if partition is None or partition.row.subject != subject:
        return
    if version < partition.row.route:
        # The partition was created again after the drop that this order repeats.
        raise StaleRoute(_stale(partition, version))
    broker.delete_subject(name)
    broker.dropped.note(name, version, broker.clock.monotonic())


def _stale(partition: Partition, version: int) -> str:
    row = partition.row
    return f"partition {row.name!r} has route version {row.route}, the order has the older version {version}"


def checked(lps: Iterable[Lps]) -> LpSet:
    """The logical partitions of runs in a request; ``InvalidArgument`` if a run is not valid."""
    runs = list(lps)
    for first, end in runs:
        if not 0 <= first < end <= LOGICAL_PARTITIONS:
            raise InvalidArgument(
                f"[{first}, {end}) is not a run of logical partitions; use 0 <= first < end <= {LOGICAL_PARTITIONS}"
            )
    return lp_set(runs)


def _with(row: PartitionRow, accepts: LpSet, fences: list[Fence], version: int, at: int) -> PartitionRow:
    everything = [(0, LOGICAL_PARTITIONS)]
    lps = runs_of(accepts)
    taken = row.taken or ([(0, everything)] if at else [])
    if lps and (not taken or taken[-1][1] != lps):
        # A partition that accepts nothing stores nothing, so it needs no entry.
        taken = [*(entry for entry in taken if entry[0] < at), (at, lps)]
    if all(each == everything for _, each in taken):
        taken = []
    # A partition that accepts all LPs needs no check (``lps`` is None). ``taken`` still maps its rows without keys to
    # LPs.
    return msgspec.structs.replace(
        row,
        lps=None if lps == everything and not fences else lps,
        fences=fences,
        route=version,
        since=row.since or (version if lps else 0),
        taken=taken,
    )


def _reopened(partition: Partition, lps: LpSet, version: int) -> list[Reopened]:
    """Where LPs were reopened, with those that open now.

    The oldest positions are merged into the lowest of them, so an old route never covers more rows than before.
    """
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
        broker.catalog.retention_wanted = True
    if row != partition.row:
        broker.catalog.change([row])
