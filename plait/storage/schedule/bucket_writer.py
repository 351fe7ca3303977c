"""Filing: rows that still wait when a checkpoint is made go from the message log to buckets.

The index of the rows is copied where the broker runs; everything else, from reading the log to syncing the files, is
work for a thread. The log is read in pieces, so memory stays bounded, and every piece adds at most one stretch of runs
to a bucket. Nothing counts before the checkpoint that names it is written: a crash leaves bytes that no run names, and
the next filing goes on behind them. Nothing is ever overwritten, so older checkpoints keep what they name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.gather import Gathered, Int64s, UInt64s, row_sets
from plait.frame.header import pack_stamp, pad
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.checkpoint import CheckpointManifest
from plait.storage.disk import Disk, File
from plait.storage.logs.log import segment_name
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
from plait.storage.schedule.unbucketed import UNFILED_SHARD, Frames, UnbucketedFrame, encode_unfiled

#: Bytes of the message log, compressed columns inflated, whose rows are sorted together.
PIECE_SIZE: Final = 16 * MIB
#: Bytes of a run: what is verified when its first row is near.
RUN_SIZE: Final = 1 * MIB


class UnbucketedCopy(NamedTuple):
    """Rows of one schedule partition from number ``base`` on, as they were when the checkpoint began."""

    partition: int
    base: int
    due: Int64s
    frames: Frames

    @property
    def end(self) -> int:
        return self.base + len(self.due)


class BucketCopy(NamedTuple):
    """A bucket as it was when the checkpoint began."""

    key: int
    path: str
    runs: Runs
    cursors: Int64s
    settled: UInt64s
    dirty: bool

    @property
    def end(self) -> int:
        return int(self.runs["offset"][-1]) + int(self.runs["size"][-1]) if len(self.runs) else 0


class SegmentPlace(NamedTuple):
    """A segment file of the message log."""

    base: int
    path: str


class _BucketFile:
    """A bucket's file while runs are added to it."""

    def __init__(self, disk: Disk, path: str, end: int) -> None:
        self.path = path
        self.runs: list[Runs] = []
        #: The numbers of each run's rows.
        self.numbers: list[UInt64s] = []
        self._file: File = disk.open(path, create=True)
        # A checkpoint that failed may have left bytes there, and perhaps a manifest that names them.
        self._end = max(end, self._file.size)
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
            self._file.write(self._parts, self._written)
            self._written, self._parts = self._end, []

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class BucketWriter:
    """One checkpoint's share of the schedule; ``run`` blocks."""

    def __init__(
        self,
        disk: Disk,
        fresh: Sequence[UnbucketedCopy],
        buckets: dict[int, BucketCopy],
        segments: Sequence[SegmentPlace],
        unfiled: Sequence[UnbucketedFrame],
        *,
        unfiled_offset: int | None,
        now: int,
        epoch: int,
        checkpoint: int,
    ) -> None:
        self._disk = disk
        self.fresh = fresh
        self._buckets = buckets
        self._segments = segments
        self._unfiled = unfiled
        #: Where in the message log the rows begin that are left there; None: there are none.
        self.unfiled_offset = unfiled_offset
        self._bases = np.array([segment.base for segment in segments], np.int64)
        self._now = now
        self._epoch = epoch
        self._checkpoint = checkpoint
        self._writers: dict[int, _BucketFile] = {}
        self._mapped: tuple[int, memoryview] | None = None
        self._bytes_read = 0
        #: Bucket → its file and the runs that were added, and the numbers of their rows.
        self.added: dict[int, tuple[str, Runs]] = {}
        self.numbers: dict[int, list[UInt64s]] = {}
        #: (file, reason, rows) of frames that did not read back: their rows are not filed.
        self.lost: list[tuple[str, str, int]] = []
        #: Shards that the checkpoint names.
        self.kept = {shard_of(key) for key in buckets} | ({UNFILED_SHARD} if unfiled else set())

    def run(self) -> dict[str, bytes]:
        """File all rows, durably; the checkpoint shards that changed by that or before."""
        try:
            for fresh in self.fresh:
                self._file(fresh)
            for writer in self._writers.values():
                writer.sync()
            if self._writers:
                self._disk.sync_directory(DIRECTORY)
        finally:
            for writer in self._writers.values():
                writer.close()
            self._mapped = None
        self.added = {key: (writer.path, np.concatenate(writer.runs)) for key, writer in self._writers.items()}
        self.numbers = {key: writer.numbers for key, writer in self._writers.items()}
        self.kept.update(map(shard_of, self.added))
        return self._shards()

    @property
    def dirty(self) -> list[int]:
        """Buckets that had changed since the checkpoint before."""
        return [key for key, copy in self._buckets.items() if copy.dirty]

    @property
    def paths(self) -> set[str]:
        """The files of all buckets that the checkpoint names."""
        return {copy.path for copy in self._buckets.values()} | {path for path, _ in self.added.values()}

    def dropped(self, last: CheckpointManifest | None) -> list[str]:
        """Shards of the checkpoint before whose buckets are gone."""
        return (
            [
                shard
                for shard in last.shards
                if shard.startswith((SHARD_PREFIX, UNFILED_SHARD)) and shard not in self.kept
            ]
            if last
            else []
        )

    def _shards(self) -> dict[str, bytes]:
        shards: dict[str, bytes] = {}
        if self._unfiled:
            shards[UNFILED_SHARD] = encode_unfiled(self._unfiled)
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

    def _file(self, fresh: UnbucketedCopy) -> None:
        for segment, wanted in self._pieces(fresh):
            frames = fresh.frames[wanted]
            places = frames["place"].copy()
            places["at"] -= self._segments[segment].base
            first, last = int(frames["base"][0]), int(frames["base"][-1]) + int(places["count"][-1])
            due = fresh.due[first - fresh.base : last - fresh.base]
            numbers = np.flatnonzero(due != NEVER) + first
            index = np.searchsorted(frames["base"], numbers, "right") - 1
            rows = numbers - frames["base"][index]
            # Frames that do not read back may stand between these.
            there = rows < places["count"][index]
            numbers, index, rows = numbers[there], index[there], rows[there]
            due = fresh.due[numbers - fresh.base]
            sets, which = row_sets(self._view(segment), places, index, rows)
            # By time, and then by number, as they stand; so the rows of a bucket are together, too.
            order = np.argsort(due, kind="stable")
            place = np.empty(len(which), np.int64)
            place[which] = np.arange(len(which))
            gathered = Gathered(sets, place[order])
            self._add(fresh.partition, gathered, due[order], numbers[order].astype(np.uint64))

    def _pieces(self, fresh: UnbucketedCopy) -> Iterator[tuple[int, Int64s]]:
        """(segment, frames) that have rows which wait, in pieces; frames that do not read back are noted."""
        places = fresh.frames["place"]
        segments = np.searchsorted(self._bases, places["at"], "right") - 1
        starts = fresh.frames["base"] - fresh.base
        piece: list[int] = []
        size, before = 0, -1
        for frame, segment in enumerate(segments.tolist()):
            start, count = int(starts[frame]), int(places["count"][frame])
            waiting = int((fresh.due[start : start + count] != NEVER).sum())
            if not waiting:
                continue
            at, length = int(places["at"][frame]), int(fresh.frames["size"][frame])
            try:
                view = FrameView(self._view(segment)[at - self._segments[segment].base :][:length])
                if not fresh.frames["whole"][frame]:
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
        """A segment of the log under a mapping of its own, which goes when enough was read: it counts as memory."""
        if self._mapped is None or self._mapped[0] != segment or self._bytes_read > MAPPED_MAX:
            self._mapped = None
            self._bytes_read = 0
            file = self._disk.open(self._segments[segment].path)
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


def segment_places(directory: str, bases: Sequence[int]) -> list[SegmentPlace]:
    """The files of a log's segments."""
    return [SegmentPlace(base, f"{directory}/{segment_name(base)}") for base in bases]
