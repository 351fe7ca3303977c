"""Buckets: files of delayed rows that are due within one period.

A bucket consists of *runs*: frames with rows of one schedule partition each, in order of their due times. The later a
row is due when it is bucketed, the wider its bucket: a bucket of the next two hours covers ten minutes, a bucket of
next year sixteen days. So a checkpoint writes to few files, however far apart the due times are. Rows leave a run from
front to back as they become due, so one number per run, the cursor, records which rows have left. Rows that leave out
of turn (cancelled rows) are recorded one by one.

Files only grow, and a checkpoint names the positions of its runs: bytes that a crash left behind are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.places import PLACE, Int64s, column_of, place_of
from plait.frame.run_tables import UInt64s
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.disk import Disk

DIRECTORY: Final = "schedule"
#: The due time of rows that never become due.
NEVER: Final = (1 << 63) - 1

_MINUTE: Final = 60_000_000
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
#: (rows due within this, width of their buckets, its name in files): two years need at most 87 buckets.
LEVELS: Final = (
    (2 * _HOUR, 10 * _MINUTE, "10m"),
    (_DAY, 2 * _HOUR, "2h"),
    (16 * _DAY, _DAY, "1d"),
    (1 << 62, 16 * _DAY, "16d"),
)
#: The period by which a listing counts rows.
GRID: Final = LEVELS[0][1]
#: A map is made again after this many bytes were read through it: its pages count as memory of the process.
MAPPED_MAX: Final = 32 * MIB
#: The approximate number of bytes that ``glance`` reads of a column.
GLANCE_SIZE: Final = 4 * 4096
#: Rows settled out of turn are collected up to this number, then sorted together.
UNSORTED_MAX: Final = 4096

#: The position and size of a run in its file, its row count and schedule partition, the lowest and highest schedule
#: number, and the first and last due time.
RUN: Final = np.dtype(
    [
        ("offset", "<i8"),
        ("size", "<u4"),
        ("count", "<u4"),
        ("partition", "<u4"),
        ("reserved", "<u4"),
        ("low", "<u8"),
        ("high", "<u8"),
        ("due_first", "<i8"),
        ("due_last", "<i8"),
    ]
)
Runs = npt.NDArray[Any]
#: Called for damage, with the file, the reason and the number of lost rows.
Report = Callable[[str, str, int], None]


def bucket_keys(due: Int64s, now: int) -> Int64s:
    """The key of the bucket of each row: the start of the bucket plus its level, which is less than any width."""
    ahead = due - now
    keys = np.empty(len(due), np.int64)
    level = np.searchsorted(np.array([within for within, _, _ in LEVELS[:-1]], np.int64), ahead, "right")
    widths = np.array([width for _, width, _ in LEVELS], np.int64)[level]
    np.floor_divide(due, widths, out=keys)
    keys *= widths
    keys += level
    return keys


def keys_at(due: int) -> list[int]:
    """The keys of all buckets that may contain a row with this due time."""
    return [due // width * width + level for level, (_, width, _) in enumerate(LEVELS)]


def bucket_path(key: int, epoch: int, checkpoint: int) -> str:
    """The file of a new bucket. A failed checkpoint may have left a file with this name."""
    level = key % _MINUTE
    start = str(np.datetime_as_string(np.datetime64(key - level, "us"), unit="m")).replace("-", "").replace(":", "")
    return f"{DIRECTORY}/{start}-{LEVELS[level][2]}.{epoch}.{checkpoint}"


class BucketState(msgspec.Struct, array_like=True):
    """A bucket in a checkpoint."""

    key: int
    path: str
    runs: bytes
    #: u32 per run: the number of its rows that have left.
    cursors: bytes
    #: u64 per row that left out of turn: run << 32 | row.
    settled: bytes


SHARD_PREFIX: Final = "schedule-"


def shard_of(key: int) -> str:
    return f"{SHARD_PREFIX}{key}"


def encode_bucket(key: int, path: str, runs: Runs, cursors: Int64s, settled: UInt64s) -> bytes:
    state = BucketState(key, path, runs.tobytes(), cursors.astype("<u4").tobytes(), settled.tobytes())
    return msgspec.msgpack.encode(state)


class Bucket:
    """One file of runs, and which of their rows have left."""

    __slots__ = (
        "_disk",
        "_new",
        "_report",
        "_settled",
        "_verified",
        "_view",
        "bytes_read",
        "cursors",
        "dirty",
        "key",
        "loaded",
        "next_due",
        "path",
        "places",
        "runs",
        "waiting",
    )

    def __init__(self, disk: Disk, report: Report, key: int, path: str) -> None:
        self._disk = disk
        self._report = report
        self.key = key
        self.path = path
        #: Never changed in place: a checkpoint that is being written uses it.
        self.runs: Runs = np.empty(0, RUN)
        #: Per run: rows before ``cursors`` have left; rows before ``loaded`` are in the due window; ``next_due`` is the
        #: due time of the next row.
        self.cursors: Int64s = np.empty(0, np.int64)
        self.loaded: Int64s = np.empty(0, np.int64)
        self.next_due: Int64s = np.empty(0, np.int64)
        self.places: npt.NDArray[Any] = np.empty(0, PLACE)
        self._verified: npt.NDArray[np.bool_] = np.empty(0, bool)
        self._settled: UInt64s = np.empty(0, np.uint64)
        self._new: set[int] = set()
        self._view: memoryview | None = None
        #: The bytes that were read through the map.
        self.bytes_read = 0
        #: The number of rows that have not left.
        self.waiting = 0
        #: True if the bucket changed since the last checkpoint.
        self.dirty = False

    @classmethod
    def load(cls, disk: Disk, report: Report, data: bytes) -> Bucket:
        """Restore a bucket from a checkpoint shard."""
        state = msgspec.msgpack.decode(data, type=BucketState)
        bucket = cls(disk, report, state.key, state.path)
        bucket.add(np.frombuffer(state.runs, RUN), np.frombuffer(state.cursors, "<u4").astype(np.int64))
        bucket._settled = np.frombuffer(state.settled, "<u8")
        bucket.waiting -= len(bucket._settled)
        return bucket

    def add(self, runs: Runs, cursors: Int64s | None = None) -> None:
        if cursors is None:
            cursors = np.zeros(len(runs), np.int64)
        counts = runs["count"].astype(np.int64)
        self.runs = np.concatenate([self.runs, runs])
        self.cursors = np.concatenate([self.cursors, cursors])
        self.loaded = np.concatenate([self.loaded, cursors])
        self.next_due = np.concatenate([self.next_due, _next_due(runs, cursors)])
        self._verified = np.concatenate([self._verified, np.zeros(len(runs), bool)])
        self.waiting += int((counts - cursors).sum())

    def put_back(self) -> None:
        """Move all waiting rows from the due window back to the bucket."""
        self.loaded = self.cursors.copy()
        self.next_due = _next_due(self.runs, self.cursors)

    @property
    def end(self) -> int:
        return int(self.runs["offset"][-1]) + int(self.runs["size"][-1]) if len(self.runs) else 0

    def of(self, partition: int) -> npt.NDArray[np.bool_]:
        """The runs of a schedule partition with rows that have not left."""
        mine: npt.NDArray[np.bool_] = (self.runs["partition"] == partition) & (self.cursors < self.runs["count"])
        return mine

    # --- reading --------------------------------------------------------------------------------

    def view(self) -> memoryview:
        if self._view is None or len(self._view) < self.end or self.bytes_read > MAPPED_MAX:
            self._view = None
            self.bytes_read = 0
            file = self._disk.open(self.path)
            try:
                self._view = file.view()
            finally:
                file.close()
        return self._view

    def open_run(self, run: int) -> bool:
        """Verify the frame of a run, once, and record its place. False: its rows are lost, and the loss is reported.

        Raises OSError if the file cannot be opened now; the rows are not lost then.
        """
        if self._verified[run]:
            return True
        record = self.runs[run]
        if self.cursors[run] >= record["count"]:
            return False
        offset, size = int(record["offset"]), int(record["size"])
        try:
            frame = self._frame(record).verify()
        except (FrameError, FileNotFoundError) as error:
            self._lose(run, f"{error} (at {offset})")
            return False
        self.bytes_read += size
        if len(self.places) < len(self.runs):
            # Extended only here, because the places of unopened runs are not needed.
            self.places = np.concatenate([self.places, np.zeros(len(self.runs) - len(self.places), PLACE)])
        self.places[run] = np.frombuffer(place_of(frame, offset), PLACE)[0]
        self._verified[run] = True
        return True

    def _frame(self, record: Any) -> FrameView:
        offset, size = int(record["offset"]), int(record["size"])
        frame = FrameView(self.view()[offset : offset + size])
        if (frame.partition, frame.count, frame.base) != (record["partition"], record["count"], record["low"]):
            raise FrameError(f"the frame at {offset} is not the frame of the run")
        return frame

    def glance(self, run: int) -> tuple[Int64s, UInt64s] | None:
        """The due times and schedule numbers of a run, without reading all of it; None: its rows are lost.

        The frame is not verified, so damage may go unnoticed: use this only to count rows and to choose runs to open.
        """
        if not self._verified[run]:
            record = self.runs[run]
            try:
                frame = self._frame(record)
                due, numbers = frame.fixed(Column.DELIVER_AT), frame.fixed(Column.SCHEDULE)
                if due[0] == record["due_first"] and due[-1] == record["due_last"]:
                    self.bytes_read += 2 * GLANCE_SIZE
                    return due, numbers
            except (FrameError, FileNotFoundError):
                pass
            # ``open_run`` verifies the frame and reports the damage.
            if not self.open_run(run):
                return None
        return self.due_of(run), self.numbers_of(run)

    def _lose(self, run: int, reason: str) -> None:
        lost = self.drop_run(run)
        self._report(self.path, reason, lost)

    def drop_run(self, run: int) -> int:
        """Drop the rows of a run that have not left. Returns their number."""
        count = int(self.runs["count"][run])
        left = count - int(self.cursors[run]) - len(self.settled_rows(run, int(self.cursors[run]), count))
        self.cursors[run] = self.loaded[run] = count
        self.next_due[run] = NEVER
        self.waiting -= left
        self.dirty = True
        return left

    def due_of(self, run: int) -> Int64s:
        """The due time of each row of an opened run."""
        return column_of(self.view(), self.places[run], Column.DELIVER_AT)

    def numbers_of(self, run: int) -> UInt64s:
        """The schedule number of each row of an opened run."""
        return column_of(self.view(), self.places[run], Column.SCHEDULE)

    # --- rows that left out of turn ---------------------------------------------------------------

    @property
    def settled(self) -> UInt64s:
        """All rows that left out of turn, sorted."""
        if self._new:
            self._settled = np.union1d(self._settled, np.fromiter(self._new, np.uint64, len(self._new)))
            self._new = set()
        return self._settled

    def is_settled(self, run: int, row: int) -> bool:
        """True if the row left out of turn."""
        key = run << 32 | row
        if key in self._new:
            return True
        at = int(np.searchsorted(self._settled, np.uint64(key)))
        return at < len(self._settled) and int(self._settled[at]) == key

    def settle(self, run: int, rows: npt.NDArray[Any]) -> int:
        """Record that rows leave out of turn. Returns the number of rows that had not left before."""
        rows = rows[rows >= self.cursors[run]]
        added = [row for row in rows.tolist() if not self.is_settled(run, row)] if len(rows) < 8 else None
        if added is not None:
            self._new.update(run << 32 | row for row in added)
            count = len(added)
            if len(self._new) > UNSORTED_MAX:
                self._settled = self.settled
        else:
            before = len(self.settled)
            keys = np.uint64(run << 32) | rows.astype(np.uint64)
            self._settled = np.union1d(self._settled, keys)
            count = len(self._settled) - before
        self.waiting -= count
        self.dirty = True
        return count

    def waiting_by_run(self) -> Int64s:
        """The number of rows of each run that have not left."""
        self.forget_passed()
        settled = np.bincount((self._settled >> np.uint64(32)).astype(np.int64), minlength=len(self.runs))
        waiting: Int64s = self.runs["count"].astype(np.int64) - self.cursors - settled
        return waiting

    def settled_rows(self, run: int, start: int, stop: int) -> Int64s:
        """The rows in [start, stop) of a run that left out of turn."""
        keys = self.settled
        low, high = np.searchsorted(keys, np.array([run << 32 | start, run << 32 | stop], np.uint64))
        rows: Int64s = (keys[low:high] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return rows

    def advance(self, run: int) -> None:
        """Move the cursor of a run past the rows at its front that left out of turn."""
        cursor = int(self.cursors[run])
        rows = self.settled_rows(run, cursor, int(self.runs["count"][run]))
        passed = int((rows == cursor + np.arange(len(rows))).sum())
        self.cursors[run] += passed
        self.loaded[run] = max(int(self.loaded[run]), cursor + passed)

    def forget_passed(self) -> None:
        """Forget the rows that left out of turn and are before the cursors now."""
        keys = self.settled
        runs, rows = (keys >> np.uint64(32)).astype(np.int64), (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self._settled = keys[rows >= self.cursors[runs]]

    @property
    def settled_count(self) -> int:
        """The number of recorded rows that left out of turn."""
        return len(self._settled) + len(self._new)


def _next_due(runs: Runs, cursors: Int64s) -> Int64s:
    """The due time of the next row of each run; for a run that some rows have left, a lower bound of it."""
    next_due: Int64s = np.where(cursors < runs["count"], runs["due_first"], NEVER)
    return next_due
