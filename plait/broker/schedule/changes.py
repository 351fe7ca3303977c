"""Cancels and reschedules delayed messages that still wait."""

from __future__ import annotations

import numpy as np

from plait.broker.broker import Broker
from plait.broker.schedule.due_delivery import check_due
from plait.broker.schedule.due_rows import BucketedOffset, reading
from plait.broker.schedule.upcoming import Schedule
from plait.broker.turn import write_messages
from plait.errors import LimitExceeded
from plait.frame.builder import pack_stamp
from plait.frame.view import FrameView
from plait.storage.schedule.bucket import NEVER, keys_at


def cancel(broker: Broker, subject: str, number: int, due: int) -> bool:
    """Cancel a row; False when the row does not wait. Takes effect with the next commit."""
    with reading():
        found = _find(broker, subject, number, due)
    if found is None:
        return False
    schedule, place = found
    broker.turn.cancel(schedule.partition, number, due)
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
    partition.appended(base, offset, now, frame.size, 1, broker.turn.epoch)
    broker.turn.touch(partition)
    _settle(broker, schedule, number, due, place)
    broker.schedules.upcoming.append(schedule, FrameView(frame.tobytes()), offset, base)
    return base


def _find(broker: Broker, subject: str, number: int, due: int) -> tuple[Schedule, BucketedOffset | None] | None:
    """The schedule of the subject, if the row waits in it, and the location of a bucketed row."""
    broker.partition_of(subject, create=False)
    broker.turn.refuse_when_stalled()
    schedule = broker.schedules.by_subject.get(subject)
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
            f"limit of messages cancelled long before they are due reached ({limit}, limit `schedule_settled`); "
            "cancel more later or raise it",
            limit="schedule_settled",
            value=limit,
        )
