"""Reads due rows from the message log and from buckets, and makes frames of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from plait.broker.appender import JOINED_SIZE_MAX
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.schedules import Schedules
from plait.broker.schedule.upcoming import IN_LOG, Schedule, SoonRows, soon_rows
from plait.errors import DamageError, FlowControl, FrameError
from plait.frame.builder import FrameParts
from plait.frame.columns import Column
from plait.frame.gather import Gathered
from plait.frame.places import Int64s, Places, RowPicks, flatten, row_sets
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.logs.log import Log
from plait.storage.schedule.bucket import Bucket

#: Bytes of rows that one turn delivers, over all subjects; the next turn continues with the rest.
DELIVER_SIZE_MAX: Final = 8 * MIB
#: Bytes of inflated frames that are cached: their other rows may be due next.
FLAT_SIZE_MAX: Final = 64 * MIB


class BucketedOffset(NamedTuple):
    """The location of a bucketed row."""

    bucket: Bucket
    run: int
    row: int


@contextmanager
def reading() -> Iterator[None]:
    """Guard for code that only reads bucket files: an OSError becomes ``FlowControl``."""
    try:
        yield
    except OSError as error:
        raise FlowControl(
            f"a file of delayed messages cannot be opened now ({error.strerror}); try again later"
        ) from error


class DueRows:
    """Reads due rows, and settles rows that were delivered or moved."""

    def __init__(self, log: Log, schedules: Schedules) -> None:
        self._log = log
        self._schedules = schedules
        self._flat: OrderedDict[tuple[int, int, int, int], tuple[bytes, Places]] = OrderedDict()
        self._flat_size = 0

    def readable(self, schedule: Schedule, rows: SoonRows, mine: Int64s) -> tuple[Int64s, Int64s]:
        """Split ``mine`` into (readable rows, lost rows). Each frame in the log is verified once."""
        unbucketed = schedule.unbucketed
        in_log = mine[rows["bucket"][mine] == IN_LOG]
        nothing = mine[:0]
        if not len(in_log):
            return mine, nothing
        index, _ = unbucketed.locate(rows["number"][in_log])
        frames = unbucketed.frames.values
        doubtful = np.unique(index[~frames["whole"][index]])
        bad = [frame for frame in doubtful.tolist() if not self._whole(frames, frame)]
        if not bad:
            return mine, nothing
        lost = in_log[np.isin(index, bad)]
        count = unbucketed.settle(rows["number"][lost])
        self._schedules.report("message", f"frames at {frames['place']['at'][bad].tolist()} are damaged", count)
        return mine[~np.isin(mine, lost)], lost

    def _whole(self, frames: Any, index: int) -> bool:
        at, size = int(frames["place"]["at"][index]), int(frames["size"][index])
        try:
            FrameView(self._log.view(at, size)).verify()
        except (FrameError, DamageError):
            return False
        frames["whole"][index] = True
        return True

    def gather(
        self, schedule: Schedule, rows: SoonRows, mine: Int64s, room: int = DELIVER_SIZE_MAX
    ) -> tuple[Int64s, Gathered | None, int]:
        """The first of some rows (``mine``: indices into ``rows``) that fit in ``room`` bytes, their columns and size.

        If ``room`` is all of ``DELIVER_SIZE_MAX``, at least one row is returned, so that a larger row is delivered too.
        """
        sets, place = self._sets(schedule, rows[mine])
        total = np.cumsum(np.concatenate([each.sizes() for each in sets])[place])
        count = int(np.searchsorted(total, room, "right"))
        if room >= DELIVER_SIZE_MAX:
            count = max(count, 1)
        if not count:
            return mine[:0], None, 0
        return mine[:count], Gathered(sets, place[:count]), int(total[count - 1])

    def describe(self, schedule: Schedule, rows: SoonRows) -> Iterator[tuple[int, int, bytes, int]]:
        """(producer, producer sequence, key, size of the body) of readable rows."""
        sets, place = self._sets(schedule, rows)
        ids = [each.ids() for each in sets]
        producers = np.concatenate([producers for producers, _ in ids])[place]
        numbers = np.concatenate([numbers for _, numbers in ids])[place]
        sizes = np.concatenate([each.spans(Column.BODY)[1] for each in sets])[place]
        spans = [each.spans(Column.KEY) for each in sets]
        keys = b"".join([each.data(*span) for each, span in zip(sets, spans, strict=True)])
        lengths = np.concatenate([length for _, length in spans])
        starts = (np.cumsum(lengths) - lengths)[place]
        texts = [keys[start : start + length] for start, length in zip(starts, lengths[place], strict=True)]
        return zip(producers.tolist(), numbers.tolist(), texts, sizes.tolist(), strict=True)

    def _sets(self, schedule: Schedule, rows: SoonRows) -> tuple[list[RowPicks], Int64s]:
        """The rows grouped by location, and the index of each row in the concatenation of the groups."""
        sets: list[RowPicks] = []
        which: list[Int64s] = []
        buckets = rows["bucket"]
        for key in np.unique(buckets).tolist():
            mine = np.flatnonzero(buckets == key)
            if key == IN_LOG:
                self._sets_in_log(schedule, rows["number"], mine, sets, which)
                continue
            bucket = self._schedules.buckets[key]
            view = bucket.view()
            found, order = row_sets(view, bucket.places, rows["run"][mine], rows["row"][mine], self._flat_of)
            sets += found
            which.append(mine[order])
            # Each row reads at least one page.
            bucket.bytes_read += 4096 * len(mine)
        found_at = np.concatenate(which)
        place = np.empty(len(found_at), np.int64)
        place[found_at] = np.arange(len(found_at))
        return sets, place

    def _sets_in_log(
        self, schedule: Schedule, numbers: Int64s, mine: Int64s, sets: list[RowPicks], which: list[Int64s]
    ) -> None:
        log = self._log
        index, row = schedule.unbucketed.locate(numbers[mine])
        frames, frame = np.unique(index, return_inverse=True)
        places = schedule.unbucketed.frames.values["place"][frames]
        bases = np.array([segment.base for segment in log.segments])
        segments = (np.searchsorted(bases, places["at"], "right") - 1)[frame]
        places["at"] -= bases[np.searchsorted(bases, places["at"], "right") - 1]
        for segment in np.unique(segments).tolist():
            some = np.flatnonzero(segments == segment)
            found, order = row_sets(log.segments[segment].view, places, frame[some], row[some], self._flat_of)
            sets += found
            which.append(mine[some][order])

    def _flat_of(self, frame: FrameView) -> tuple[bytes, Places]:
        # Partition, base and epoch do not tell a frame of the log from one of a bucket, so the CRC is part of the key.
        key = (frame.partition, frame.base, frame.epoch, frame.crc)
        known = self._flat.get(key)
        if known is None:
            known = self._flat[key] = flatten(frame)
            self._flat_size += len(known[0])
            while self._flat_size > FLAT_SIZE_MAX and len(self._flat) > 1:
                self._flat_size -= len(self._flat.popitem(last=False)[1][0])
        return known

    @staticmethod
    def frames(gathered: Gathered, rows: SoonRows, target: Partition) -> Iterator[tuple[int, int, FrameParts]]:
        """Yield (start, stop, frame) of gathered rows in order; the caller appends each before it takes the next."""
        due, numbers = rows["due"], rows["number"].astype(np.uint64)
        forward = target.row.forward
        for start, stop in gathered.cuts(JOINED_SIZE_MAX):
            forwarded = None if forward is None else (forward.producer, target.next)
            yield start, stop, gathered.frame(start, stop, due, numbers, row_by_row=False, forwarded=forwarded)

    def settle(self, schedule: Schedule, rows: SoonRows, *, in_order: bool) -> None:
        """Settle rows. ``in_order``: all earlier rows of their bucket runs are settled too."""
        buckets = rows["bucket"]
        for key in np.unique(buckets).tolist():
            mine = rows[buckets == key]
            if key == IN_LOG:
                schedule.unbucketed.settle(mine["number"])
                continue
            bucket = self._schedules.buckets[key]
            if not in_order:
                for run in np.unique(mine["run"]).tolist():
                    bucket.settle(run, mine["row"][mine["run"] == run])
                    bucket.advance(run)
                continue
            np.maximum.at(bucket.cursors, mine["run"], mine["row"].astype(np.int64) + 1)
            bucket.waiting -= len(mine)
            bucket.dirty = True

    def copy(
        self, schedule: Schedule, number: int, due: int, to: int, place: BucketedOffset | None
    ) -> FrameParts | None:
        """A copy of a row with another due time, in a frame that settles the row; None when the row is lost."""
        at = () if place is None else (place.bucket.key, place.run, place.row)
        rows = soon_rows(np.array([due]), number, schedule.partition.id, *at)
        mine, _ = self.readable(schedule, rows, np.arange(1))
        if not len(mine):
            return None
        _, gathered, _ = self.gather(schedule, rows, mine)
        assert gathered is not None
        return gathered.frame(0, 1, np.array([to]), np.array([number], np.uint64), row_by_row=False)
