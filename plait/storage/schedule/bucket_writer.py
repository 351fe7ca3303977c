"""Moving rows to buckets: a checkpoint moves the unbucketed rows that still wait from the message log to buckets.

The broker's loop copies the index of the rows; a thread does the rest, from reading the log to syncing the files. The
log is read in pieces, so memory is bounded, and each piece adds consecutive runs to a bucket. The runs take effect when
the checkpoint that names them is written. After a crash before that, the bucket has bytes that no run names, and the
next checkpoint appends after them. Nothing is overwritten, so older checkpoints stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np

from plait.errors import FrameError
from plait.frame.builder import Buffer, pack_stamp
from plait.frame.gather import Gathered
from plait.frame.header import pad
from plait.frame.places import Int64s, row_sets
from plait.frame.run_tables import UInt64s
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.checkpoint import CheckpointManifest
from plait.storage.disk import Disk, File
from plait.storage.schedule.bucket import (
    DIRECTORY,
    MAPPED_MAX,
    NEVER,
    RUN,
    SHARD_PREFIX,
    Runs,
    bucket_keys,
    bucket_path,
    encode_bucket,
    shard_of,
)
from plait.storage.schedule.unbucketed import UNBUCKETED_SHARD, UnbucketedCopy, UnbucketedFrame

#: Bytes of the message log, with compressed columns inflated, whose rows are sorted together.
PIECE_SIZE: Final = 16 * MIB
#: The approximate size of a run. A run is verified in full before its first row is due.
RUN_SIZE: Final = 1 * MIB


class BucketCopy(NamedTuple):
    """The state of a bucket when the checkpoint began."""

    key: int
    path: str
    runs: Runs
    cursors: Int64s
    settled: UInt64s
    dirty: bool
    #: The end of the last run.
    end: int


class _BucketFile:
    """The file of a bucket, while runs are added."""

    def __init__(self, disk: Disk, path: str, end: int) -> None:
        self.path = path
        self.runs: list[Runs] = []
        #: The schedule numbers of the rows of each run.
        self.numbers: list[UInt64s] = []
        self.file: File = disk.open(path, create=True)
        # A failed checkpoint may have left bytes after ``end``, and perhaps a manifest that names them.
        self._end = max(end, self.file.size)
        self._end += pad(self._end)
        self._parts: list[Buffer] = []
        self._written = self._end

    def add(self, parts: list[Buffer], run: Runs, size: int, numbers: UInt64s) -> None:
        run["offset"] = self._end
        self.numbers.append(numbers)
        self._parts += parts
        self._end += size
        self.runs.append(run)

    def write(self) -> None:
        if self._parts:
            self.file.write(self._parts, self._written)
            self._written, self._parts = self._end, []


class BucketWriter:
    """The part of one checkpoint that stores the schedule; ``run`` blocks."""

    def __init__(
        self,
        disk: Disk,
        row_copies: Sequence[UnbucketedCopy],
        buckets: dict[int, BucketCopy],
        segments: Sequence[tuple[int, str]],
        left_in_log: Sequence[UnbucketedFrame],
        *,
        unbucketed_offset: int | None,
        now: int,
        epoch: int,
        checkpoint: int,
    ) -> None:
        self._disk = disk
        self.row_copies = row_copies
        self._buckets = buckets
        #: (log offset of the first byte, file) of each segment of the message log.
        self._segments = segments
        self._left_in_log = left_in_log
        #: The message-log offset of the first row in ``left_in_log``; None: there is none.
        self.unbucketed_offset = unbucketed_offset
        self._bases = np.array([base for base, _ in segments], np.int64)
        self._now = now
        self._epoch = epoch
        self._checkpoint = checkpoint
        self._writers: dict[int, _BucketFile] = {}
        self._mapped: tuple[int, memoryview] | None = None
        self._bytes_read = 0
        #: Bucket → its file and the added runs, and the schedule numbers of their rows.
        self.added: dict[int, tuple[str, Runs]] = {}
        self.numbers: dict[int, list[UInt64s]] = {}
        #: (file, reason, rows) of unreadable frames, whose rows are lost.
        self.lost: list[tuple[str, str, int]] = []
        #: Shards that the checkpoint names.
        self.kept = {shard_of(key) for key in buckets} | ({UNBUCKETED_SHARD} if left_in_log else set())

    def run(self) -> dict[str, bytes]:
        """Move all rows to buckets, durably. Returns the checkpoint shards that changed."""
        try:
            for copy in self.row_copies:
                self._move(copy)
            for writer in self._writers.values():
                writer.file.sync()
            if self._writers:
                self._disk.sync_directory(DIRECTORY)
        finally:
            for writer in self._writers.values():
                writer.file.close()
            self._mapped = None
        self.added = {key: (writer.path, np.concatenate(writer.runs)) for key, writer in self._writers.items()}
        self.numbers = {key: writer.numbers for key, writer in self._writers.items()}
        self.kept.update(map(shard_of, self.added))
        return self._shards()

    @property
    def dirty(self) -> list[int]:
        """The buckets that changed since the previous checkpoint."""
        return [key for key, copy in self._buckets.items() if copy.dirty]

    @property
    def paths(self) -> set[str]:
        """The files of all buckets that the checkpoint names."""
        return {copy.path for copy in self._buckets.values()} | {path for path, _ in self.added.values()}

    def dropped(self, last: CheckpointManifest | None) -> list[str]:
        """The shards of the previous checkpoint whose buckets are gone."""
        return (
            [
                shard
                for shard in last.shards
                if shard.startswith((SHARD_PREFIX, UNBUCKETED_SHARD)) and shard not in self.kept
            ]
            if last
            else []
        )

    def _shards(self) -> dict[str, bytes]:
        shards: dict[str, bytes] = {}
        if self._left_in_log:
            shards[UNBUCKETED_SHARD] = msgspec.msgpack.encode(self._left_in_log)
        for key, copy in self._buckets.items():
            if copy.dirty or key in self.added:
                runs, cursors = copy.runs, copy.cursors
                if key in self.added:
                    added = self.added[key][1]
                    runs = np.concatenate([runs, added])
                    cursors = np.concatenate([cursors, np.zeros(len(added), np.int64)])
                shards[shard_of(key)] = encode_bucket(key, copy.path, runs, cursors, copy.settled)
        for key, (path, added) in self.added.items():
            if key not in self._buckets:
                nothing: UInt64s = np.empty(0, np.uint64)
                shards[shard_of(key)] = encode_bucket(key, path, added, np.zeros(len(added), np.int64), nothing)
        return shards

    # --- one schedule partition -------------------------------------------------------------------

    def _move(self, copy: UnbucketedCopy) -> None:
        """Write the waiting rows of one schedule partition to their buckets."""
        for segment, wanted in self._pieces(copy):
            frames = copy.frames[wanted]
            places = frames["place"].copy()
            places["at"] -= int(self._bases[segment])
            first, last = int(frames["base"][0]), int(frames["base"][-1]) + int(places["count"][-1])
            due = copy.due[first - copy.base : last - copy.base]
            numbers = np.flatnonzero(due != NEVER) + first
            index = np.searchsorted(frames["base"], numbers, "right") - 1
            rows = numbers - frames["base"][index]
            # Numbers of unreadable frames between these frames are left out.
            there = rows < places["count"][index]
            numbers, index, rows = numbers[there], index[there], rows[there]
            due = copy.due[numbers - copy.base]
            sets, which = row_sets(self._view(segment), places, index, rows)
            # By due time, then by number; so the rows of one bucket are consecutive.
            order = np.argsort(due, kind="stable")
            place = np.empty(len(which), np.int64)
            place[which] = np.arange(len(which))
            gathered = Gathered(sets, place[order])
            self._add(copy.partition, gathered, due[order], numbers[order].astype(np.uint64))

    def _pieces(self, copy: UnbucketedCopy) -> Iterator[tuple[int, Int64s]]:
        """(segment, frames with waiting rows), in pieces. Unreadable frames are added to ``lost``."""
        places = copy.frames["place"]
        segments = np.searchsorted(self._bases, places["at"], "right") - 1
        starts = copy.frames["base"] - copy.base
        piece: list[int] = []
        size, before = 0, -1
        for frame, segment in enumerate(segments.tolist()):
            start, count = int(starts[frame]), int(places["count"][frame])
            waiting = int((copy.due[start : start + count] != NEVER).sum())
            if not waiting:
                continue
            at, length = int(places["at"][frame]), int(copy.frames["size"][frame])
            try:
                view = FrameView(self._view(segment)[at - int(self._bases[segment]) :][:length])
                if not copy.frames["whole"][frame]:
                    view.verify()
                    self._bytes_read += length
            except FrameError as error:
                self.lost.append(("message", f"{error} (at {at})", waiting))
                continue
            weight = length + view.inflated_size
            if piece and (size + weight > PIECE_SIZE or segment != before):
                yield before, np.array(piece)
                piece, size = [], 0
            piece.append(frame)
            size += weight
            before = segment
        if piece:
            yield before, np.array(piece)

    def _view(self, segment: int) -> memoryview:
        """A separate map of a log segment. It is made again after ``MAPPED_MAX`` bytes: its pages count as memory."""
        if self._mapped is None or self._mapped[0] != segment or self._bytes_read > MAPPED_MAX:
            self._mapped = None
            self._bytes_read = 0
            file = self._disk.open(self._segments[segment][1])
            try:
                self._mapped = (segment, file.view())
            finally:
                file.close()
        return self._mapped[1]

    def _add(self, partition: int, gathered: Gathered, due: Int64s, numbers: UInt64s) -> None:
        """Write sorted rows to their buckets."""
        keys = bucket_keys(due, self._now)
        edges = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
        for start, stop in pairwise(edges):
            writer = self._writer(int(keys[start]))
            for first, last in gathered.cuts(RUN_SIZE, start, stop):
                frame = gathered.frame(first, last, due, numbers, row_by_row=True)
                run = np.zeros(1, RUN)
                run["size"], run["count"], run["partition"] = frame.size, frame.count, partition
                run["low"], run["high"] = numbers[first:last].min(), numbers[first:last].max()
                run["due_first"], run["due_last"] = due[first], due[last - 1]
                frame.stamp_with(pack_stamp(partition, int(run["low"][0]), self._now, 0, self._epoch))
                writer.add(frame.parts, run, frame.size, numbers[first:last])
            writer.write()

    def _writer(self, key: int) -> _BucketFile:
        writer = self._writers.get(key)
        if writer is None:
            self._disk.make_directory(DIRECTORY)
            copy = self._buckets.get(key)
            path = copy.path if copy is not None else bucket_path(key, self._epoch, self._checkpoint)
            writer = self._writers[key] = _BucketFile(self._disk, path, copy.end if copy is not None else 0)
        return writer
