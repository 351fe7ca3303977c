"""The parts of a message log that contain wanted rows, cut into chunks, and reading a chunk.

One process plans from headers alone; other processes each read the frames of a chunk. A chunk lies in one segment file
and contains everything that is needed to read it: the processes share only the files.

Promise: every wanted row is in exactly one chunk. Rows are returned only after the checksums of their frame were
verified; frames of other partitions are skipped by their headers. If rows seem to be missing, the log is verified there
before the gap counts as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from struct import Struct
from typing import Final

import msgspec

from plait.errors import DamageError, DataDirError, FrameError, SubjectNotFound
from plait.frame.header import PREFIX, SEQUENCE_MAX, TIME_MAX
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.catalog import PartitionRow
from plait.storage.checkpoint import LoadedCheckpoint
from plait.storage.disk import Disk
from plait.storage.logs.recovery import Damage
from plait.storage.reading.log_reader import LogPiece, LogReader, LogWalk, damage_error, expired_error

#: The approximate size of the wanted frames of a chunk: also Spark's default size for a part of a file.
CHUNK_SIZE: Final = 128 * MIB
#: The most subject names in one error text.
SHOWN_MAX: Final = 20

#: Larger than the offset of any log.
OFFSET_MAX: Final = 1 << 63

#: prefix, size, count; partition, base, store time.
_HEADER: Final = Struct("<3sxII32xIQq")


@dataclass(frozen=True)
class WantedRows:
    """The rows that a caller wants. Bounds are inclusive and select whole frames, which may contain other rows too."""

    subjects: frozenset[str] = frozenset()
    #: Prefixes of subject names.
    prefixes: tuple[str, ...] = ()
    #: Restricts the subjects and partitions to these names; None: no restriction.
    subjects_only: frozenset[str] | None = None
    partitions_only: frozenset[str] | None = None
    sequence_min: int = 0
    sequence_max: int = SEQUENCE_MAX
    #: Store times, in microseconds.
    time_min: int = 0
    time_max: int = TIME_MAX
    #: Rows with these keys, and rows with these ids (producer, producer sequence); None: all.
    keys: frozenset[str] | None = None
    message_ids: frozenset[tuple[int, int]] | None = None

    def names(self, subject: str) -> bool:
        """True if the subject is wanted."""
        return subject in self.subjects or subject.startswith(self.prefixes)

    def covers(self, row: PartitionRow) -> bool:
        """True if rows of the partition may be wanted."""
        return not row.kind and self.names(row.subject) and self.keeps(row.subject, row.name)

    def keeps(self, subject: str, partition: str) -> bool:
        """True if ``subjects_only`` and ``partitions_only`` do not exclude the partition."""
        return (self.subjects_only is None or subject in self.subjects_only) and (
            self.partitions_only is None or partition in self.partitions_only
        )

    def takes(self, base: int, count: int, store_time: int) -> bool:
        """True if rows of a frame may be wanted."""
        return (
            base <= self.sequence_max
            and base + count > self.sequence_min
            and self.time_min <= store_time <= self.time_max
        )


@dataclass(frozen=True)
class ChunkPartition:
    """The facts about a partition that reading a chunk needs."""

    subject: str
    name: str
    #: Rows below ``start`` are expired or not wanted, ...
    start: int = 0
    #: ... and rows from ``end`` on are not wanted.
    end: int = SEQUENCE_MAX


@dataclass(frozen=True)
class LogChunk:
    """Positions [start, end) of one segment file. ``size`` is the size of the wanted frames."""

    segment: str
    start: int
    end: int
    size: int
    partitions: Mapping[int, ChunkPartition]
    #: Partition → the ranges [first, end) of consecutive sequences in its wanted frames, from their headers.
    ranges: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: Partition → (first sequence, epoch) wherever the epoch of these frames changes.
    epochs: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkPlan:
    """All chunks in log order, and the damage between them."""

    chunks: list[LogChunk]
    damages: list[Damage]
    #: The log offset of the end of the last frame.
    end: int = 0
    #: Every partition that the log defines, including deleted ones.
    partitions: Mapping[int, PartitionRow] = field(default_factory=dict)
    #: A frame starts or ends at the start of the requested offsets.
    meets_start: bool = False
    #: The log offset of the last frame before the end of the requested offsets; -1: there is none.
    last: int = -1


@dataclass
class _FrameRun:
    """The wanted frames of one piece of the walk, and the frames between them."""

    offset: int
    segment: str
    #: Between runs with the same number there are only whole frames, and no damage.
    stretch: int
    start: int
    end: int
    size: int
    #: Partition → ranges [first, end) of consecutive sequences.
    partitions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    #: Partition → (first sequence, epoch) wherever the epoch changes.
    epochs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def plan(
    reader: LogReader,
    wanted: WantedRows,
    *,
    chunk_size: int = CHUNK_SIZE,
    chunks_min: int = 1,
    fail_on_damage: bool = True,
    offsets: tuple[int, int | None] = (0, None),
    bounds: Mapping[int, tuple[int, int]] | None = None,
    expired: bool = False,
    may_be_empty: bool = False,
) -> ChunkPlan:
    """Plan chunks of about equal size, at most about ``chunk_size``.

    The number of chunks is ``chunks_min`` or a multiple, if there are enough frames. ``offsets``: only frames in these
    log offsets. ``bounds``: partition → the sequences [start, end) to read; None: all partitions in full. ``expired``:
    include expired rows whose segment still exists. ``SubjectNotFound`` if a wanted subject is not in the log, unless
    ``may_be_empty``.
    """
    places = _SequenceBounds({} if expired else logical_starts(reader.checkpoint), bounds)
    planner = _Planner(reader.walk(fail_on_damage=fail_on_damage), wanted, places, offsets)
    runs = planner.run()
    partitions = planner.walk.partitions
    if planner.frame_count and not partitions:
        raise DataDirError(f"{reader.place!r} holds no message log: its frames name no partition")
    rows = {row.id: row for row in partitions.values() if not row.deleted}
    if not may_be_empty:
        check_subjects(reader, wanted, list(rows.values()))
    live = {number for number, row in rows.items() if wanted.covers(row)}
    runs = [run for run in runs if not live.isdisjoint(run.partitions)]
    total = sum(run.size for run in runs)
    # ``chunks_min`` is the number of parallel tasks: with four tasks, five equal chunks would take as long as eight.
    rounds = max(-(-total // (chunk_size * chunks_min)), 1)
    size = max(-(-total // (rounds * chunks_min)), 1)
    known = {number: places.of(rows[number]) for number in live}
    chunks, damages = _chunks(runs, known, size), planner.walk.damages
    return ChunkPlan(chunks, damages, planner.end, partitions, planner.meets_start, planner.last)


class _SequenceBounds:
    """The sequences of each partition that exist and are wanted."""

    def __init__(self, starts: Mapping[int, int], bounds: Mapping[int, tuple[int, int]] | None) -> None:
        self._bounded = bounds is not None
        self._starts = dict(starts)
        self._ends: dict[int, int] = {}
        for number, (start, end) in (bounds or {}).items():
            self._starts[number] = max(start, self._starts.get(number, 0))
            self._ends[number] = end

    def has(self, number: int, base: int, count: int) -> bool:
        """True if a frame has such sequences."""
        end = self._ends.get(number, 0 if self._bounded else SEQUENCE_MAX)
        return base < end and base + count > self._starts.get(number, 0)

    def of(self, row: PartitionRow) -> ChunkPartition:
        end = self._ends.get(row.id, 0 if self._bounded else SEQUENCE_MAX)
        return ChunkPartition(row.subject, row.name, self._starts.get(row.id, 0), end)


class _Planner:
    """Collects the runs of wanted frames from a walk."""

    def __init__(
        self, walk: LogWalk, wanted: WantedRows, places: _SequenceBounds, offsets: tuple[int, int | None]
    ) -> None:
        self.walk = walk
        self._wanted = wanted
        self._places = places
        self._offset_min = offsets[0]
        self._offset_end = OFFSET_MAX if offsets[1] is None else offsets[1]
        self._runs: list[_FrameRun] = []
        #: Partition → (the expected sequence of its next frame, the log offset of its last frame).
        self._next: dict[int, tuple[int, int]] = {}
        self.end = 0
        self.last = -1
        self._stretch = 0
        self.frame_count = 0
        self.meets_start = False

    def run(self) -> list[_FrameRun]:
        version = -1
        ids: set[int] = set()
        for piece in self.walk:
            if version != self.walk.catalog_version:
                version = self.walk.catalog_version
                ids = {row.id for row in self.walk.partitions.values() if self._wanted.covers(row)}
            if piece.offset < self.end:
                self._take_back(piece.offset)
            elif piece.offset > self.end:
                self._stretch += 1
            self._take(piece, ids)
            self.frame_count += len(piece.frames)
        return self._runs

    def _take_back(self, offset: int) -> None:
        """Drop everything from ``offset`` on: the walk yields it again."""
        while self._runs and self._runs[-1].offset >= offset:
            self._runs.pop()
        self._next.clear()
        self.meets_start = self.meets_start and offset > self._offset_min

    def _take(self, piece: LogPiece, ids: set[int]) -> None:
        wanted, places, expected = self._wanted, self._places, self._next
        run: _FrameRun | None = None
        for position, size, count, partition, base, store_time, epoch in piece.frames:
            if partition not in ids:
                continue
            offset = piece.segment_base + position
            following = expected.get(partition)
            if following is not None and following[0] != base and offset >= self.walk.verified:
                self.walk.distrust(following[1])
            expected[partition] = (base + count, offset)
            if not wanted.takes(base, count, store_time) or not places.has(partition, base, count):
                continue
            if not self._offset_min <= offset < self._offset_end:
                continue
            if run is None:
                run = _FrameRun(piece.offset, piece.segment, self._stretch, position, position, 0)
                self._runs.append(run)
            run.end = position + size
            run.size += size
            extend(run.partitions.setdefault(partition, []), base, base + count)
            known = run.epochs.get(partition)
            if known is None or known[-1][1] != epoch:
                run.epochs.setdefault(partition, []).append((base, epoch))
        self.end = piece.offset
        if piece.frames:
            position, size, *_ = piece.frames[-1]
            self.end = piece.segment_base + position + size
            # The requested offsets end with a segment, and a piece lies in one segment.
            if piece.segment_base < self._offset_end:
                self.last = piece.segment_base + position
            if piece.offset <= self._offset_min <= self.end:
                start = self._offset_min - piece.segment_base
                self.meets_start |= any(start in (frame[0], frame[0] + frame[1]) for frame in piece.frames)


def _chunks(runs: list[_FrameRun], known: Mapping[int, ChunkPartition], size: int) -> list[LogChunk]:
    """Join runs to chunks of about ``size``; the chunks of one segment are about equal."""
    chunks: list[LogChunk] = []
    by_segment: dict[str, list[_FrameRun]] = {}
    for run in runs:
        by_segment.setdefault(run.segment, []).append(run)
    for segment, members in by_segment.items():
        total = sum(run.size for run in members)
        share = total / -(-total // size)
        taken: list[_FrameRun] = []
        done = cuts = 0
        for run, following in zip_longest(members, members[1:]):
            taken.append(run)
            done += run.size
            # Cut where the total is nearest to the share.
            full = following is not None and done + following.size / 2 >= (cuts + 1) * share
            if following is None or full or _are_apart(run, following, share):
                cuts += full
                ranges = _ranges(taken, known)
                partitions = {partition: known[partition] for partition in sorted(ranges)}
                taken_size = sum(run.size for run in taken)
                epochs = _epochs(taken, known)
                chunks.append(LogChunk(segment, taken[0].start, taken[-1].end, taken_size, partitions, ranges, epochs))
                taken = []
    return chunks


def _ranges(runs: list[_FrameRun], known: Mapping[int, ChunkPartition]) -> dict[int, list[tuple[int, int]]]:
    joined: dict[int, list[tuple[int, int]]] = {}
    for run in runs:
        for partition, pieces in run.partitions.items():
            if partition in known:
                mine = joined.setdefault(partition, [])
                for first, end in pieces:
                    extend(mine, first, end)
    return joined


def _epochs(runs: list[_FrameRun], known: Mapping[int, ChunkPartition]) -> dict[int, list[tuple[int, int]]]:
    joined: dict[int, list[tuple[int, int]]] = {}
    for run in runs:
        for partition, changes in run.epochs.items():
            if partition in known:
                for first, epoch in changes:
                    note_epoch(joined.setdefault(partition, []), first, epoch)
    return joined


def note_epoch(changes: list[tuple[int, int]], first: int, epoch: int) -> None:
    """Record that messages from ``first`` on have this epoch, if it differs from the last one."""
    if not changes or changes[-1][1] != epoch:
        changes.append((first, epoch))


def extend(pieces: list[tuple[int, int]], first: int, end: int) -> None:
    """Add the range [first, end), joined to the last range if it continues it."""
    if pieces and pieces[-1][1] == first:
        pieces[-1] = (pieces[-1][0], end)
    else:
        pieces.append((first, end))


def _are_apart(run: _FrameRun, following: _FrameRun, share: float) -> bool:
    """True if damage lies between the runs, or so many other frames that skipping them costs more than another task."""
    return run.stretch != following.stretch or following.start - run.end > share


def check_subjects(reader: LogReader, wanted: WantedRows, rows: list[PartitionRow]) -> None:
    check_names(reader.place, wanted, {row.subject for row in rows})


def check_names(place: str, wanted: WantedRows, there: Iterable[str]) -> None:
    """``SubjectNotFound`` if a wanted subject does not exist, or no subject has a wanted prefix."""
    known = sorted(there)
    missing = sorted(wanted.subjects.difference(known))
    missing += [f"{prefix}*" for prefix in wanted.prefixes if not any(name.startswith(prefix) for name in known)]
    if missing:
        more = "" if len(known) <= SHOWN_MAX else f" and {len(known) - SHOWN_MAX} more"
        known_ones = f"there are {', '.join(known[:SHOWN_MAX])}{more}" if known else "there are no subjects"
        raise SubjectNotFound(
            f"subject {', '.join(map(repr, missing))} is not in {place}; {known_ones}", subject=missing[0]
        )


class _PartitionPlace(msgspec.Struct, array_like=True):
    """The first fields of a partition's checkpoint record."""

    row: PartitionRow
    start: int
    next: int


