"""Opens and seals logical partitions and drops partitions, as the meta server orders (R5).

Openings and seals are catalog rows in the message log, in order with the rows that the partition accepts. So a crash
does not move a fence. The broker replies when the seal is durable: after the reply, another partition accepts rows of
these logical partitions.

The broker also reports to the meta servers which sealed logical partitions each group has finished (R26), and they
store it. A consumer then need not ask a broker that has no rows for its group, and a partition without rows leaves the
route. The meta servers also remember which groups the partition had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.partitions.partition import Partition
from plait.errors import InvalidArgument, StaleRoute, SubjectNotFound
from plait.frame.header import SEQUENCE_MAX
from plait.limits import LOGICAL_PARTITIONS, REMEMBERED_GROUPS_MAX
from plait.model.logical_partitions import LpSet, lp_set, runs_alike, runs_of, runs_with
from plait.model.settings import SubjectSettings
from plait.storage.catalog import Fence, Lps, PartitionRow, Reopened

#: A partition row has at most this many sequences at which logical partitions were reopened; older ones are merged.
REOPENED_MAX = 8
#: A broker knows a dropped partition for this long, to refuse an older order that arrives late. Meta servers give up on
#: an order, and compute it again, long before that. An order arrives over a connection, so it does not outlive the
#: broker's process.
LATE_SECONDS = 600.0


def open_lps(
    broker: Broker, subject: str, name: str, lps: Iterable[Lps], version: int, settings: SubjectSettings
) -> Partition:
    """Open logical partitions, and create the partition if it does not exist. Idempotent."""
    chosen = checked(lps)
    broker.numbers.check("route", version)
    partition = broker.subjects.get(name)
    if partition is None:
        _refuse_late(broker, name, version)
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
    now = broker.clock.monotonic()
    remembered = {other: entry for other, entry in broker.dropped.items() if entry[1] > now}
    broker.dropped = remembered | {name: (version, now + LATE_SECONDS)}


def _refuse_late(broker: Broker, name: str, version: int) -> None:
    """``StaleRoute`` if the order is older than the drop: it would create a partition that no route has."""
    dropped, until = broker.dropped.get(name, (-1, 0.0))
    if version <= dropped and broker.clock.monotonic() < until:
        raise StaleRoute(f"partition {name!r} was dropped by route version {dropped}, the order has version {version}")


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
    """The sequences at which LPs were reopened, including ``lps``, which open now.

    If there are more than ``REOPENED_MAX`` positions, the oldest are merged: each LP keeps the lowest of its merged
    positions. An older route covers only rows below that position: a merge never makes it cover more.
    """
    entries = [*partition.row.reopened, *((first, end, partition.next, version) for first, end in runs_of(lps))]
    places = sorted({sequence for _, _, sequence, _ in entries})
    merged_until = max(places[:-REOPENED_MAX], default=0)
    groups: dict[int, list[Reopened]] = {}
    for entry in entries:
        groups.setdefault(max(entry[2], merged_until), []).append(entry)
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


def passed(partition: Partition) -> dict[str, list[Fence]]:
    """Group → (first, end, fence) of the sealed logical partitions that it has finished.

    Groups that have finished none are included. Broadcasts are not: no later consumer asks for their progress.
    """
    if partition.fences is None:
        return {}
    groups = [group for group in partition.groups.values() if not group.definition.broadcast]
    return {group.name: _passed(group, partition.fences) for group in groups}


def began(partition: Partition) -> dict[str, int]:
    """Group → the version of the route at which it began, including broadcasts.

    If there are too many groups, only the newest are included, and broadcasts only if there is room left.
    """
    groups = sorted(
        (each.definition for each in partition.groups.values()), key=lambda each: (each.broadcast, -each.id)
    )
    return {each.name: each.began for each in groups[:REMEMBERED_GROUPS_MAX]}


def _passed(group: Group, fences: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Fence]:
    done = fences > 0
    if isinstance(group, OrderedGroup):
        for cursor in group.cursors:
            # A parked key waits here for an operator, and its rows in later partitions wait for it.
            done &= ~cursor.lps | ((fences <= cursor.floor) & (not cursor.parked))
    else:
        done &= fences <= group.floor
    return runs_with(fences, done)


def gone_below(broker: Broker, partition: Partition) -> int:
    """The sequence below which the partition has no rows and nothing that belongs to them.

    The meta server removes the spans below it from the route, and drops a partition that has no span left.

    -1: remove no span. This is also the result while a partition that accepts no rows holds anything (``_holds``).
    0: the partition accepts no rows and never had one.
    """
    fences, accepts = partition.fences, partition.accepts
    if fences is None or accepts is None or (not accepts.any() and _holds(broker, partition)):
        return -1
    below = int(fences[fences <= min(partition.start, _retained_from(partition))].max(initial=0))
    return -1 if not below and accepts.any() else below


def _retained_from(partition: Partition) -> int:
    """The first row that an ordered group has not finished, even if retention removed it; else the next row.

    A failed message is retained, and rows of its key in other partitions wait for it. If the span of this partition
    left the route, those rows would not wait, and no consumer would pull a dead letter that is resent.
    """
    first = partition.next
    for group in partition.groups.values():
        if isinstance(group, OrderedGroup):
            if group.failures.dead:
                first = min(first, group.failures.dead.first)
            for cursor in group.cursors:
                if cursor.parked and cursor.letter >= 0:
                    first = min(first, cursor.letter)
                elif cursor.parked or cursor.returned or cursor.waiting or cursor.held:
                    first = min(first, cursor.floor)
    return first


def _holds(broker: Broker, partition: Partition) -> bool:
    """Whether it has rows, delayed messages, forwards, retained rows, dead letters, stages or half messages."""
    name = partition.row.name
    schedule = broker.schedules.by_name.get(name)
    return (
        partition.start < partition.next
        or (schedule is not None and broker.schedules.waits(schedule))
        or any(each.start < each.next for each in broker.forwards.of(name))
        or any(group.retained or group.failures.dead for group in partition.groups.values())
        or broker.stages.any_for(name)
        or broker.transactions.any_for(name)
    )
