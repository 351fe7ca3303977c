"""Writes delayed rows to buckets at a checkpoint, and restores the schedule from buckets and logs at a start.

A checkpoint moves waiting rows from the message log to buckets, up to a limit. For the rows that it leaves in the log,
it stores which of them wait. Recovery loads both kinds of rows. Rows that follow in the log after the checkpoint are
unbucketed. The frames and events after the checkpoint settle the rows that have left.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from plait.broker.partitions.partition import Partition
from plait.broker.schedule.schedules import Schedules
from plait.broker.schedule.upcoming import Schedule
from plait.broker.turn import Turn
from plait.errors import DamageError, FrameError
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED
from plait.frame.run_tables import UInt64s
from plait.frame.view import FrameView
from plait.model.names import counted
from plait.storage.catalog import FORWARD, SCHEDULE
from plait.storage.checkpoint import Checkpoints
from plait.storage.logs.consume_log import stored_frame
from plait.storage.logs.recovery import QUARANTINE, move_aside
from plait.storage.schedule.bucket import DIRECTORY, NEVER, Bucket
from plait.storage.schedule.bucket_writer import BucketCopy, BucketWriter
from plait.storage.schedule.unbucketed import UnbucketedCopy, UnbucketedFrame, UnbucketedRows

#: Rows that one checkpoint writes to buckets: a few seconds of work, and a bound on its memory.
BUCKET_ROWS_MAX: Final = 2_000_000
#: The same limit for the checkpoint of a start or a stop, for which the operator waits.
BUCKET_ROWS_NOW_MAX: Final = 200_000

#: Numbers of settled rows, and their due times if they are known.
_Settled = tuple[npt.NDArray[Any], npt.NDArray[Any] | None]


class BucketedRows:
    """The part of a broker's schedule that is in buckets."""

    def __init__(self, turn: Turn, checkpoints: Checkpoints, schedules: Schedules) -> None:
        self._turn = turn
        self._checkpoints = checkpoints
        self._schedules = schedules
        #: Partition → bucketed rows that the logs settle after the checkpoint.
        self._replayed: dict[int, list[_Settled]] = {}

    def uses(self, path: str) -> bool:
        return any(bucket.path == path for bucket in self._schedules.buckets.values())

    # --- recovery -------------------------------------------------------------------------------

    def load(self, data: bytes) -> None:
        bucket = Bucket.load(self._turn.disk, self._schedules.report, data)
        self._schedules.buckets[bucket.key] = bucket

    def begin_at(self, offset: int) -> None:
        """Start from a checkpoint that includes the schedule up to ``offset`` of the message log.

        Its schedule partitions were copied later and may include later rows, which are unbucketed.
        """
        for schedule in self._schedules.by_partition.values():
            partition = schedule.partition
            if partition.position.message > offset:
                records = partition.consume_log
                index = records.find_offset(offset)
                schedule.unbucketed = UnbucketedRows(
                    records.record(index).base if index < len(records) else partition.next
                )

    def load_unbucketed(self, data: bytes, end: int) -> None:
        """Load the rows before ``end`` that a checkpoint left in the message log, from their frames there."""
        log = self._turn.message_log
        for saved in msgspec.msgpack.decode(data, type=list[UnbucketedFrame]):
            schedule = self._schedules.by_partition.get(saved.partition)
            if schedule is None:
                continue
            unbucketed = schedule.unbucketed = UnbucketedRows(saved.base)
            records = schedule.partition.consume_log
            for index in range(records.find(saved.base), records.find_offset(end)):
                record = records.record(index)
                try:
                    frame = stored_frame(log, saved.partition, record, verify=False)
                    unbucketed.append(frame, record.offset, record.base)
                except (FrameError, DamageError) as error:
                    self._schedules.report("message", f"{error} (at {record.offset})", record.count)
            unbucketed.keep_only(saved)

    def replay(self, partition: Partition, offset: int, frame: FrameView) -> None:
        """Replay a frame of the message log that has delayed rows or settles some."""
        delayed = partition.row.kind == SCHEDULE
        schedules = self._schedules
        # During replay, a subject that was deleted and created again can have two schedules.
        schedule = schedules.by_partition.get(partition.id) if delayed else schedules.by_name.get(partition.row.name)
        if schedule is None:
            return
        if frame.flags & FLAG_FORWARDED and partition.row.kind != FORWARD:
            # The schedule column has no meaning here: the rows came from another broker, or were taken back.
            if not delayed:
                return
        elif frame.has(Column.SCHEDULE):
            timed = not delayed and frame.has(Column.DELIVER_AT)
            due = frame.fixed(Column.DELIVER_AT) if timed else None
            self._settle(schedule, frame.fixed(Column.SCHEDULE), due)
        if delayed:
            self._schedules.upcoming.append(schedule, frame, offset, frame.base)

    def replay_cancel(self, partition: int, start: int, end: int, due: int, epoch: int) -> None:
        """Replay a cancel event of the action log."""
        schedule = self._schedules.by_partition.get(partition)
        if schedule is not None:
            # Rows may have been lost to damage, and later rows have their numbers: the event is not about the later
            # rows.
            numbers = np.arange(start, min(end, schedule.partition.stored_until(epoch)))
            self._settle(schedule, numbers, np.full(len(numbers), due))

    def _settle(self, schedule: Schedule, numbers: npt.NDArray[Any], due: npt.NDArray[Any] | None) -> None:
        schedule.unbucketed.settle(numbers)
        bucketed = numbers < schedule.unbucketed.base
        if bucketed.any():
            entry = (numbers[bucketed].astype(np.uint64), None if due is None else due[bucketed])
            self._replayed.setdefault(schedule.partition.id, []).append(entry)

    def recovered(self) -> None:
        """Finish recovery after both logs were replayed: settle bucketed rows, and remove unused files."""
        replayed, self._replayed = self._replayed, {}
        self._drop_unknown_runs()
        for partition, entries in replayed.items():
            if self._schedules.by_partition.get(partition) is None:
                continue
            for timed in (True, False):
                numbers = [each for each, due in entries if (due is not None) is timed]
                times = [due for _, due in entries if due is not None] if timed else []
                if numbers:
                    self._resolve(partition, np.concatenate(numbers), np.concatenate(times) if times else None)
        for schedule in self._schedules.by_name.values():
            self._start_at_unbucketed(schedule)
        self._sort_out_files()
        self._schedules.drop_finished()
        self._schedules.upcoming.begin_again(self._schedules.by_name.values())

    def _drop_unknown_runs(self) -> None:
        """Drop rows of subjects that were deleted after the checkpoint began and before their shards were copied."""
        for bucket in self._schedules.buckets.values():
            for run, partition in enumerate(bucket.runs["partition"].tolist()):
                if self._schedules.by_partition.get(partition) is None:
                    bucket.drop_run(run)

    def _sort_out_files(self) -> None:
        """Delete bucket files that a crash left and no checkpoint names; quarantine them if checkpoints were lost."""
        disk, checkpoints = self._turn.disk, self._checkpoints
        unknown = [name for name in disk.list(DIRECTORY) if not self.uses(f"{DIRECTORY}/{name}")]
        # Without a checkpoint but with the whole log, the log has every row: the first checkpoint was not finished.
        lost = checkpoints.last is None and (checkpoints.rejected or self._turn.message_log.start > 0)
        if not lost:
            for name in unknown:
                checkpoints.replaced(f"{DIRECTORY}/{name}")
        elif unknown:
            # No remaining state shows which rows of these files still wait.
            move_aside(disk, DIRECTORY, unknown)
            self._schedules.notice(
                f"no checkpoint is readable: moved {counted(len(unknown), 'file')} of delayed messages "
                f"to {QUARANTINE}/; the messages in them are not delivered"
            )

    def _resolve(self, partition: int, numbers: npt.NDArray[Any], due: npt.NDArray[Any] | None) -> None:
        """Settle bucketed rows by their numbers, and by their due times if these are known."""
        settled = _by_time(numbers, due)
        for bucket in self._schedules.buckets.values():
            for run in np.flatnonzero(bucket.of(partition)).tolist():
                some = _of_run(bucket.runs[run], settled)
                if len(some) and bucket.open_run(run):
                    _settle_run(bucket, run, bucket.numbers_of(run), some)

    # --- checkpoint -----------------------------------------------------------------------------

    def begin(self, checkpoint: int, rows: int = BUCKET_ROWS_MAX) -> BucketWriter:
        """Copy the schedule for a checkpoint. It moves at most ``rows`` rows to buckets, oldest first per subject."""
        turn = self._turn
        copies: dict[int, BucketCopy] = {}
        for key, bucket in self._schedules.buckets.items():
            bucket.forget_passed()
            cursors = bucket.cursors.copy()
            copies[key] = BucketCopy(key, bucket.path, bucket.runs, cursors, bucket.settled, bucket.dirty, bucket.end)
            bucket.dirty = False
        copies_of_rows: list[UnbucketedCopy] = []
        unbucketed_left: list[UnbucketedFrame] = []
        offsets: list[int] = []
        for schedule in self._schedules.by_name.values():
            copy, left, offset = schedule.unbucketed.split(schedule.partition.id, rows)
            rows -= len(copy.due)
            if len(copy.due):
                copies_of_rows.append(copy)
            if left is not None:
                unbucketed_left.append(left)
                offsets.append(offset)
        self._schedules.writer = BucketWriter(
            turn.disk,
            copies_of_rows,
            copies,
            [(each.base, turn.message_log.files.path(each.base)) for each in turn.message_log.segments],
            unbucketed_left,
            unbucketed_offset=min(offsets, default=None),
            now=turn.clock.now(),
            epoch=turn.epoch,
            checkpoint=checkpoint,
        )
        return self._schedules.writer

    def end(self, writer: BucketWriter, *, written: bool) -> None:
        """Use the buckets of a checkpoint that was written. After a failed checkpoint, change nothing."""
        self._schedules.writer = None
        if written:
            for file, reason, rows in writer.lost:
                self._schedules.report(file, reason, rows)
            self._take_over(writer)
        else:
            for key in writer.dirty:
                if key in self._schedules.buckets:
                    self._schedules.buckets[key].dirty = True
        self._schedules.drop_finished()

    def _take_over(self, writer: BucketWriter) -> None:
        """Replace unbucketed rows with the bucketed copies that the checkpoint wrote."""
        schedules = self._schedules
        left = self._left_meanwhile(writer)
        for key, (path, runs) in writer.added.items():
            bucket = schedules.buckets.get(key)
            if bucket is None:
                bucket = schedules.buckets[key] = Bucket(self._turn.disk, schedules.report, key, path)
            before = len(bucket.runs)
            bucket.add(runs)
            for run, numbers in enumerate(writer.numbers[key], before):
                partition = int(bucket.runs["partition"][run])
                if schedules.by_partition.get(partition) is None:
                    bucket.drop_run(run)
                elif partition in left:
                    _settle_run(bucket, run, numbers, _of_run(bucket.runs[run], left[partition]))
        for copy in writer.row_copies:
            schedule = schedules.by_partition.get(copy.partition)
            if schedule is None:
                continue
            schedule.unbucketed.bucketed(copy.end)
            self._start_at_unbucketed(schedule)
            if len(schedule.unbucketed.due):
                # More rows wait to be bucketed.
                self._turn.touch(schedule.partition)
            schedules.window.remove_partition(copy.partition, before=copy.end)
            schedules.upcoming.expect_from(schedule, schedules.window.end)
        schedules.upcoming.runs_added()

    def _start_at_unbucketed(self, schedule: Schedule) -> None:
        """Let retention delete the rows before the first unbucketed row from the message log: buckets have them all.

        The start is computed here, because a checkpoint stores the start from before it moved rows to buckets.
        """
        schedule.partition.start = schedule.unbucketed.base

    def _left_meanwhile(self, writer: BucketWriter) -> dict[int, _Settled]:
        """Partition → rows that left while the checkpoint wrote them to buckets."""
        left: dict[int, _Settled] = {}
        for copy in writer.row_copies:
            schedule = self._schedules.by_partition.get(copy.partition)
            if schedule is not None:
                gone = np.flatnonzero((copy.due != NEVER) & (schedule.unbucketed.due.values[: len(copy.due)] == NEVER))
                if len(gone):
                    left[copy.partition] = _by_time((copy.base + gone).astype(np.uint64), copy.due[gone])
        return left


def _by_time(numbers: npt.NDArray[Any], due: npt.NDArray[Any] | None) -> _Settled:
    """Sort the rows by due time, if it is known."""
    if due is None:
        return numbers, None
    order = np.argsort(due)
    return numbers[order], due[order]


def _of_run(record: Any, settled: _Settled) -> npt.NDArray[Any]:
    numbers, due = settled
    if due is not None:
        low = np.searchsorted(due, record["due_first"], "left")
        numbers = numbers[low : np.searchsorted(due, record["due_last"], "right")]
    some: npt.NDArray[Any] = numbers[(numbers >= record["low"]) & (numbers <= record["high"])]
    return some


def _settle_run(bucket: Bucket, run: int, numbers: UInt64s, settled: npt.NDArray[Any]) -> None:
    if len(settled):
        bucket.settle(run, np.flatnonzero(np.isin(numbers, settled)))
        bucket.advance(run)
