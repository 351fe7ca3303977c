"""``Search``: finds the rows of a partition that match a query, a bounded part of the log in each call.

Of an indexed segment it reads only the frames that the index names for the key or the message id. Of other segments it
reads all frames of the partition; a query for a key reads first only the key hashes of a frame.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from plait.broker.partitions.partition import Partition
from plait.broker.query.message_index import MessageIndex
from plait.errors import DamageError, FrameError
from plait.filter.message_filter import Filter
from plait.filter.scan_budget import ScanBudget
from plait.frame.builder import Buffer
from plait.frame.columns import SMALL_COUNT, Column
from plait.frame.header import HEADER_SIZE, SEQUENCE_MAX, STAMP_OFFSET, TIME_MAX
from plait.frame.slicing import slice_mask
from plait.frame.view import FrameView
from plait.model.logical_partitions import without_lps
from plait.storage.index.index_builder import Indexed
from plait.storage.index.index_part import UNIT, IndexPart, Positions
from plait.storage.logs.consume_log import ConsumeLog
from plait.storage.logs.log import Log
from plait.storage.logs.segment import Segment

Mask = npt.NDArray[np.bool_]
#: The indexes of rows in their frame.
Rows = npt.NDArray[np.int64]
NO_ROWS: Final[Rows] = np.empty(0, np.int64)
#: Positions that one look-up in a part of an index returns at most.
LOOKUP_MAX: Final = 4096
#: Without a filter, so many rows count as one in the budget: comparing a key hash costs much less than a filter.
HASHES_PER_ROW: Final = 16
#: Records of a consume log that are searched at a time.
RECORDS: Final = 4096


class QueryTerms(msgspec.Struct, frozen=True):
    """The conditions of a query. Only messages stored in [since, until) match, in microseconds since 1970."""

    #: The key and its hash.
    key: tuple[bytes, int] | None = None
    #: (producer, producer sequence).
    message_id: tuple[int, int] | None = None
    matching: Filter | None = None
    since: int = 0
    until: int = TIME_MAX + 1

    @property
    def indexed(self) -> bool:
        """True if indexes help."""
        return self.key is not None or self.message_id is not None

    def rows(
        self, frame: FrameView, first: int, last: int, count: int, budget: ScanBudget, *, verified: bool
    ) -> tuple[Rows, int]:
        """The wanted ones of the rows [first, last), and where the search ended.

        It ends early when the condition of ``matching`` was examined for as many rows as the budget has room for, or
        when ``count`` rows match it. ``FrameError``: the frame is damaged.
        """
        found = None
        if self.since <= frame.store_time < self.until:
            found = self._found(frame, first, last)
        if self.matching is None or found is None or not len(found):
            budget.spend((last - first) // HASHES_PER_ROW, frame.size)
            return NO_ROWS if found is None else found, last
        if not verified:
            frame.verify()
        # No row before the first one with the key is examined, and none after the last one.
        low, high = int(found[0]), int(found[-1]) + 1
        examined = self.matching.examine(frame, low, high, count if high - low == len(found) else high - low, budget)
        found = found[: np.searchsorted(found, examined.last)]
        return found[examined.mask[found - low]], last if examined.last == high else examined.last

    def _found(self, frame: FrameView, first: int, last: int) -> Rows | None:
        """The rows with the id and the key; None: there are none."""
        if self.message_id is None and self.key is None:
            return np.arange(first, last)
        mask = np.ones(frame.count, bool) if self.message_id is None else _rows_of_id(frame, *self.message_id)
        if mask is not None and self.key is not None:
            keyed = _rows_of_key(frame, *self.key)
            mask = None if keyed is None else mask & keyed
        return None if mask is None else np.flatnonzero(mask[first:last]) + first


def _rows_of_id(frame: FrameView, producer: int, number: int) -> Mask | None:
    if not frame.has(Column.RUNS) and not (
        frame.producer == producer and frame.first <= number < frame.first + frame.count
    ):
        return None
    producers, numbers = frame.message_ids()
    mask: Mask = (producers == np.uint64(producer)) & (numbers == np.uint64(number))
    return mask


def _rows_of_key(frame: FrameView, key: bytes, key_hash: int) -> Mask | None:
    hashes = frame.key_hashes()
    if hashes is None or not frame.has(Column.KEY):
        return None
    mask: Mask = without_lps(hashes ^ np.uint64(key_hash)) == 0
    rows = np.flatnonzero(mask)
    if not len(rows):
        return None
    # Different keys may have the same hash.
    keys = frame.binary(Column.KEY)
    if len(rows) <= SMALL_COUNT:
        mask[rows] = [keys[row].as_py() == key for row in rows.tolist()]
        return mask
    equal: Mask = pc.equal(keys, key).to_numpy(zero_copy_only=False)
    return mask & equal


class QueryBatch(msgspec.Struct, eq=False):
    """The rows that one call found, and where the next call continues."""

    #: The sequence at which the next call continues.
    next: int
    #: The sequence at which the search ends.
    end: int
    parts: list[Buffer] = []
    count: int = 0
    size: int = 0
    inflated: int = 0
    #: Rows and bytes that were examined.
    rows: int = 0
    bytes: int = 0

    @property
    def more(self) -> bool:
        return self.next < self.end


def span(partition: Partition, since: int, until: int) -> tuple[int, int]:
    """A range of visible sequences that covers all rows stored in [since, until)."""
    start = partition.sequence_at_time(since) if since > 0 else partition.start
    return start, min(_end_before(partition.consume_log, until), partition.visible)


def _end_before(log: ConsumeLog, time: int) -> int:
    """The end of the last frame that was stored before a time."""
    if time > TIME_MAX:
        return SEQUENCE_MAX
    high = len(log)
    while high:
        low = max(high - RECORDS, 0)
        records = log.slice(low, high)
        before = np.flatnonzero(records["time"] < np.int64(time))
        if len(before):
            last = records[before[-1]]
            return int(last["base"]) + int(last["count"])
        high = low
    return 0


class Search:
    """One call: examines rows until it has found enough, or until the budget of the turn is used up."""

    def __init__(
        self, partition: Partition, log: Log, index: MessageIndex, terms: QueryTerms, budget: ScanBudget
    ) -> None:
        self._budget = budget
        self._partition = partition
        self._log = log
        self._index = index
        self._terms = terms
        self._full = False

    def run(self, start: int, end: int, count: int, size: int) -> QueryBatch:
        """Examine rows from sequence ``start`` to before ``end``; return at most ``count``, of about ``size`` bytes."""
        partition, log = self._partition, self._log
        partition.expire_deleted(log)
        end = min(end, partition.visible)
        self._count, self._size = count, size
        self._batch = batch = QueryBatch(min(max(start, partition.start), max(end, 0)), end)
        while batch.next < end and not self._full:
            _, record = partition.consume_log.locate(batch.next)
            if record is None or record.base >= end:
                batch.next = end
                break
            segment, indexed = self._indexed(record.offset)
            if segment is None or indexed is None or record.offset >= indexed.end:
                stop = end if segment is None or not self._terms.indexed else self._sequence_at(segment.end, end)
                self._scan(stop)
                continue
            try:
                self._look_up(segment, indexed, record.offset, end)
            except DamageError as error:
                self._index.reject(segment.base, error)
        return batch

    def _indexed(self, offset: int) -> tuple[Segment | None, Indexed | None]:
        if not self._terms.indexed:
            return None, None
        try:
            segment = self._log.segment_at(offset)
        except DamageError:
            return None, None
        return segment, self._index.of(segment)

    def _sequence_at(self, offset: int, end: int) -> int:
        """The first sequence of the partition at or after a log offset, at most ``end``."""
        log = self._partition.consume_log
        index = log.find_offset(offset)
        return min(log.record(index).base, end) if index < len(log) else end

    # --- without an index -----------------------------------------------------------------------

    def _scan(self, stop: int) -> None:
        """Examine all frames up to a sequence."""
        batch, terms = self._batch, self._terms
        verified = not terms.indexed
        for first, last, frame in self._partition.walk(self._log, batch.next, stop, again=verified):
            if not self._may_examine():
                return
            if frame is None:
                batch.next = last
            elif not self._examine(frame, first, last, verified=verified):
                return
        # Remaining rows before ``stop`` have no frame: they were expired or lost meanwhile.
        batch.next = max(batch.next, stop)

    # --- with an index --------------------------------------------------------------------------

    def _look_up(self, segment: Segment, indexed: Indexed, offset: int, end: int) -> None:
        """Examine the frames of a segment, from a log offset on, that its index names."""
        batch = self._batch
        for part in indexed.parts:
            position, whole = max(offset - segment.base, 0), False
            while not whole:
                self._budget.spend(0, 0)
                positions, whole = self._positions(part, position)
                for at in self._own(segment, positions):
                    frame = self._frame(segment.base + at)
                    if frame is None:
                        continue
                    if frame.base >= end:
                        batch.next = end
                        return
                    if frame.end <= batch.next:
                        continue
                    if not self._may_examine() or not self._examine(
                        frame, max(frame.base, batch.next), min(frame.end, end), verified=False
                    ):
                        return
                if not whole:
                    position = int(positions[-1]) + UNIT
                    batch.next = max(batch.next, self._sequence_at(segment.base + position, end))
                    if not self._may_examine():
                        return
        batch.next = max(batch.next, self._sequence_at(indexed.end, end))
        self._may_examine()

    def _positions(self, part: IndexPart, position: int) -> tuple[Positions, bool]:
        terms = self._terms
        if terms.message_id is not None:
            positions = part.message_id(*terms.message_id, LOOKUP_MAX)
            return positions[positions >= position], True
        assert terms.key is not None
        return part.key(terms.key[1], position, LOOKUP_MAX)

    def _own(self, segment: Segment, positions: Positions) -> list[int]:
        """The positions of frames of the partition."""
        if not len(positions):
            return []
        if int(positions[-1]) + HEADER_SIZE > len(segment.view):
            raise DamageError("an index has a position outside of its segment")
        words = np.frombuffer(segment.view, "<u4", len(segment.view) // 4)
        own: list[int] = positions[words[(positions + STAMP_OFFSET) // 4] == self._partition.id].tolist()
        return own

    # --- frames ---------------------------------------------------------------------------------

    def _frame(self, offset: int) -> FrameView | None:
        """The frame of the partition at a log offset; None: there is none, or it is damaged."""
        log = self._partition.consume_log
        index = log.find_offset(offset)
        record = log.record(index) if index < len(log) else None
        if record is not None and record.offset == offset:
            return self._partition.frame(self._log, record, trusted=True)
        # The consume log is wrong, unless the index is.
        try:
            segment = self._log.segment_at(offset)
            return FrameView(segment.view, offset - segment.base).verify()
        except (FrameError, DamageError):
            return None

    def _may_examine(self) -> bool:
        batch = self._batch
        self._full = self._full or batch.count >= self._count or not self._budget.has_room()
        return not self._full

    def _examine(self, frame: FrameView, first: int, last: int, *, verified: bool) -> bool:
        """Add the wanted rows of [first, last). False: the frame, or a part of it, did not fit."""
        batch, terms = self._batch, self._terms
        room, rows, end = self._count - batch.count, NO_ROWS, last
        try:
            rows, reached = terms.rows(
                frame, first - frame.base, last - frame.base, room, self._budget, verified=verified
            )
            end = frame.base + reached
        except FrameError:
            # Readers leave damaged frames out, too.
            self._budget.spend(0, frame.size)
        if len(rows) > room:
            # The next call continues after the last row that fits.
            rows = rows[:room]
            end = frame.base + int(rows[-1]) + 1
        whole, last = end == last, end
        if len(rows):
            chosen = np.zeros(frame.count, bool)
            chosen[rows] = True
            try:
                parts = [frame.verify().buffer] if chosen.all() else slice_mask(frame, chosen).parts
            except FrameError:
                parts, rows = [], rows[:0]
            size = sum(map(len, parts))
            if batch.count and batch.size + batch.inflated + size + frame.inflated_size > self._size:
                self._full = True
                return False
            batch.parts += parts
            batch.count += len(rows)
            batch.size += size
            batch.inflated += frame.inflated_size
        batch.rows += last - first
        batch.bytes += (frame.size + frame.inflated_size) * (last - first) // frame.count
        batch.next = last
        self._full = not whole
        return whole
