"""The parts of a message log that contain wanted rows, cut into chunks, and reading a chunk.

One process plans from headers alone; other processes each read the frames of a chunk. A chunk lies in one segment file
and contains everything that is needed to read it: the processes share only the files.

Promise: every wanted row is in exactly one chunk. Rows are returned only after the checksums of their frame were
verified; frames of other partitions are skipped by their headers. If rows seem to be missing, the log is verified there
before the gap is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, zip_longest
from struct import Struct
from typing import Final

import msgspec

from plait.errors import DamageError, DataDirError, FrameError, SubjectNotFound
from plait.frame.header import PREFIX, SEQUENCE_MAX, TIME_MAX
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.model import names
from plait.model.filter_terms import FilterTerms
from plait.storage.catalog import PartitionRow
from plait.storage.checkpoint import LoadedCheckpoint
from plait.storage.disk import Disk
from plait.storage.logs.recovery import Damage
from plait.storage.reading.log_reader import LogReader, damage_error, map_segment
from plait.storage.reading.log_walk import FrameHeader, LogPiece, LogWalk, survey

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
    #: Rows that match; None: all. It does not change which frames are wanted.
    filter: FilterTerms | None = None

    @classmethod
    def of_subjects(cls, subjects: Iterable[str]) -> WantedRows:
        """All rows of subjects that are named, or that have a prefix, which ends with "*"."""
        given = list(subjects)
        exact = frozenset(names.check("subject", name) for name in given if not name.endswith("*"))
        return cls(exact, tuple(name[:-1] for name in given if name.endswith("*")))

    def names(self, subject: str) -> bool:
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
    """One piece of the walk: its wanted frames, and the frames between them."""

    #: Log offsets of the piece.
    offset: int
    log_end: int
    segment: str
    #: Positions in the segment, and the size of the wanted frames.
    start: int = 0
    end: int = 0
    size: int = 0
    #: Partition → ranges [first, end) of consecutive sequences.
    partitions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    #: Partition → (first sequence, epoch) wherever the epoch changes.
    epochs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    #: The log offset of the last frame of the requested offsets; -1: there is none.
    last: int = -1
    #: A frame starts or ends at the start of the requested offsets.
    meets_start: bool = False
    #: Between runs with the same number there are only whole frames, and no damage.
    stretch: int = 0


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
    walk = LogWalk(reader, fail_on_damage=fail_on_damage)
    runs = survey(walk, wanted.covers, _RunFinder(wanted, places, *offsets))
    partitions = walk.partitions
    end = runs[-1].log_end if runs else 0
    if not partitions and any(run.log_end > run.offset for run in runs):
        raise DataDirError(f"{reader.place!r} holds no message log: its frames name no partition")
    rows = {row.id: row for row in partitions.values() if not row.deleted}
    if not may_be_empty:
        check_names(reader.place, wanted, {row.subject for row in rows.values()})
    last = max((run.last for run in runs), default=-1)
    meets_start = any(run.meets_start for run in runs)
    for run, following in pairwise(runs):
        following.stretch = run.stretch + (following.offset > run.log_end)
    live = {number for number, row in rows.items() if wanted.covers(row)}
    runs = [run for run in runs if not live.isdisjoint(run.partitions)]
    total = sum(run.size for run in runs)
    # ``chunks_min`` is the number of parallel tasks: with four tasks, five equal chunks would take as long as eight.
    rounds = max(-(-total // (chunk_size * chunks_min)), 1)
    size = max(-(-total // (rounds * chunks_min)), 1)
    known = {number: places.of(rows[number]) for number in live}
    return ChunkPlan(_chunks(runs, known, size), walk.damages, end, partitions, meets_start, last)


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


class _RunFinder:
    """Reduces the pieces of a walk to runs."""

    def __init__(self, wanted: WantedRows, places: _SequenceBounds, start: int, end: int | None) -> None:
        self._wanted = wanted
        self._places = places
        self._start = start
        self._end = OFFSET_MAX if end is None else end

    def __call__(self, piece: LogPiece, frames: list[FrameHeader]) -> _FrameRun:
        wanted, places = self._wanted, self._places
        run = _FrameRun(piece.offset, piece.end, piece.segment)
        for position, size, count, partition, base, store_time, epoch in frames:
            if not wanted.takes(base, count, store_time) or not places.has(partition, base, count):
                continue
            if not self._start <= piece.segment_base + position < self._end:
                continue
            if not run.size:
                run.start = position
            run.end = position + size
            run.size += size
            extend(run.partitions.setdefault(partition, []), base, base + count)
            note_epoch(run.epochs.setdefault(partition, []), base, epoch)
        # The requested offsets end with a segment, and a piece lies in one segment.
        if piece.frames and piece.segment_base < self._end:
            run.last = piece.segment_base + piece.frames[-1][0]
        if piece.offset <= self._start <= run.log_end:
            start = self._start - piece.segment_base
            run.meets_start = any(start in (frame[0], frame[0] + frame[1]) for frame in piece.frames)
        return run


def _chunks(runs: list[_FrameRun], known: Mapping[int, ChunkPartition], size: int) -> list[LogChunk]:
    """Join runs to chunks of about ``size``; the chunks of one segment are about equal."""
    chunks: list[LogChunk] = []
    for _, same in groupby(runs, lambda run: run.segment):
        members = list(same)
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
                chunks.append(_chunk(taken, known))
                taken = []
    return chunks


def _chunk(runs: list[_FrameRun], known: Mapping[int, ChunkPartition]) -> LogChunk:
    ranges: dict[int, list[tuple[int, int]]] = {}
    epochs: dict[int, list[tuple[int, int]]] = {}
    for run in runs:
        for partition in run.partitions.keys() & known.keys():
            for first, end in run.partitions[partition]:
                extend(ranges.setdefault(partition, []), first, end)
            for first, epoch in run.epochs[partition]:
                note_epoch(epochs.setdefault(partition, []), first, epoch)
    partitions = {partition: known[partition] for partition in sorted(ranges)}
    size = sum(run.size for run in runs)
    return LogChunk(runs[0].segment, runs[0].start, runs[-1].end, size, partitions, ranges, epochs)


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
    view = map_segment(disk, place, chunk.segment)
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
