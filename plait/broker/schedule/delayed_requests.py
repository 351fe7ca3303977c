"""Requests about delayed messages that still wait: cancel, reschedule, list and count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.broker.broker import Broker
from plait.broker.schedule.due_delivery import check_due
from plait.broker.schedule.due_rows import BucketedOffset, reading
from plait.broker.schedule.upcoming import IN_LOG, SOON, Schedule, SoonRows, soon_rows
from plait.broker.turn import write_messages
from plait.errors import LimitExceeded
from plait.frame.builder import pack_stamp
from plait.frame.places import Int64s
from plait.frame.run_tables import UInt64s
from plait.frame.view import FrameView
from plait.storage.logs.action_events import Cancelled
from plait.storage.logs.frame_traits import traits_of
from plait.storage.schedule.bucket import GRID, NEVER, Bucket, keys_at
from plait.wire.admin.delayed import DelayedCount, DelayedPage, DelayedRow


def cancel(broker: Broker, subject: str, number: int, due: int) -> bool:
    """Cancel a row; False when the row does not wait. Takes effect with the next commit."""
    with reading():
        found = _find(broker, subject, number, due)
    if found is None:
        return False
    schedule, place = found
    broker.turn.record(Cancelled(schedule.partition.id, number, number + 1, due))
    _settle(broker, schedule, number, due, place)
    return True


def reschedule(broker: Broker, subject: str, number: int, due: int, to: int) -> int | None:
    """Change the due time of a row. Returns its new number; None when the row does not wait."""
    check_due(to, broker.clock.now())
    with reading():
        found = _find(broker, subject, number, due)
    if found is None:
        return None
    schedule, place = found
    broker.turn.refuse_when_full()
    write_messages(broker.turn)
    with reading():
        frame = broker.due_rows.copy(schedule, number, due, to, place)
    if frame is None:
        return None
    partition = schedule.partition
    base, now = partition.next, broker.clock.now()
    frame.stamp_with(pack_stamp(partition.id, base, now, broker.message_log.durable, broker.turn.epoch))
    offset = broker.turn.append_own(frame)
    view = FrameView(frame.tobytes())
    partition.appended(base, offset, now, frame.size, 1, broker.turn.epoch, traits_of(view))
    broker.turn.touch(partition)
    _settle(broker, schedule, number, due, place)
    broker.schedules.upcoming.append(schedule, view, offset, base)
    return base


def _find(broker: Broker, subject: str, number: int, due: int) -> tuple[Schedule, BucketedOffset | None] | None:
    """The schedule of the subject, if the row waits in it, and the location of a bucketed row."""
    broker.partition_of(subject, create=False)
    broker.turn.refuse_when_stalled()
    schedule = broker.schedules.by_name.get(subject)
    if schedule is None or not 0 <= due < NEVER:
        return None
    if number >= schedule.unbucketed.base:
        return (schedule, None) if schedule.unbucketed.due_of(number) == due else None
    place = _find_bucketed(broker, schedule, number, due)
    if place is None:
        return None
    _refuse_more(broker)
    return schedule, place


def _find_bucketed(broker: Broker, schedule: Schedule, number: int, due: int) -> BucketedOffset | None:
    """The location of a waiting row in a bucket."""
    for key in keys_at(due):
        bucket = broker.schedules.buckets.get(key)
        if bucket is None:
            continue
        runs = bucket.runs
        maybe = bucket.of(schedule.partition.id) & (runs["due_first"] <= due) & (runs["due_last"] >= due)
        maybe &= (runs["low"] <= number) & (runs["high"] >= number)
        for run in np.flatnonzero(maybe).tolist():
            columns = bucket.glance(run)
            if columns is None:
                continue
            times, numbers = columns
            low = max(int(np.searchsorted(times, due, "left")), int(bucket.cursors[run]))
            high = int(np.searchsorted(times, due, "right"))
            found = np.flatnonzero(numbers[low:high] == number)
            if len(found) and not bucket.is_settled(run, low + int(found[0])) and bucket.open_run(run):
                return BucketedOffset(bucket, run, low + int(found[0]))
    return None


def _settle(broker: Broker, schedule: Schedule, number: int, due: int, place: BucketedOffset | None) -> None:
    """Settle a waiting row before it is due."""
    broker.turn.touch(schedule.partition)
    broker.schedules.window.remove(due, number, schedule.partition.id)
    if place is None:
        schedule.unbucketed.settle(np.array([number]))
    else:
        place.bucket.settle(place.run, np.array([place.row]))
        broker.schedules.drop_finished()


def _refuse_more(broker: Broker) -> None:
    """Raise when too many rows were settled before they were due: each takes memory until its run ends."""
    limit = broker.limits.schedule_settled
    if sum(bucket.settled_count for bucket in broker.schedules.buckets.values()) >= limit:
        raise LimitExceeded(
            f"{limit} delayed messages were cancelled or rescheduled long before they were due (limit "
            "`schedule_settled`); try again later, or raise the limit",
            limit="schedule_settled",
            value=limit,
        )


def list_scheduled(
    broker: Broker, subject: str, start: int, end: int, after: tuple[int, int] | None, limit: int
) -> DelayedPage:
    """The first rows that are due in [start, end), by due time; if given, only rows after the (time, number) ``after``.

    At most ``limit`` rows are read. Damaged rows are left out of the page, and the next page starts after them.
    """
    broker.partition_of(subject, create=False)
    schedule = broker.schedules.by_name.get(subject)
    if schedule is None:
        return DelayedPage([], None)
    after = max(after or (0, -1), (start, -1))
    with reading():
        return _list(broker, schedule, after, end, limit)


def _list(broker: Broker, schedule: Schedule, after: tuple[int, int], end: int, limit: int) -> DelayedPage:
    found = _first_rows(broker, schedule, after, end, limit)
    while not _all_open(broker, found):
        found = _first_rows(broker, schedule, after, end, limit)
    following = (int(found["due"][-1]), int(found["number"][-1])) if len(found) == limit else None
    mine, _ = broker.due_rows.readable(schedule, found, np.arange(len(found)))
    rows = found[mine]
    if not len(rows):
        return DelayedPage([], following)
    facts = broker.due_rows.describe(schedule, rows)
    places = zip(rows["number"].tolist(), rows["due"].tolist(), strict=True)
    views = [
        DelayedRow(schedule.partition.row.subject, number, due, producer, sequence, key.decode() if key else None, size)
        for (number, due), (producer, sequence, key, size) in zip(places, facts, strict=True)
    ]
    return DelayedPage(views, following)


def _first_rows(broker: Broker, schedule: Schedule, after: tuple[int, int], end: int, limit: int) -> SoonRows:
    """The first rows by their due time and number columns; their runs are not verified yet."""
    found = _unbucketed(schedule, after, end, limit)
    for bucket, run in _runs_in_order(broker, schedule, after[0], end):
        if len(found) >= limit:
            end = min(end, int(found["due"][-1]) + 1)
            if bucket.runs["due_first"][run] >= end:
                break
        columns = bucket.glance(run)
        more = _rows_of_run(bucket, run, *columns, after, end, limit) if columns is not None else found[:0]
        if len(more):
            found = np.concatenate([found, more])
            found = found[np.lexsort((found["number"], found["due"]))][:limit]
    return found


def _all_open(broker: Broker, rows: SoonRows) -> bool:
    """Whether all runs of the rows are readable; an unreadable run is dropped."""
    runs = np.unique(rows[rows["bucket"] != IN_LOG][["bucket", "run"]])
    return all(broker.schedules.buckets[key].open_run(run) for key, run in runs.tolist())


def _unbucketed(schedule: Schedule, after: tuple[int, int], end: int, limit: int) -> SoonRows:
    due, base = schedule.unbucketed.due.values, schedule.unbucketed.base
    index = np.flatnonzero((due >= after[0]) & (due < end))
    index = index[(due[index] > after[0]) | (base + index > after[1])]
    if len(index) > limit:
        # There may be millions: sort only the candidates for the first ``limit`` rows.
        index = index[due[index] <= np.partition(due[index], limit - 1)[limit - 1]]
    index = index[np.argsort(due[index], kind="stable")][:limit]
    return soon_rows(due[index], base + index, schedule.partition.id)


def _runs_in_order(broker: Broker, schedule: Schedule, start: int, end: int) -> Iterator[tuple[Bucket, int]]:
    """Runs that may have rows due in [start, end), ordered by their first due time."""
    found: list[tuple[int, int, int]] = []
    for key, bucket in broker.schedules.buckets.items():
        runs = bucket.runs
        mine = bucket.of(schedule.partition.id) & (runs["due_last"] >= start) & (runs["due_first"] < end)
        found += [(int(runs["due_first"][run]), key, run) for run in np.flatnonzero(mine).tolist()]
    for _, key, run in sorted(found):
        yield broker.schedules.buckets[key], run


def _rows_of_run(
    bucket: Bucket, run: int, due: Int64s, numbers: UInt64s, after: tuple[int, int], end: int, limit: int
) -> SoonRows:
    low, same = np.searchsorted(due, after[0], "left"), np.searchsorted(due, after[0], "right")
    # Rows with the same due time are ordered by number.
    low += np.searchsorted(numbers[low:same].astype(np.int64), after[1], "right")
    rows = _waiting(bucket, run, int(low), int(np.searchsorted(due, end, "left")))[:limit]
    if not len(rows):
        return np.empty(0, SOON)
    return soon_rows(due[rows], numbers[rows], int(bucket.runs["partition"][run]), bucket.key, run, rows)


def _waiting(bucket: Bucket, run: int, low: int, high: int) -> Int64s:
    low = max(low, int(bucket.cursors[run]))
    if high <= low:
        return np.empty(0, np.int64)
    return np.delete(np.arange(low, high), bucket.settled_rows(run, low, high) - low)


def count_scheduled(broker: Broker, subject: str | None, start: int, end: int, by: str) -> list[DelayedCount]:
    """Count the rows that are due in [start, end), by subject or by ten minutes.

    A run whose rows all fall into one count is not read. Of every other run the due times are read: 0.05 ms for a run
    of one mebibyte, so one or two seconds for 30 GB that are due in more than two hours.
    """
    if subject is not None:
        broker.partition_of(subject, create=False)
    every = broker.schedules.by_name
    schedules = [every[name] for name in ([subject] if subject is not None else sorted(every)) if name in every]
    if by == "time":
        with reading():
            times = _count_by_time(broker, schedules, start, end)
        return [DelayedCount(subject, bucket, times[bucket]) for bucket in sorted(times) if times[bucket]]
    with reading():
        counts = _count_by_partition(broker, schedules, start, end)
    return [
        DelayedCount(each.partition.row.subject, None, counts[each.partition.id])
        for each in schedules
        if counts[each.partition.id]
    ]


def _count_by_partition(broker: Broker, schedules: Sequence[Schedule], start: int, end: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for schedule in schedules:
        due = schedule.unbucketed.due.values
        counts[schedule.partition.id] += int(((due >= start) & (due < end) & (due != NEVER)).sum())
    for bucket, some in _runs_within(broker, schedules, start, end):
        runs = bucket.runs
        whole = some & (runs["due_first"] >= start) & (runs["due_last"] < end)
        _add(counts, runs["partition"][whole], bucket.waiting_by_run()[whole])
        for run in np.flatnonzero(some & ~whole).tolist():
            columns = bucket.glance(run)
            if columns is not None:
                low, high = np.searchsorted(columns[0], (start, end), "left")
                counts[int(runs["partition"][run])] += len(_waiting(bucket, run, int(low), int(high)))
    return counts


def _count_by_time(broker: Broker, schedules: Sequence[Schedule], start: int, end: int) -> Counter[int]:
    """Count rows by ten minutes. A run that is due within the same ten minutes is not read."""
    counts: Counter[int] = Counter()
    for schedule in schedules:
        due = schedule.unbucketed.due.values
        due = due[(due >= start) & (due < end) & (due != NEVER)]
        _add(counts, due // GRID * GRID)
    for bucket, some in _runs_within(broker, schedules, start, end):
        first, last = bucket.runs["due_first"], bucket.runs["due_last"]
        whole = some & (first >= start) & (last < end) & (first // GRID == last // GRID)
        _add(counts, first[whole] // GRID * GRID, bucket.waiting_by_run()[whole])
        base, stop = int(first[some].min()) // GRID, int(last[some].max()) // GRID + 1
        totals = np.zeros(stop - base, np.int64)
        for run in np.flatnonzero(some & ~whole).tolist():
            columns = bucket.glance(run)
            if columns is not None:
                low, high = np.searchsorted(columns[0], (start, end), "left")
                times = columns[0][_waiting(bucket, run, int(low), int(high))]
                # The times are not verified and can have any value.
                places = np.clip(times // GRID - base, 0, len(totals) - 1)
                totals += np.bincount(places, minlength=len(totals))
        _add(counts, np.arange(base, stop) * GRID, totals)
    return counts


def _runs_within(
    broker: Broker, schedules: Sequence[Schedule], start: int, end: int
) -> Iterator[tuple[Bucket, npt.NDArray[np.bool_]]]:
    """(bucket, mask of its runs) with waiting rows of which some may be due in [start, end)."""
    partitions = np.array([schedule.partition.id for schedule in schedules], np.uint32)
    for bucket in list(broker.schedules.buckets.values()):
        runs = bucket.runs
        some = (bucket.cursors < runs["count"]) & (runs["due_last"] >= start) & (runs["due_first"] < end)
        some &= np.isin(runs["partition"], partitions)
        if some.any():
            yield bucket, some


def _add(counts: Counter[int], keys: npt.NDArray[Any], numbers: Int64s | None = None) -> None:
    found, which = np.unique(keys, return_inverse=True)
    totals = np.bincount(which, numbers, minlength=len(found)).astype(np.int64)
    counts.update(dict(zip(found.tolist(), totals.tolist(), strict=True)))
