"""The keys of a partition's rows, and its frames where its consume log is wrong or a frame is damaged."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import DamageError, FrameError
from plait.filter.message_filter import Examined, Filter
from plait.filter.scan_budget import ScanBudget
from plait.frame.columns import Column
from plait.frame.header import PREFIX
from plait.frame.view import FrameView
from plait.model.logical_partitions import Hashes, Lps
from plait.storage.logs.consume_log import Record
from plait.storage.logs.frame_traits import traits_of
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogPart, LogScan

if TYPE_CHECKING:
    from plait.broker.partitions.partition import Partition


Sequences = npt.NDArray[np.int64]


class FrameKeys(NamedTuple):
    """The logical partition and the key hash of each row of a frame."""

    lps: Lps
    #: None: no row has a key.
    hashes: Hashes | None


class KnownRows:
    """A cache of facts about the rows of frames, shared by all partitions of a broker.

    Evicts the facts about the least recently used frame.
    """

    __slots__ = ("_known", "_limit", "_rows")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: (number of the partition's cache, first sequence of the frame, subject) → (facts, number of rows).
        self._known: OrderedDict[tuple[int, int, Filter | None], tuple[Any, int]] = OrderedDict()
        self._rows = 0

    @property
    def rows(self) -> int:
        """How many rows are cached, at most 10 bytes each."""
        return self._rows

    def get(self, place: tuple[int, int, Filter | None]) -> Any:
        known = self._known.get(place)
        if known is None:
            return None
        self._known.move_to_end(place)
        return known[0]

    def put(self, place: tuple[int, int, Filter | None], facts: Any, rows: int) -> None:
        _, replaced = self._known.pop(place, (None, 0))
        self._known[place] = facts, rows
        self._rows += rows - replaced
        while self._rows > self._limit and len(self._known) > 1:
            _, (_, gone) = self._known.popitem(last=False)
            self._rows -= gone


class KeyCache:
    """The keys of one partition's frames, and the rows that match filters."""

    __slots__ = ("_lps_of", "_number", "_rows")

    #: Numbers each cache, so that a new partition never finds rows of a dropped one. Those are evicted in time.
    _numbers = itertools.count()

    def __init__(self, lps_of: Callable[[Sequences, Hashes | None], Lps], rows: KnownRows) -> None:
        self._lps_of = lps_of
        self._rows = rows
        self._number = next(self._numbers)

    def known(self, base: int) -> FrameKeys | None:
        found: FrameKeys | None = self._rows.get((self._number, base, None))
        return found

    def matching(self, frame: FrameView, wanted: Filter, first: int, budget: ScanBudget) -> Examined:
        """Which rows of a frame match a filter: those from ``first`` on, as many as the budget has room for.

        Several owners of an ordered group, and groups with the same filter, examine the same frame.
        """
        if frame.has(Column.SELECTION):
            return wanted.examine(frame, first, frame.count, frame.count, budget)
        place = (self._number, frame.base, wanted)
        known: Examined | None = self._rows.get(place)
        if known is None or not known.first <= first < known.last:
            known = Examined(first, first, np.empty(0, bool))
        if known.last == frame.count:
            budget.spend(0, 0)
        else:
            found = wanted.examine(frame, known.last, frame.count, frame.count, budget)
            # A copy: a mask may be a column of the frame, and must not keep a segment's mapping open.
            known = Examined(known.first, found.last, np.concatenate([known.mask, found.mask]))
            self._rows.put(place, known, len(known.mask))
        return Examined(first, known.last, known.mask[first - known.first :])

    def of(self, frame: FrameView) -> FrameKeys:
        whole = not frame.has(Column.SELECTION)
        known = self.known(frame.base) if whole else None
        if known is not None:
            return known
        hashes = frame.key_hashes()
        # A copy: the cache must not keep a segment's mapping open.
        keys = FrameKeys(self._lps_of(frame.sequences(), hashes), None if hashes is None else hashes.copy())
        if whole:
            self._rows.put((self._number, frame.base, None), keys, len(keys.lps))
        return keys


