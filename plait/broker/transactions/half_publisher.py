"""Publishes the half messages of committed transactions, and keeps those of undecided ones in the message log.

Publishing copies the stored frames to the schedules of their partitions, a limited number of bytes in each turn. Half
messages that wait for an operator must not keep the whole message log after them: retention moves them to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from plait.broker.catalog import Catalog
from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.schedules import Schedules
from plait.broker.transactions.transaction_table import HalfFrame, StoredTransaction, TransactionTable
from plait.broker.turn import Turn, write_messages
from plait.errors import DamageError, DiskFull, FlowControl, FrameError, ReadOnly, StorageFailed
from plait.frame.builder import pack_stamp
from plait.frame.header import HEADER_SIZE, STAMP_OFFSET
from plait.frame.view import FrameView
from plait.limits import KIB, MIB
from plait.storage.logs.consume_log import stored_frame
from plait.storage.logs.frame_traits import traits_of

#: Bytes that one turn publishes or moves: the loop serves other requests too.
PUBLISH_SIZE_MAX: Final = 8 * MIB
#: A frame counts as this many bytes at least: the work for small frames grows with their number.
FRAME_COST: Final = 48 * KIB
#: Time before publishing is tried again after the disk was full.
RETRY_SECONDS: Final = 1.0


class HalfPublisher:
    """The half messages in the message log of a broker."""

    def __init__(self, turn: Turn, catalog: Catalog, schedules: Schedules) -> None:
        self._turn = turn
        self._catalog = catalog
        self._schedules = schedules
        self.table = TransactionTable(turn.limits.transactions_remembered)
        #: Partition name → its half partition.
        self.half_partitions: dict[str, Partition] = {}
        #: Committed transactions that are not published completely, the oldest decision first.
        self._queue: deque[StoredTransaction] = deque()
        #: True if the next commit continues publishing.
        self.ready = False
        #: Monotonic time until which publishing pauses after an error.
        self._held_until = 0.0
        #: The new starts of half partitions, which apply when the logs are durable up to the ends.
        self._starts: tuple[dict[Partition, int], list[int]] | None = None

    def add(self, transaction: StoredTransaction) -> None:
        """Publish a committed transaction."""
        self._queue.append(transaction)
        self.ready = True

    def append(self, transaction: StoredTransaction, partition: Partition, frame: FrameView) -> None:
        """Append a frame to a half partition; the log has room for it."""
        turn, log = self._turn, self._turn.message_log
        base, now, buffer = partition.next, turn.clock.now(), frame.buffer
        stamp = pack_stamp(partition.id, base, now, log.durable, turn.epoch)
        offset = log.append([buffer[:STAMP_OFFSET], stamp, buffer[HEADER_SIZE:]], frame.size)
        partition.appended(base, offset, now, frame.size, frame.count, turn.epoch, traits_of(frame))
        turn.touch(partition)
        turn.mark()
        self.table.stored(transaction, partition.id, HalfFrame(frame.first, base, frame.count, frame.size))

    def look(self) -> bool:
        """Set and return ``ready``: whether ``run`` has work to do."""
        self.ready = bool(self._queue) and self._turn.clock.monotonic() >= self._held_until
        return self.ready

    def run(self, now: int, commit: Commit) -> None:
        """Publish one turn's worth. Rows that find no space on the disk stay and are tried again."""
        self.ready = False
        try:
            self._turn.refuse_when_full()
            write_messages(self._turn)
            room = PUBLISH_SIZE_MAX
            while self._queue and room > 0:
                room -= self._publish(self._queue[0], now, commit, room)
        except OSError as error:
            self._hold()
            self._turn.disk_error(error)
        except (DiskFull, ReadOnly, FlowControl):
            self._hold()
        except StorageFailed:
            # ``turn.failed`` is set, and the server stops.
            pass
        else:
            self.ready = bool(self._queue)

    def _hold(self) -> None:
        self._held_until = self._turn.clock.monotonic() + RETRY_SECONDS

    def _publish(self, transaction: StoredTransaction, now: int, commit: Commit, room: int) -> int:
        """Copy up to ``room`` bytes of frames to the schedules of their partitions. Returns their size."""
        size = 0
        published: dict[int, int] = {}
        try:
            for number, half in transaction.frames():
                if size >= room:
                    return size
                partition = self._catalog.partitions[number]
                schedule = self._schedules.by_name[partition.row.name].partition
                frame = self._read(partition, half)
                if frame is not None:
                    self._turn.appender.copy(schedule, frame, self._turn.epoch, now, commit)
                    self._turn.touch(schedule)
                published[number] = half.last
                size += max(half.size, FRAME_COST)
        finally:
            for number, last in published.items():
                self.table.published(transaction, number, last)
        self._queue.popleft()
        self.table.decide(transaction.id, committed=True)
        return size

    def _read(self, partition: Partition, half: HalfFrame) -> FrameView | None:
        """A frame of half messages; None if it is damaged, which is reported."""
        log, records = self._turn.message_log, partition.consume_log
        _, record = records.locate(half.base)
        try:
            if record is None or record.base != half.base:
                raise FrameError("its frame is not in the log")
            return stored_frame(log, partition.id, record)
        except (FrameError, DamageError) as error:
            self._schedules.report("message", f"half messages of {partition.row.name!r}: {error}", half.rows)
            return None

    def frames_of(self, transaction: StoredTransaction, count: int, size: int) -> list[tuple[str, FrameView]]:
        """(subject, frame) of the first half messages: about ``count`` rows, and frames of at most ``size`` bytes."""
        write_messages(self._turn)
        found: list[tuple[str, FrameView]] = []
        for number, half in transaction.frames():
            if count <= 0 or half.size > size:
                break
            partition = self._catalog.partitions[number]
            frame = self._read(partition, half)
            if frame is not None:
                found.append((partition.row.subject, frame))
            count -= half.rows
            size -= half.size
        return found

    # --- retention ------------------------------------------------------------------------------

    def release(self) -> None:
        """Move the starts of half partitions past the rows that are decided, once the decisions are durable."""
        logs = self._turn.logs
        if self._starts is not None:
            starts, ends = self._starts
            if any(log.durable < end for log, end in zip(logs, ends, strict=True)):
                return
            for partition, start in starts.items():
                if start > partition.start and self._catalog.partitions.get(partition.id) is partition:
                    partition.start = start
                    self._turn.touch(partition)
        first = self.table.first_rows()
        starts = {partition: first.get(partition.id, partition.next) for partition in self.half_partitions.values()}
        self._starts = starts, [log.end for log in logs]

    @property
    def log_needed(self) -> int | None:
        """The message log is needed from this offset for half messages; None: there are none."""
        heads = [partition.head for partition in self.half_partitions.values()]
        return min((head.offset for head in heads if head is not None), default=None)

    def move(self, before: int) -> bool:
        """Append frames that are stored before this offset again, so that older segments can be deleted.

        One call moves the frames of one turn. Returns whether there were any.
        """
        turn, log, size = self._turn, self._turn.message_log, 0
        write_messages(turn)
        for partition, frames in self._stored_before(before):
            for transaction, half in frames:
                if size >= PUBLISH_SIZE_MAX:
                    return True
                frame = self._read(partition, half)
                if frame is None:
                    continue
                try:
                    log.place_for(frame.size)
                except OSError as error:
                    turn.disk_error(error)
                    return size > 0
                self.append(transaction, partition, frame)
                size += max(frame.size, FRAME_COST)
        return size > 0

    def _stored_before(self, offset: int) -> Iterator[tuple[Partition, Iterator[tuple[StoredTransaction, HalfFrame]]]]:
        """The frames of each half partition that are stored before an offset."""
        for partition in self.half_partitions.values():
            records = partition.consume_log
            index = records.find_offset(offset)
            end = records.record(index).base if index < len(records) else partition.next
            if partition.start < end:
                yield partition, self.table.stored_before(partition.id, end)