class _PartitionShard(msgspec.Struct, array_like=True):
    """A checkpoint's shard of partitions."""

    number: int
    #: The ends of the logs when the shard was copied.
    position: msgspec.Raw
    partitions: list[_PartitionPlace]


_shards = msgspec.msgpack.Decoder(_PartitionShard)


def logical_starts(checkpoint: LoadedCheckpoint | None) -> dict[int, int]:
    """Partition → its first sequence that was not expired when the checkpoint was made."""
    return {place.row.id: place.start for place in _places_of(checkpoint) if place.start}


def logical_ends(checkpoint: LoadedCheckpoint | None) -> dict[int, int]:
    """Partition → its next sequence when the checkpoint was made; partitions without messages are left out.

    Retention removes nothing that was stored after a checkpoint: a partition without a frame in the log ends here.
    """
    return {place.row.id: place.next for place in _places_of(checkpoint) if place.next}


def _places_of(checkpoint: LoadedCheckpoint | None) -> Iterator[_PartitionPlace]:
    if checkpoint is not None:
        for shard, data in checkpoint.shards.items():
            if shard.startswith("partitions-"):
                yield from _shards.decode(data).partitions


def read_chunk(
    disk: Disk, place: str, chunk: LogChunk, wanted: WantedRows, *, fail_on_damage: bool = True
) -> Iterator[tuple[ChunkPartition, FrameView]]:
    """The wanted frames of a chunk, verified and whole: the first and the last one may have rows beyond the bounds.

    A damaged frame raises ``DamageError``, or is left out. ``Expired`` if the segment was removed.
    """
    try:
        file = disk.open(chunk.segment)
    except FileNotFoundError:
        raise expired_error(place, chunk.segment) from None
    try:
        view = file.view()
    finally:
        file.close()
    partitions, unpack = chunk.partitions, _HEADER.unpack_from
    position = chunk.start
    while position < chunk.end:
        prefix, size, count, number, base, store_time = unpack(view, position)
        if prefix != PREFIX or not 0 < size <= chunk.end - position:
            raise DamageError(
                f"{place}/{chunk.segment} has changed at offset {position} since it was planned; read again"
            )
        partition = partitions.get(number)
        if (
            partition is not None
            and base + count > partition.start
            and base < partition.end
            and wanted.takes(base, count, store_time)
        ):
            try:
                frame = FrameView(view, position).verify()
            except FrameError as error:
                if fail_on_damage:
                    raise damage_error(place, chunk.segment, position, size, str(error)) from error
            else:
                yield partition, frame
        position += size
