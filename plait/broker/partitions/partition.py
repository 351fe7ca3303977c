"""A partition of a broker: where its frames are, which rows are visible, and its groups and suspended reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt

from plait.broker.partition_rate import PartitionRate
from plait.broker.partitions import frame_search
from plait.broker.partitions.frame_search import KeyCache, KnownRows
from plait.broker.partitions.settings import apply_settings, apply_to_group
from plait.errors import DamageError, FrameError
from plait.frame.builder import Buffer
from plait.frame.columns import SELECTION_BIT
from plait.frame.header import TIME_MAX
from plait.frame.slicing import slice_rows
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes, Lps, LpSet, keyed_lps, lp_set, lps_of
from plait.storage.catalog import PartitionRow
from plait.storage.logs.consume_log import ConsumeLog, Record
from plait.storage.logs.frame_traits import ADDRESSED, RANKED
from plait.storage.logs.log import Log

if TYPE_CHECKING:
    from plait.broker.groups.group import Group
    from plait.broker.groups.waking import Waiter


SHARDS: Final = 256


class LogPositions(msgspec.Struct, array_like=True, frozen=True):
    """Offsets in two logs, and the number of a frame of the action log: a state includes everything before them."""

    message: int = 0
    retained: int = 0
    action: int = 0


#: The positions of state that is not from a checkpoint.
BEGINNING: Final = LogPositions()
_numbers = itertools.count()


class ReadBatch(msgspec.Struct, eq=False):
    """Frames and parts of frames read from a partition, ready to be written to a socket."""

    #: The sequence at which reading stopped.
    end: int
    #: True if the next frame did not fit or, for a read with a filter, if there are more rows to examine.
    full: bool = False
    parts: list[Buffer] = []
    #: The sequence ranges of the parts; more than one where the log has gaps.
    ranges: list[tuple[int, int]] = []
    count: int = 0
    size: int = 0
    #: Bytes that its compressed columns inflate to; they count towards the size limit.
    inflated: int = 0
    #: Ranges that cannot be read; of a read with a filter: also those that are expired.
    damaged: list[tuple[int, int]] = []

    def fits(self, start: int, end: int, count: int, size: int, some: bool) -> bool:
        """Whether this batch, which has one frame, is the result of a read with these limits."""
        return (
            self.ranges[0][0] == start
            and self.end <= end
            and self.count <= count
            and (some or self.size + self.inflated <= size)
        )

    def add(self, first: int, last: int, size: int, inflated: int) -> None:
        """Count a piece with the sequences [first, last)."""
        self.size += size
        self.inflated += inflated
        self.count += last - first
        self.end = last
        if self.ranges and self.ranges[-1][1] == first:
            self.ranges[-1] = (self.ranges[-1][0], last)
        else:
            self.ranges.append((first, last))


class Delivery(msgspec.Struct, eq=False):
    """The rows that one pull gets."""

    parts: list[Buffer] = []
    #: (start, end, attempt) in the order of the parts.
    ranges: list[tuple[int, int, int]] = []
    #: For ordered consumers: the tag of each range.
    tags: list[int] = []
    count: int = 0
    size: int = 0
    #: Bytes of memory that the consumer needs for it: ``size``, and what its compressed columns inflate to.
    weight: int = 0


class Partition:
    """A subject's stored stream on this broker group."""

    __slots__ = (
        "_groups",
        "_head",
        "_slots",
        "accepts",
        "addressed",
        "consume_log",
        "definitions",
        "epochs",
        "fences",
        "groups",
        "id",
        "keys",
        "log_start",
        "main",
        "newest",
        "next",
        "position",
        "ranked",
        "readers",
        "row",
        "searched",
        "send_rate",
        "shard",
        "size",
        "start",
        "visible",
        "waiting",
    )

    def __init__(self, row: PartitionRow, consume_log: ConsumeLog, known_rows: KnownRows) -> None:
        self.consume_log = consume_log
        self._groups: dict[str, Group] = {}
        #: The limit of what is stored here; None: there is none.
        self.send_rate: PartitionRate | None = None
        #: Only ``add_group`` and ``remove_group`` change it.
        self.groups: Mapping[str, Group] = self._groups
        #: The logical partitions whose rows it accepts; None: all.
        self.accepts: LpSet | None = None
        #: The fence of each sealed logical partition: the sequence at which its rows end; 0: none.
        self.fences: npt.NDArray[np.int64] | None = None
        #: True once a row was stored for one group only: its groups look at the groups of rows from then on.
        self.addressed = False
        self.id = row.id
        self.redefine(row)
        #: For a schedule partition: the partition that its due rows enter. The schedule accepts the same keys.
        self.main: Partition | None = None
        #: The sequence of the next row. Rows below it are appended, perhaps not yet acknowledged.
        self.next = 0
        #: Rows below this are acknowledged and visible to consumers (R2).
        self.visible = 0
        #: Rows below this are expired.
        self.start = 0
        #: (``start``, the first record that is not expired): avoids most searches of the consume log.
        self._head: tuple[int, Record] | None = None
        #: While a commit serves suspended pulls: the small frame that it appended, so that no pull reads it in the log.
        self.newest: ReadBatch | None = None
        #: The start of the message log for which ``start`` was computed.
        self.log_start = 0
        #: (generation, index) of a consume log record that is wrong → the right one; None: its frame is not in the log.
        self.searched: dict[tuple[int, int], Record | None] = {}
        #: The log positions of the checkpoint that it was loaded from: recovery applies no earlier frames.
        self.position = BEGINNING
        #: True if it ever had a row with a priority; and the bytes appended since it was created.
        self.ranked = False
        self.size = 0
        #: (first sequence, data epoch) of each epoch that stored rows here, ascending.
        self.epochs: list[tuple[int, int]] = []
        self.shard = row.id % SHARDS
        self.redefined()
        self.keys = KeyCache(self.lps_of, known_rows)
        #: Groups with suspended pulls, the longest waiting first.
        self.waiting: dict[Group, None] = {}
        #: Suspended reads that belong to no group.
        self.readers: dict[Waiter, None] = {}

    def add_group(self, group: Group) -> None:
        self._groups[group.name] = group
        apply_to_group(self, group)
        self.redefined()

    def remove_group(self, group: Group) -> None:
        self._groups.pop(group.name, None)
        self.redefined()

    def redefined(self) -> None:
        """Record that a group or consumer changed: give ``definitions`` a number that no partition had before."""
        self.definitions = next(_numbers)

    def redefine(self, row: PartitionRow) -> None:
        self.row = row
        self.accepts = None if row.lps is None else lp_set(row.lps)
        self.fences = None
        if row.lps is not None:
            self.fences = np.zeros(LOGICAL_PARTITIONS, np.int64)
            for first, end, fence in row.fences:
                self.fences[first:end] = fence
        self._slots = [(start, np.flatnonzero(lp_set(runs))) for start, runs in row.taken]
        apply_settings(self)

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
        """Whether the partition accepts the LPs of all rows with keys or, if no row has a key, at least one LP."""
        accepts = self.accepts
        if accepts is None:
            return True
        lps = keyed_lps(frame.key_hashes())
        return bool(accepts[lps].all() if len(lps) else accepts.any())

    def appended(self, base: int, offset: int, time: int, size: int, count: int, epoch: int, traits: int = 0) -> None:
        """Note a frame of this partition, with these traits, that was appended to the message log."""
        if traits & ADDRESSED and not self.addressed:
            self.addressed = True
            for group in self._groups.values():
                group.choose_rows()
        self.ranked |= traits & RANKED > 0
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((base, epoch))
        self.consume_log.append(base, offset, time, size, count, traits)
        self.next = base + count
        self.size += size

    def clip_to_epoch(self, start: int, end: int, epoch: int) -> tuple[int, int]:
        """The part of [start, end) that was stored in ``epoch``. Another epoch may use a sequence again."""
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
        newest = self.newest
        if newest is not None and start >= self.start and newest.fits(start, min(end, self.visible), count, size, some):
            return newest
        batch, consume_log = ReadBatch(start), self.consume_log
        trusted = log.end if again else log.resumed_at
        end = min(end, self.visible)
        expected = max(start, self.start)
        index, record = consume_log.locate(expected)
        if record is None:
            batch.end = max(start, end)
        parts, run_start, run_end = batch.parts, -1, -1
        while record is not None and expected < end and batch.count < count:
            if batch.count and batch.size + batch.inflated >= size:
                break
            offset = record.offset
            frame = self.frame(log, record, offset >= trusted) if record.base <= expected else None
            if frame is None:
                offset, frame = frame_search.search(self, log, expected, index)
            base = end if frame is None else frame.base
            if base > expected:
                batch.damaged.append((expected, min(base, end)))
                batch.end = min(base, end)
            if frame is None or base >= end:
                break
            frame_size, frame_end = frame.size, base + frame.count
            first = max(base, expected)
            last = min(frame_end, end, first + count - batch.count)
            sliced = None if first == base and last == frame_end else slice_rows(frame, first - base, last - base)
            piece_size = frame_size if sliced is None else sliced.size
            # A compressed column is delivered whole.
            inflated = frame.inflated_size
            if batch.size + batch.inflated + piece_size + inflated > size and (batch.count or not some):
                batch.full = True
                break
            batch.add(first, last, piece_size, inflated)
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
            if (expected := last) >= end:
                break
            index = index + 1 if offset == record.offset else consume_log.find(frame_end)
            record = consume_log.record(index) if index < len(consume_log) else None
        return batch

    def walk(
        self, log: Log, start: int, end: int, *, again: bool = True
    ) -> Iterator[tuple[int, int, FrameView | None]]:
        """(first, last, frame) of the visible rows in [start, end), in order; ``frame`` is None if it is unreadable."""
        if self.log_start != log.start:
            self.expire_deleted(log)
        end = min(end, self.visible)
        expected = max(start, self.start)
        trusted = log.end if again else log.resumed_at
        while expected < end:
            index, record = self.consume_log.locate(expected)
            frame = None
            if record is not None and record.base <= expected:
                frame = self.frame(log, record, record.offset >= trusted)
            if frame is None:
                _, frame = frame_search.search(self, log, expected, index)
                if frame is None:
                    yield expected, end, None
                    return
            if frame.base > expected:
                yield expected, min(frame.base, end), None
                expected = frame.base
                if expected >= end:
                    return
            last = min(frame.end, end)
            yield expected, last, frame
            expected = last

    def whole_frame(self, log: Log, sequence: int) -> FrameView | None:
        """The frame of a sequence, not verified, if it is not expired and all of it is visible; None otherwise."""
        _, record = self.consume_log.locate(sequence)
        if record is None or not record.base <= sequence < record.end <= self.visible or record.offset < log.start:
            return None
        return self.frame(log, record, trusted=True)

    def frame_from(self, log: Log, sequence: int) -> FrameView | None:
        """The frame that starts at this sequence, visible or not; None: there is none, or it is not written."""
        _, record = self.consume_log.locate(sequence)
        if record is None or record.base != sequence or not log.start <= record.offset < log.written:
            return None
        return self.frame(log, record, trusted=True)

    def frame(self, log: Log, record: Record, trusted: bool) -> FrameView | None:
        """The frame of a record; None if it is not there or not intact."""
        try:
            frame = FrameView(log.view(record.offset, record.size))
            if not trusted or frame.column_bits & SELECTION_BIT:
                frame.verify()
        except (FrameError, DamageError):
            return None
        meant = (self.id, record.base, record.size, record.count)
        return frame if (frame.partition, frame.base, frame.size, frame.count) == meant else None

    def expire_deleted(self, log: Log) -> None:
        """Raise ``start`` past rows whose segment is deleted; that of a checkpoint may be older and too low."""
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
            _, record = self.consume_log.locate(self.start)
            if record is None:
                return None
            self._head = (self.start, record)
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
