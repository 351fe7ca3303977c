"""What a broker tells about the messages that wait for their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from plait.broker.broker import Broker
from plait.broker.due_rows import reading
from plait.broker.schedule import Schedule
from plait.broker.window import SOON, SoonRows, soon_rows
from plait.frame.gather import Int64s
from plait.storage.buckets import GRID, NEVER, Bucket


class ScheduledView(msgspec.Struct, frozen=True):
    """A message that waits."""

    subject: str
    number: int
    deliver_at: int
    producer: int
    sequence: int
    key: str | None
    size: int


class CountView(msgspec.Struct, frozen=True):
    """How many messages of a subject wait, or are due within ten minutes from ``bucket`` on (microseconds)."""

    subject: str | None
    bucket: int | None
    count: int


def list_scheduled(
    broker: Broker, subject: str, start: int, end: int, after: tuple[int, int] | None, limit: int
) -> list[ScheduledView]:
    """The first rows that are due in [start, end), in the order they are; ``after`` a time and number, if given."""
    broker.partition_of(subject, create=False)
    schedule = broker.schedules.by_subject.get(subject)
    if schedule is None:
        return []
    after = max(after or (0, -1), (start, -1))
    with reading():
        return _list(broker, schedule, after, end, limit)


def _list(broker: Broker, schedule: Schedule, after: tuple[int, int], end: int, limit: int) -> list[ScheduledView]:
    found = _unfiled(schedule, after, end)[:limit]
    for bucket, run in _runs_in_order(broker, schedule, after[0], end):
        if len(found) >= limit and bucket.runs["due_first"][run] > found["due"][-1]:
            break
        if bucket.open_run(run):
            more = np.concatenate([found, _rows_of_run(bucket, run, after, end)[:limit]])
            found = more[np.lexsort((more["number"], more["due"]))][:limit]
    mine, _ = broker.schedules.rows.readable(schedule, found, np.arange(len(found)))
    rows = found[mine]
    if not len(rows):
        return []
    facts = broker.schedules.rows.describe(schedule, rows)
    places = zip(rows["number"].tolist(), rows["due"].tolist(), strict=True)
    return [
        ScheduledView(
            schedule.partition.row.subject, number, due, producer, sequence, key.decode() if key else None, size
        )
        for (number, due), (producer, sequence, key, size) in zip(places, facts, strict=True)
    ]


def _unfiled(schedule: Schedule, after: tuple[int, int], end: int) -> SoonRows:
    due = schedule.fresh.due.values
    index = np.flatnonzero((due >= after[0]) & (due < end))
    rows = soon_rows(due[index], schedule.fresh.base + index, schedule.partition.id)
    rows = rows[(rows["due"] > after[0]) | (rows["number"] > after[1])]
    return rows[np.lexsort((rows["number"], rows["due"]))]


def _runs_in_order(broker: Broker, schedule: Schedule, start: int, end: int) -> Iterator[tuple[Bucket, int]]:
    """Runs that may have rows due in [start, end), by when their first row is."""
    found: list[tuple[int, int, int]] = []
    for key, bucket in broker.schedules.buckets.items():
        runs = bucket.runs
        mine = bucket.of(schedule.partition.id) & (runs["due_last"] >= start) & (runs["due_first"] < end)
        found += [(int(runs["due_first"][run]), key, run) for run in np.flatnonzero(mine).tolist()]
    for _, key, run in sorted(found):
        yield broker.schedules.buckets[key], run


def _rows_of_run(bucket: Bucket, run: int, after: tuple[int, int], end: int) -> SoonRows:
    due, numbers = bucket.due_of(run), bucket.numbers_of(run)
    low, same = np.searchsorted(due, after[0], "left"), np.searchsorted(due, after[0], "right")
    # Rows that are due together stand by their numbers.
    low += np.searchsorted(numbers[low:same].astype(np.int64), after[1], "right")
    rows = _waiting(bucket, run, int(low), int(np.searchsorted(due, end, "left")))
    if not len(rows):
        return np.empty(0, SOON)
    return soon_rows(due[rows], numbers[rows], int(bucket.runs["partition"][run]), bucket.key, run, rows)


def _waiting(bucket: Bucket, run: int, low: int, high: int) -> Int64s:
    """Rows in [low, high) of a run that have not left."""
    low = max(low, int(bucket.cursors[run]))
    if high <= low:
        return np.empty(0, np.int64)
    return np.delete(np.arange(low, high), bucket.settled_rows(run, low, high) - low)


def count_scheduled(broker: Broker, subject: str | None, start: int, end: int, by: str) -> list[CountView]:
    """How many rows are due in [start, end): of each subject, or in each ten minutes."""
    if subject is not None:
        broker.partition_of(subject, create=False)
    every = broker.schedules.by_subject
    schedules = [every[name] for name in ([subject] if subject is not None else sorted(every)) if name in every]
    if by == "time":
        with reading():
            times = _count_by_time(broker, schedules, start, end)
        return [CountView(subject, bucket, times[bucket]) for bucket in sorted(times) if times[bucket]]
    with reading():
        counts = _count_by_partition(broker, schedules, start, end)
    return [
        CountView(each.partition.row.subject, None, counts[each.partition.id])
        for each in schedules
        if counts[each.partition.id]
    ]


def _count_by_partition(broker: Broker, schedules: Iterable[Schedule], start: int, end: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for schedule in schedules:
        due = schedule.fresh.due.values
        counts[schedule.partition.id] += int(((due >= start) & (due < end) & (due != NEVER)).sum())
    for bucket in broker.schedules.buckets.values():
        runs = bucket.runs
        some = (bucket.cursors < runs["count"]) & (runs["due_last"] >= start) & (runs["due_first"] < end)
        whole = some & (runs["due_first"] >= start) & (runs["due_last"] < end)
        left = np.bincount(runs["partition"][whole], runs["count"][whole] - bucket.cursors[whole])
        bucket.forget_passed()
        settled = (bucket.settled >> np.uint64(32)).astype(np.int64)
        gone = np.bincount(runs["partition"][settled[whole[settled]]], minlength=len(left))
        for partition in np.flatnonzero(left).tolist():
            counts[partition] += int(left[partition]) - int(gone[partition])
        for run in np.flatnonzero(some & ~whole).tolist():
            if bucket.open_run(run):
                low, high = np.searchsorted(bucket.due_of(run), (start, end), "left")
                counts[int(runs["partition"][run])] += len(_waiting(bucket, run, int(low), int(high)))
    return counts


def _count_by_time(broker: Broker, schedules: Iterable[Schedule], start: int, end: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for schedule in schedules:
        due = schedule.fresh.due.values
        _add(counts, due[(due >= start) & (due < end) & (due != NEVER)])
        for bucket, run in _runs_in_order(broker, schedule, start, end):
            if bucket.open_run(run):
                times = bucket.due_of(run)
                low, high = np.searchsorted(times, (start, end), "left")
                _add(counts, times[_waiting(bucket, run, int(low), int(high))])
    return counts


def _add(counts: Counter[int], due: Int64s) -> None:
    starts, numbers = np.unique(due // GRID * GRID, return_counts=True)
    counts.update(dict(zip(starts.tolist(), numbers.tolist(), strict=True)))
