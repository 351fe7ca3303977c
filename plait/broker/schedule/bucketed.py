"""The schedule's way into a checkpoint and back: what the buckets hold, and what the logs say since.

A checkpoint files what waits, unless that is too much at a time; of what it leaves in the log it says which rows wait.
Recovery begins with both; rows that come in the log after the checkpoint are not filed, and frames and events after it
say which rows have left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from plait.broker.partitions.partition import Partition
from plait.errors import DamageError, FrameError
from plait.frame.columns import Column
from plait.frame.gather import UInt64s
from plait.frame.header import FLAG_FORWARDED
from plait.frame.view import FrameView
from plait.model.names import counted
from plait.storage.catalog import FORWARD, SCHEDULE
from plait.storage.logs.recovery import QUARANTINE, move_aside
from plait.storage.schedule.bucket import DIRECTORY, NEVER, Bucket
from plait.storage.schedule.bucket_writer import BucketCopy, BucketWriter, UnbucketedCopy, segment_places
from plait.storage.schedule.unbucketed import UnbucketedFrame, UnbucketedRows, decode_unfiled

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.schedule.schedules import Schedule, Schedules

#: Rows that one checkpoint files: a few seconds of work, and a bound on the memory it takes.
FILE_MAX: Final = 2_000_000
#: Rows that are filed by a start or a stop, which somebody waits for.
FILE_NOW_MAX: Final = 200_000

#: Numbers of rows that left, and perhaps when they were due.
_Settled = tuple[npt.NDArray[Any], npt.NDArray[Any] | None]


class BucketedRows:
    """What of a broker's schedule is in files."""

    def __init__(self, broker: Broker, schedules: Schedules) -> None:
        self._broker = broker
        self._schedules = schedules
        #: Partition → numbers, and perhaps when they were due, that the logs settle after the checkpoint.
        self._replayed: dict[int, list[_Settled]] = {}
        self._filing: BucketWriter | None = None

    # --- recovery -------------------------------------------------------------------------------

    def load(self, data: bytes) -> None:
        """A bucket of a checkpoint."""
        bucket = Bucket.load(self._broker.disk, self._schedules.report, data)
        self._schedules.buckets[bucket.key] = bucket

    def begin_at(self, offset: int) -> None:
        """The checkpoint has of the schedule what came before ``offset`` of the message log.

        Its schedule partitions were copied later, and may have rows from behind that.
        """
        for schedule in self._schedules.all():
            partition = schedule.partition
            if partition.position.message > offset:
                records = partition.consume_log
                index = records.find_offset(offset)
                schedule.fresh = UnbucketedRows(records.record(index).base if index < len(records) else partition.next)

    def load_unfiled(self, data: bytes, end: int) -> None:
        """Rows before ``end`` that a checkpoint left in the message log: their frames are looked up there again."""
        log = self._broker.message_log
        for unfiled in decode_unfiled(data):
            schedule = self._schedules.get(unfiled.partition)
            if schedule is None:
                continue
            fresh = schedule.fresh = UnbucketedRows(unfiled.base)
            records = schedule.partition.consume_log
            for index in range(records.find(unfiled.base), records.find_offset(end)):
                record = records.record(index)
                try:
                    frame = FrameView(log.view(record.offset, record.size))
                    if (frame.partition, frame.base, frame.count) != (unfiled.partition, record.base, record.count):
                        raise FrameError("another frame stands there")
                    fresh.append(frame, record.offset, record.base)
                except (FrameError, DamageError) as error:
                    self._schedules.report("message", f"{error} (at {record.offset})", record.count)
            fresh.keep_only(unfiled)

    def replay(self, partition: Partition, offset: int, frame: FrameView) -> None:
        """A frame of the message log that holds rows that wait, or says that some do no longer."""
        delayed = partition.row.kind == SCHEDULE
        schedules = self._schedules
        # A subject that was deleted and made again has two schedules for a while.
        schedule = schedules.get(partition.id) if delayed else schedules.by_subject.get(partition.row.name)
        if schedule is None:
            return
        if frame.flags & FLAG_FORWARDED and partition.row.kind != FORWARD:
            # Another partition's rows, or rows that were taken back: their numbers are settled where they were.
            if not delayed:
                return
        elif frame.has(Column.SCHEDULE):
            timed = not delayed and frame.has(Column.DELIVER_AT)
            due = frame.fixed(Column.DELIVER_AT) if timed else None
            self._settle(schedule, frame.fixed(Column.SCHEDULE), due)
        if delayed:
            self._schedules.upcoming.append(schedule, frame, offset, frame.base)

    def replay_cancel(self, partition: int, start: int, end: int, due: int, epoch: int) -> None:
        """An event of the action log."""
        schedule = self._schedules.get(partition)
        if schedule is not None:
            # Numbers may have been lost to damage and given to others since: the event is not about those.
            numbers = np.arange(start, min(end, schedule.partition.stored_until(epoch)))
            self._settle(schedule, numbers, np.full(len(numbers), due))

    def _settle(self, schedule: Schedule, numbers: npt.NDArray[Any], due: npt.NDArray[Any] | None) -> None:
        schedule.fresh.settle(numbers)
        filed = numbers < schedule.fresh.base
        if filed.any():
            entry = (numbers[filed].astype(np.uint64), None if due is None else due[filed])
            self._replayed.setdefault(schedule.partition.id, []).append(entry)

    def recovered(self) -> None:
        """Both logs were replayed: find the filed rows that they settle, and files that nobody needs."""
        replayed, self._replayed = self._replayed, {}
        self._drop_unknown_runs()
        for partition, entries in replayed.items():
            if self._schedules.get(partition) is None:
                continue
            for timed in (True, False):
                numbers = [each for each, due in entries if (due is not None) is timed]
                times = [due for _, due in entries if due is not None] if timed else []
                if numbers:
                    self._resolve(partition, np.concatenate(numbers), np.concatenate(times) if times else None)
        for schedule in self._schedules.by_subject.values():
            self._start_at_unfiled(schedule)
        self._sort_out_files()
        self.drop_finished()
        self._schedules.upcoming.begin_again(self._schedules.by_subject.values())

    def _drop_unknown_runs(self) -> None:
        """Rows of subjects that were deleted after the checkpoint began and before their shards were copied."""
        for bucket in self._schedules.buckets.values():
            for run, partition in enumerate(bucket.runs["partition"].tolist()):
                if self._schedules.get(partition) is None:
                    bucket.drop_run(run)

    def _sort_out_files(self) -> None:
        """Files that no checkpoint names were left by a crash, and go; unless checkpoints were lost."""
        broker = self._broker
        known = {bucket.path for bucket in self._schedules.buckets.values()}
        unknown = [name for name in broker.disk.list(DIRECTORY) if f"{DIRECTORY}/{name}" not in known]
        # Without a checkpoint and with the whole log, every row is there: the first checkpoint was not finished.
        lost = broker.checkpoints.last is None and (broker.checkpoints.rejected or broker.message_log.start > 0)
        if not lost:
            for name in unknown:
                broker.snapshots.replaced(f"{DIRECTORY}/{name}")
        elif unknown:
            # Which of their rows wait, nobody can tell any more.
            move_aside(broker.disk, DIRECTORY, unknown)
            self._schedules.tell(
                f"no checkpoint reads back: {counted(len(unknown), 'file')} of delayed messages "
                f"moved to {QUARANTINE}/; what waited there is not delivered"
            )

    def _resolve(self, partition: int, numbers: npt.NDArray[Any], due: npt.NDArray[Any] | None) -> None:
        """Settle filed rows that are known by their numbers, and perhaps by when they were due."""
        settled = _by_time(numbers, due)
        for bucket in self._schedules.buckets.values():
            for run in np.flatnonzero(bucket.of(partition)).tolist():
                some = _of_run(bucket.runs[run], settled)
                if len(some) and bucket.open_run(run):
                    _settle_run(bucket, run, bucket.numbers_of(run), some)

    # --- checkpoint -----------------------------------------------------------------------------

    def begin(self, checkpoint: int, rows: int = FILE_MAX) -> BucketWriter:
        """Copy what a checkpoint has to know. It files at most so many rows, the oldest of each subject first."""
        broker = self._broker
        copies: dict[int, BucketCopy] = {}
        for key, bucket in self._schedules.buckets.items():
            bucket.forget_passed()
            cursors = bucket.cursors.copy()
            copies[key] = BucketCopy(key, bucket.path, bucket.runs, cursors, bucket.settled, bucket.dirty)
            bucket.dirty = False
        copies_of_rows: list[UnbucketedCopy] = []
        unfiled: list[UnbucketedFrame] = []
        offsets: list[int] = []
        for schedule in self._schedules.by_subject.values():
            fresh = schedule.fresh
            if not len(fresh.due):
                continue
            end = fresh.frame_end(rows)
            copy = UnbucketedCopy(schedule.partition.id, fresh.base, *fresh.first(end))
            rows -= len(copy.due)
            if len(copy.due):
                copies_of_rows.append(copy)
            if end < fresh.end:
                unfiled.append(fresh.unfiled(schedule.partition.id, end))
                offsets += fresh.offsets_from(end)[:1].tolist()
        segments = segment_places(broker.message_log.directory, [each.base for each in broker.message_log.segments])
        self._filing = BucketWriter(
            broker.disk,
            copies_of_rows,
            copies,
            segments,
            unfiled,
            unfiled_offset=min(offsets, default=None),
            now=broker.clock.now(),
            epoch=broker.epoch,
            checkpoint=checkpoint,
        )
        return self._filing

    def end(self, filing: BucketWriter, *, written: bool) -> None:
        """The checkpoint was written, or not: then everything is as it was."""
        self._filing = None
        if written:
            for file, reason, rows in filing.lost:
                self._schedules.report(file, reason, rows)
            self._take_over(filing)
        else:
            for key in filing.dirty:
                if key in self._schedules.buckets:
                    self._schedules.buckets[key].dirty = True
        self.drop_finished()

    def _take_over(self, filing: BucketWriter) -> None:
        """Filed rows leave the log for their buckets."""
        schedules = self._schedules
        left = self._left_meanwhile(filing)
        for key, (path, runs) in filing.added.items():
            bucket = schedules.buckets.get(key)
            if bucket is None:
                bucket = schedules.buckets[key] = Bucket(self._broker.disk, schedules.report, key, path)
            before = len(bucket.runs)
            bucket.add(runs)
            for run, numbers in enumerate(filing.numbers[key], before):
                partition = int(bucket.runs["partition"][run])
                if schedules.get(partition) is None:
                    bucket.drop_run(run)
                elif partition in left:
                    _settle_run(bucket, run, numbers, _of_run(bucket.runs[run], left[partition]))
        for copy in filing.fresh:
            schedule = schedules.get(copy.partition)
            if schedule is None:
                continue
            schedule.fresh.filed(copy.end)
            self._start_at_unfiled(schedule)
            if len(schedule.fresh.due):
                # There is more to file.
                self._broker.touch(schedule.partition)
            schedules.window.remove_partition(copy.partition, before=copy.end)
            schedules.upcoming.expect_from(schedule, schedules.window.end)
        schedules.upcoming.runs_added()

    def _start_at_unfiled(self, schedule: Schedule) -> None:
        """Buckets hold all rows before the first unfiled one: retention may delete those from the message log.

        A checkpoint that files rows has the partition's start from before it did, so the start is not read from there.
        """
        schedule.partition.start = schedule.fresh.base

    def _left_meanwhile(self, filing: BucketWriter) -> dict[int, _Settled]:
        """Partition → rows that left while they were filed."""
        left: dict[int, _Settled] = {}
        for copy in filing.fresh:
            schedule = self._schedules.get(copy.partition)
            if schedule is not None:
                gone = np.flatnonzero((copy.due != NEVER) & (schedule.fresh.due.values[: len(copy.due)] == NEVER))
                if len(gone):
                    left[copy.partition] = _by_time((copy.base + gone).astype(np.uint64), copy.due[gone])
        return left

    def drop_finished(self) -> None:
        """Buckets of which nothing is left go; not while a checkpoint may be adding to them."""
        if self._filing is None:
            buckets = self._schedules.buckets
            for key in [key for key, bucket in buckets.items() if bucket.waiting == 0]:
                self._broker.snapshots.replaced(buckets.pop(key).path)


def _by_time(numbers: npt.NDArray[Any], due: npt.NDArray[Any] | None) -> _Settled:
    """In the order they were due, if that is known."""
    if due is None:
        return numbers, None
    order = np.argsort(due)
    return numbers[order], due[order]


def _of_run(record: Any, settled: _Settled) -> npt.NDArray[Any]:
    """Those of the numbers that may be in a run."""
    numbers, due = settled
    if due is not None:
        low = np.searchsorted(due, record["due_first"], "left")
        numbers = numbers[low : np.searchsorted(due, record["due_last"], "right")]
    some: npt.NDArray[Any] = numbers[(numbers >= record["low"]) & (numbers <= record["high"])]
    return some


def _settle_run(bucket: Bucket, run: int, numbers: UInt64s, settled: npt.NDArray[Any]) -> None:
    """Rows of a run, which has these numbers, have left."""
    if len(settled):
        bucket.settle(run, np.flatnonzero(np.isin(numbers, settled)))
        bucket.advance(run)