#: Wrong records of the consume log whose frames are remembered: a damaged file has few, and each takes 100 bytes.
SEARCHED_MAX = 1_000


def search(partition: Partition, log: Log, sequence: int, index: int) -> tuple[int, FrameView | None]:
    """The offset and the first intact frame with rows from ``sequence`` on, when the record at ``index`` leads to none.

    Usually the record is right and the frame is damaged: the next record is tried. If there is no frame at the
    record's offset, the record is wrong. The consume log is derived state, so the message log is searched between
    the neighbouring records, once.
    """
    for later in range(index, len(partition.consume_log)):
        record = partition.consume_log.record(later)
        frame = partition.frame(log, record, trusted=False)
        if frame is None and not _right(partition, log, later, record):
            record = _search_log(partition, log, later, sequence) or record
            frame = partition.frame(log, record, trusted=False)
        if frame is not None and frame.end > sequence:
            return record.offset, frame
    return -1, None


def _right(partition: Partition, log: Log, index: int, record: Record) -> bool:
    """Whether a record without an intact frame has the right offset."""
    if index >= partition.consume_log.flushed:
        # It was never written to a file, so it cannot be damaged.
        return True
    try:
        view = log.view(record.offset, record.size)
        frame = FrameView(view)
    except DamageError:
        return False
    except FrameError:
        return view[: len(PREFIX)] == PREFIX
    return (frame.partition, frame.base, frame.size, frame.count) == (
        partition.id,
        record.base,
        record.size,
        record.count,
    )


def _search_log(partition: Partition, log: Log, index: int, sequence: int) -> Record | None:
    """The right record for a wrong one, from the message log between the neighbouring records; None: not found."""
    known = (partition.consume_log.generation, index)
    if known in partition.searched:
        return partition.searched[known]
    begin = log.start
    if index:
        before = partition.consume_log.record(index - 1)
        begin = max(begin, before.offset)
    end = log.written
    if index + 1 < len(partition.consume_log):
        end = partition.consume_log.record(index + 1).offset
    found = None
    for offset, frame in LogScan(LogPart(log, begin, end), begin, log.durable):
        if frame.partition == partition.id and frame.end > sequence:
            found = Record(frame.base, offset, frame.store_time, frame.size, frame.count, traits_of(frame))
            break
    if len(partition.searched) >= SEARCHED_MAX:
        partition.searched.clear()
    partition.searched[known] = found
    return found


def keys_in(partition: Partition, log: Log, start: int, end: int) -> Iterator[tuple[int, int, FrameKeys]]:
    """(first, last, keys) of the visible rows in [start, end), frame by frame, without unreadable rows."""
    end = min(end, partition.visible)
    index = partition.consume_log.find(max(start, partition.start))
    while index < len(partition.consume_log):
        record = partition.consume_log.record(index)
        index += 1
        first, last = max(record.base, start), min(record.base + record.count, end)
        if record.base >= end:
            return
        keys = partition.keys.known(record.base)
        if keys is None or len(keys.lps) != record.count:
            frame = partition.frame(log, record, trusted=False)
            if frame is None:
                # The record is wrong or the frame is damaged: search for it, as a delivery does.
                upper = partition.consume_log.record(index).base if index < len(partition.consume_log) else end
                yield from _keys_found(partition, log, first, min(upper, end))
                continue
            keys = partition.keys.of(frame)
        low, high = first - record.base, last - record.base
        if low < high:
            hashes = None if keys.hashes is None else keys.hashes[low:high]
            yield first, last, FrameKeys(keys.lps[low:high], hashes)


def _keys_found(partition: Partition, log: Log, start: int, end: int) -> Iterator[tuple[int, int, FrameKeys]]:
    for first, last, frame in partition.walk(log, start, end):
        if frame is not None:
            lps, hashes = partition.keys.of(frame)
            low, high = first - frame.base, last - frame.base
            yield first, last, FrameKeys(lps[low:high], None if hashes is None else hashes[low:high])
