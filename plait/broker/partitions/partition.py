"""A partition of a broker: where its frames are, which rows are visible, and its groups and suspended reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt

from plait.broker.partitions.key_cache import FrameKeys, KeyCache, KnownRows
from plait.errors import DamageError, FrameError
from plait.frame.builder import Buffer
from plait.frame.frame_lps import keyed_lps
from plait.frame.header import PREFIX, TIME_MAX
from plait.frame.slicing import slice_rows
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes, Lps, LpSet, lp_set, lps_of
from plait.storage.catalog import PartitionRow
from plait.storage.logs.consume_log import ConsumeLog, Record
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogPart, LogScan

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import Group
    from plait.broker.partitions.suspended import Waiter


#: Wrong records of the consume log whose frames are remembered: a damaged file has few, and each takes 100 bytes.
SEARCHED_MAX = 1_000


#: The checkpoint shards of a broker.
SHARDS: Final = 256


class LogPositions(msgspec.Struct, array_like=True, frozen=True):
    """Positions in the logs: a state includes everything before them."""

    #: An offset in the message log.
    message: int = 0
    #: An offset in the retained log.
    retained: int = 0
    #: The number of a frame of the action log.
    action: int = 0


#: The positions of state that is not from a checkpoint.
BEGINNING: Final = LogPositions()
_numbers = itertools.count()


class ReadBatch:
    """Frames and parts of frames read from a partition, ready to be written to a socket."""

    __slots__ = ("count", "damaged", "end", "full", "inflated", "parts", "ranges", "size")

    def __init__(self, start: int) -> None:
        #: The next frame did not fit.
        self.full = False
        self.parts: list[Buffer] = []
        #: The sequence ranges of the parts; more than one where the log has gaps.
        self.ranges: list[tuple[int, int]] = []
        self.count = 0
        self.size = 0
        #: Bytes that its compressed columns inflate to; they count towards the size limit.
        self.inflated = 0
        #: Reading stopped here.
        self.end = start
        #: Ranges that cannot be read.
        self.damaged: list[tuple[int, int]] = []


class Partition:
    """A subject's stored stream on this broker group."""

    __slots__ = (
        "_groups",
        "_head",
        "_searched",
        "_slots",
        "accepts",
        "consume_log",
        "definitions",
        "epochs",
        "fences",
        "groups",
        "id",
        "keys",
        "log_start",
        "main",
        "next",
        "position",
        "readers",
        "row",
        "shard",
        "size",
        "start",
        "visible",
        "waiting",
    )

    def __init__(self, row: PartitionRow, consume_log: ConsumeLog, known_rows: KnownRows) -> None:
        self.consume_log = consume_log
        #: The logical partitions whose rows it accepts; None: all.
        self.accepts: LpSet | None = None
        #: The fence of each sealed logical partition: the sequence at which its rows end; 0: none.
        self.fences: npt.NDArray[np.int64] | None = None
        self.id = row.id
        self.redefine(row)
        #: Of a schedule partition: the partition that its rows enter when they are due. It accepts the same keys.
        self.main: Partition | None = None
        #: The sequence of the next row. Rows below it are appended, perhaps not yet acknowledged.
        self.next = 0
        #: Rows below this are acknowledged and visible to consumers (R2).
        self.visible = 0
        #: Rows below this are expired.
        self.start = 0
        #: (``start``, the first record that is not expired): avoids most searches of the consume log.
        self._head: tuple[int, Record] | None = None
        #: The start of the message log for which ``start`` was computed.
        self.log_start = 0
        #: (generation, index) of a wrong record → the right record; None: its frame is not in the log.
        self._searched: dict[tuple[int, int], Record | None] = {}
        #: The log positions of the checkpoint that it was loaded from. Recovery does not apply earlier frames again.
        self.position = BEGINNING
        #: Bytes appended since the partition was created.
        self.size = 0
        #: (first sequence, data epoch) of each epoch that stored rows here, ascending.
        self.epochs: list[tuple[int, int]] = []
        #: Which checkpoint shard it is in.
        self.shard = row.id % SHARDS
        self._groups: dict[str, Group] = {}
        #: Only ``add_group`` and ``remove_group`` change it.
        self.groups: Mapping[str, Group] = self._groups
        self.redefined()
        self.keys = KeyCache(self.lps_of, known_rows)
        #: Groups with suspended pulls, the longest waiting first.
        self.waiting: dict[Group, None] = {}
        #: Suspended reads that belong to no group.
        self.readers: dict[Waiter, None] = {}

    def add_group(self, group: Group) -> None:
        self._groups[group.name] = group
        self.redefined()

    def remove_group(self, group: Group) -> None:
        self._groups.pop(group.name, None)
        self.redefined()

    def redefined(self) -> None:
        """A group or a consumer was added, removed or changed."""
        #: A number that changes with each change and is unique among all partitions.
        self.definitions = next(_numbers)

    def redefine(self, row: PartitionRow) -> None:
        """Set its row in the catalog."""
        self.row = row
        self.accepts = None if row.lps is None else lp_set(row.lps)
        self.fences = None
        if row.lps is not None:
            self.fences = np.zeros(LOGICAL_PARTITIONS, np.int64)
            for first, end, fence in row.fences:
                self.fences[first:end] = fence
        self._slots = [(start, np.flatnonzero(lp_set(runs))) for start, runs in row.taken]

    def known_until(self, route: int) -> npt.NDArray[np.int64]:
        """For each LP, the first sequence that a route of this version does not cover; -1: it covers all."""
        begins = np.full(LOGICAL_PARTITIONS, -1, np.int64)
        # The lowest sequence is written last and wins.
        for first, end, sequence, version in sorted(self.row.reopened, key=lambda each: -each[2]):
            if version > route:
                begins[first:end] = sequence
        return begins

    def lps_of(self, sequences: npt.NDArray[np.int64], hashes: Hashes | None) -> Lps:
        """The LP of each row. A row without a key belongs to an LP that the partition accepted when it was stored."""
        lps = lps_of(sequences, hashes)
        keyless = np.ones(len(lps), bool) if hashes is None else hashes == NO_KEY_HASH
        if self._slots and keyless.any():
            since = np.searchsorted([start for start, _ in self._slots], sequences, "right") - 1
            for index in np.unique(since[keyless]).tolist():
                slots = self._slots[max(index, 0)][1]
                mine = keyless & (since == index)
                lps[mine] = slots[lps[mine] % len(slots)]
        return lps

    def takes(self, frame: FrameView) -> bool:
        """Whether it accepts a frame: the LPs of all rows with keys. Without keys, any open LP is enough."""
        accepts = self.accepts
        if accepts is None:
            return True
        lps = keyed_lps(frame)
        return bool(accepts[lps].all() if len(lps) else accepts.any())

    def appended(self, base: int, offset: int, time: int, size: int, count: int, epoch: int) -> None:
        """Note a frame of this partition that was appended to the message log."""
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((base, epoch))
        self.consume_log.append(base, offset, time, size, count)
        self.next = base + count
        self.size += size

    def clip_to_epoch(self, start: int, end: int, epoch: int) -> tuple[int, int]:
        """The part of [start, end) that was stored in ``epoch``. In another epoch a sequence is another message."""
        for index in range(len(self.epochs) - 1, -1, -1):
            first, number = self.epochs[index]
            if number == epoch:
                last = self.epochs[index + 1][0] if index + 1 < len(self.epochs) else self.next
                return max(start, first), min(end, last)
        return start, start

    def read(
        self, log: Log, start: int, end: int, count: int, size: int, *, some: bool = True, again: bool = True
    ) -> ReadBatch:
        """Visible rows from ``start``: at most ``count`` rows and ``size`` bytes; with ``some`` at least one frame.

        ``again=False`` is for a first delivery: frames that this process received are not verified, since it verified
        them on arrival. If the consumer finds a wrong checksum, it returns the rows, and they are read with ``again``.
        """
        if self.log_start != log.start:
            self.expire_deleted(log)
        batch = ReadBatch(start)
        trusted = log.end if again else log.resumed_at
        end = min(end, self.visible)
        expected = max(start, self.start)
        index = self.consume_log.find(expected)
        records = len(self.consume_log)
        run_start = run_end = -1
        parts = batch.parts
        while (
            index < records
            and expected < end
            and batch.count < count
            and (batch.size + batch.inflated < size or not batch.count)
        ):
            record = self.consume_log.record(index)
            offset = record.offset
            frame = self._frame(log, record, record.offset >= trusted) if record.base <= expected else None
            if frame is None:
                found = self._search(log, expected, index)
                if found is None:
                    batch.damaged.append((expected, end))
                    batch.end = end
                    break
                offset, frame = found
            base, frame_size, frame_end = frame.base, frame.size, frame.base + frame.count
            if base > expected:
                batch.damaged.append((expected, min(base, end)))
                batch.end = min(base, end)
            if base >= end:
                break
            first = max(base, expected)
            last = min(frame_end, end, first + count - batch.count)
            whole = first == base and last == frame_end
            sliced = None if whole else slice_rows(frame, first - base, last - base)
            piece_size = frame_size if sliced is None else sliced.size
            # A compressed column is delivered whole.
            inflated = frame.inflated_size
            if batch.size + batch.inflated + piece_size + inflated > size and (batch.count or not some):
                batch.full = True
                break
            index = index + 1 if offset == record.offset else self.consume_log.find(frame_end)
            batch.size += piece_size
            batch.inflated += inflated
            if sliced is not None:
                parts.extend(sliced.parts)
                run_end = -1
            elif offset == run_end and log.segment_at(run_start).end > offset:
                # Adjacent frames become one piece of the mapping.
                run_end += frame_size
                parts[-1] = log.view(run_start, run_end - run_start)
            else:
                run_start, run_end = offset, offset + frame_size
                parts.append(frame.buffer)
            if batch.ranges and batch.ranges[-1][1] == first:
                batch.ranges[-1] = (batch.ranges[-1][0], last)
            else:
                batch.ranges.append((first, last))
            batch.count += last - first
            batch.end = expected = last
        return batch

    def walk(
        self, log: Log, start: int, end: int, *, again: bool = True
    ) -> Iterator[tuple[int, int, FrameView | None]]:
        """(first, last, frame) of the visible rows in [start, end), in order; ``frame`` is None if it is unreadable."""
        self.expire_deleted(log)
        end = min(end, self.visible)
        expected = max(start, self.start)
        trusted = log.end if again else log.resumed_at
        index = self.consume_log.find(expected)
        while expected < end:
            if index >= len(self.consume_log):
                yield expected, end, None
                return
            record = self.consume_log.record(index)
            offset = record.offset
            frame = self._frame(log, record, offset >= trusted) if record.base <= expected else None
            if frame is None:
                found = self._search(log, expected, index)
                if found is None:
                    yield expected, end, None
                    return
                offset, frame = found
            if frame.base > expected:
                yield expected, min(frame.base, end), None
                expected = frame.base
                if expected >= end:
                    return
            last = min(frame.end, end)
            yield expected, last, frame
            expected = last
            index = index + 1 if offset == record.offset else self.consume_log.find(expected)

    def keys_in(self, log: Log, start: int, end: int) -> Iterator[tuple[int, int, FrameKeys]]:
        """(first, last, keys) of the visible rows in [start, end), frame by frame, without unreadable rows."""
        end = min(end, self.visible)
        index = self.consume_log.find(max(start, self.start))
        while index < len(self.consume_log):
            record = self.consume_log.record(index)
            index += 1
            first, last = max(record.base, start), min(record.base + record.count, end)
            if record.base >= end:
                return
            keys = self.keys.known(record.base)
            if keys is None or len(keys.lps) != record.count:
                frame = self._frame(log, record, trusted=False)
                if frame is None:
                    # The record is wrong or the frame is damaged: search for it, as a delivery does.
                    upper = self.consume_log.record(index).base if index < len(self.consume_log) else end
                    yield from self._keys_found(log, first, min(upper, end))
                    continue
                keys = self.keys.of(frame)
            low, high = first - record.base, last - record.base
            if low < high:
                hashes = None if keys.hashes is None else keys.hashes[low:high]
                yield first, last, FrameKeys(keys.lps[low:high], hashes)

    def _keys_found(self, log: Log, start: int, end: int) -> Iterator[tuple[int, int, FrameKeys]]:
        for first, last, frame in self.walk(log, start, end):
            if frame is not None:
                lps, hashes = self.keys.of(frame)
                low, high = first - frame.base, last - frame.base
                yield first, last, FrameKeys(lps[low:high], None if hashes is None else hashes[low:high])

    def whole_frame(self, log: Log, sequence: int) -> FrameView | None:
        """The frame of a sequence, not verified, if it is not expired and all of it is visible; None otherwise."""
        index = self.consume_log.find(sequence)
        if index >= len(self.consume_log):
            return None
        record = self.consume_log.record(index)
        if not record.base <= sequence < record.base + record.count <= self.visible or record.offset < log.start:
            return None
        return self._frame(log, record, trusted=True)

    def frame_from(self, log: Log, sequence: int) -> FrameView | None:
        """The frame that starts at this sequence, visible or not; None: there is none, or it is not written."""
        index = self.consume_log.find(sequence)
        if index >= len(self.consume_log):
            return None
        record = self.consume_log.record(index)
        if record.base != sequence or not log.start <= record.offset < log.written:
            return None
        return self._frame(log, record, trusted=True)

    def _frame(self, log: Log, record: Record, trusted: bool) -> FrameView | None:
        """The frame of a record; None if it is not there or not intact."""
        try:
            frame = FrameView(log.view(record.offset, record.size))
            if not trusted:
                frame.verify()
        except (FrameError, DamageError):
            return None
        meant = (self.id, record.base, record.size, record.count)
        return frame if (frame.partition, frame.base, frame.size, frame.count) == meant else None

    def _search(self, log: Log, sequence: int, index: int) -> tuple[int, FrameView] | None:
        """The first intact frame with rows from ``sequence`` on, when the record at ``index`` does not lead to one.

        Usually the record is right and the frame is damaged: the next record is tried. If there is no frame at the
        record's offset, the record is wrong. The consume log is derived state, so the message log is searched between
        the neighbouring records, once.
        """
        for later in range(index, len(self.consume_log)):
            record = self.consume_log.record(later)
            frame = self._frame(log, record, trusted=False)
            if frame is None and not self._right(log, later, record):
                record = self._search_log(log, later, sequence) or record
                frame = self._frame(log, record, trusted=False)
            if frame is not None and frame.end > sequence:
                return record.offset, frame
        return None

    def _right(self, log: Log, index: int, record: Record) -> bool:
        """Whether a record without an intact frame has the right offset."""
        if index >= self.consume_log.flushed:
            # It was never written to a file, so it cannot be damaged.
            return True
        try:
            view = log.view(record.offset, record.size)
            frame = FrameView(view)
        except DamageError:
            return False
        except FrameError:
            return view[: len(PREFIX)] == PREFIX
        return (frame.partition, frame.base, frame.size, frame.count) == (self.id, record.base, *record[3:])

    def _search_log(self, log: Log, index: int, sequence: int) -> Record | None:
        """The right record for a wrong one, from the message log between the neighbouring records; None: not found."""
        known = (self.consume_log.generation, index)
        if known in self._searched:
            return self._searched[known]
        begin = log.start
        if index:
            before = self.consume_log.record(index - 1)
            begin = max(begin, before.offset)
        end = log.written
        if index + 1 < len(self.consume_log):
            end = self.consume_log.record(index + 1).offset
        found = None
        for offset, frame in LogScan(LogPart(log, begin, end), begin, log.durable):
            if frame.partition == self.id and frame.end > sequence:
                found = Record(frame.base, offset, frame.store_time, frame.size, frame.count)
                break
        if len(self._searched) >= SEARCHED_MAX:
            self._searched.clear()
        self._searched[known] = found
        return found

    def expire_deleted(self, log: Log) -> None:
        """Raise ``start`` past rows whose segment is deleted.

        A checkpoint may be older than the deletion, so the ``start`` that it has may be too low.
        """
        if self.log_start == log.start:
            return
        self.log_start = log.start
        if self.start < self.next and ((head := self.head) is None or head.offset < log.start):
            index = self.consume_log.find_offset(log.start)
            first = self.consume_log.record(index).base if index < len(self.consume_log) else self.next
            self.start = max(self.start, first)

    @property
    def head(self) -> Record | None:
        """The first record that is not expired, or None."""
        if self.start >= self.next:
            return None
        if self._head is None or self._head[0] != self.start:
            log = self.consume_log
            index = log.find(self.start)
            if index >= len(log):
                return None
            self._head = (self.start, log.record(index))
        return self._head[1]

    def stored_until(self, epoch: int) -> int:
        """The end of the rows stored in ``epoch`` and earlier epochs: an event of ``epoch`` refers to no later row."""
        end = self.next
        for first, number in reversed(self.epochs):
            if number <= epoch:
                break
            end = first
        return end

    def sequence_at_time(self, time: int) -> int:
        """The first visible sequence stored at or after ``time`` (microseconds). ``time`` may be any number."""
        index = self.consume_log.find_time(max(0, min(time, TIME_MAX)))
        if index >= len(self.consume_log):
            return self.visible
        return max(self.start, min(self.consume_log.record(index).base, self.visible))
