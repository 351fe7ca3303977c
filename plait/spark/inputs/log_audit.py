"""A data directory as the input of an audit: planned from frame headers, read in parts. A server may be using it.

The audit uses only events that depend on messages in the log, as a server that starts on these files does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.model.logical_partitions import NO_KEY_HASH
from plait.spark.auditing.block import Block
from plait.spark.auditing.block_arrays import (
    NONE,
    BlockRows,
    Events,
    Flags,
    audited,
    merged,
    of_rows,
    slots_of,
    spans_of,
    without,
)
from plait.spark.auditing.group_facts import STRICT, GroupFacts, GroupTable
from plait.spark.auditing.stored_order import astray
from plait.spark.inputs.audit_input import AuditedPartition, AuditInput, Cause, requested_groups
from plait.spark.runtime.job_runner import ProgressListener
from plait.storage.catalog import PartitionRow
from plait.storage.disk import RealDisk
from plait.storage.logs.action_log import DEFINITIONS, EVENTS, read_definitions, read_events
from plait.storage.logs.recovery import LogScan
from plait.storage.logs.retained_log import DIRECTORY as RETAINED_DIRECTORY
from plait.storage.logs.retained_log import is_header, note_of
from plait.storage.reading.action_reader import ActionPart, open_actions, read_actions
from plait.storage.reading.log_chunks import LogChunk, WantedRows, logical_ends, plan, read_chunk
from plait.storage.reading.log_reader import LogReader, open_log
from plait.storage.reading.log_walk import FrameHeader, LogPiece, LogWalk, survey

#: Bytes of the message log that one task reads: about a million short messages.
BLOCK_SIZE: Final = 32 * MIB
#: The least number of blocks, so that threads share the work evenly.
TASKS_MIN: Final = 4
#: Bytes of a part of the action log, which is read for a block or skipped as a whole.
PART_SIZE: Final = MIB
#: Parts that a task keeps in memory, each less than 2 MiB.
PARTS_MAX: Final = 32

#: Group → the range [low, high) of the sequences that a part of the action log names.
Spans = dict[int, tuple[int, int]]
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class LiveInput(AuditInput):
    """The planned audit of a data directory."""

    fail_on_damage: bool
    rows: dict[int, PartitionRow]
    chunks: list[LogChunk]
    parts: list[ActionPart]
    spans: list[Spans]

    def __len__(self) -> int:
        return len(self.chunks)

    def blocks(self, number: int) -> Iterator[Block]:
        """The rows of one chunk, by partition."""
        disk = RealDisk(self.place, read_only=True)
        frames: dict[int, list[FrameView]] = {}
        starts: dict[int, int] = {}
        read = read_chunk(disk, self.place, self.chunks[number], self.wanted, fail_on_damage=self.fail_on_damage)
        places: dict[int, list[int]] = {}
        for place, (partition, frame) in enumerate(read, number << 32):
            frames.setdefault(frame.partition, []).append(frame)
            places.setdefault(frame.partition, []).append(place)
            starts[frame.partition] = partition.start

        # The partitions of a chunk mostly need the same parts of the action log.
        @lru_cache(PARTS_MAX)
        def events_of_part(part: int) -> Events:
            return of_rows(read_part(disk, self.place, self.parts[part])[0])

        for partition_id, views in frames.items():
            table = FrameRows(views, self.rows[partition_id], starts[partition_id], places[partition_id])
            events_of = self._events_of(partition_id, table.rows, events_of_part)
            yield Block(partition_id, table.rows, table.key_of, events_of)

    def _events_of(
        self, partition: int, rows: BlockRows, events_of_part: Callable[[int], Events]
    ) -> Callable[[GroupFacts], Events]:
        """The lookup of a group's events about some rows, in log order. Each part is read once for all groups."""
        low, high = (int(rows.sequences[0]), int(rows.sequences[-1]) + 1) if len(rows) else (0, 0)
        groups = [group.id for group in self.groups.values() if group.partition == partition]
        found: dict[int, list[Events]] = {}
        for part, spans in enumerate(self.spans):
            named = [number for number in groups if number in spans]
            here = [number for number in named if spans[number][0] < high and spans[number][1] > low]
            if here:
                events = events_of_part(part)
                events = events[(events["start"] < high) & (events["end"] > low)]
                for number in here:
                    found.setdefault(number, []).append(events[events["group"] == number])
        return lambda group: np.concatenate(found[group.id]) if group.id in found else NONE

    def deaths(self) -> Counter[Cause]:
        """From the retained log. Removed letters are not counted."""
        log = LogReader(RealDisk(self.place, read_only=True), RETAINED_DIRECTORY, self.place).mapped()
        found: Counter[Cause] = Counter()
        start = log.segments[0].base if log.segments else 0
        for _, frame in LogScan(log, start, start, stamps_durable=False):
            # A retained frame has the store time of the frame that its rows are from.
            if is_header(frame) or not self.wanted.time_min <= frame.store_time <= self.wanted.time_max:
                continue
            try:
                note = note_of(frame)
            except FrameError:
                # Unreadable notes are reported by ``plait doctor``.
                continue
            if note.death is not None:
                reason = note.death.reason
                found[Cause(note.group, reason.type, reason.handler)] += len(frame.sequences())
        return found


class FrameRows:
    """Frames of one partition as rows."""

    def __init__(
        self, frames: list[FrameView], partition: PartitionRow, start: int, places: Sequence[int] | None = None
    ) -> None:
        self._frames = frames
        counts = np.array([frame.count for frame in frames])
        self._ends = np.cumsum(counts)
        sequences = np.concatenate([frame.sequences() for frame in frames])
        hashes = np.concatenate(
            [np.full(frame.count, NO_KEY_HASH) if (of := frame.key_hashes()) is None else of for frame in frames]
        )
        stored = np.repeat(np.array([frame.store_time for frame in frames], np.int64), counts)
        sent = [
            frame.fixed(Column.SEND_TIME) if frame.has(Column.SEND_TIME) else np.full(frame.count, frame.store_time)
            for frame in frames
        ]
        epochs = np.repeat(np.array([frame.epoch for frame in frames], np.int64), counts)
        # In log order, without the rows of a frame that retention has removed.
        self._chosen = np.flatnonzero(sequences >= start)
        if len(sequences) > 1 and (np.diff(sequences) <= 0).any():
            _, self._chosen = np.unique(np.where(sequences >= start, sequences, -1), return_index=True)
            self._chosen = self._chosen[sequences[self._chosen] >= start]
        chosen = self._chosen
        hashes, sequences = hashes[chosen], sequences[chosen]
        lps = slots_of(sequences, hashes, partition.taken)
        ids = [frame.message_ids() for frame in frames]
        moved = bool(partition.taken or partition.fences)
        self.rows = BlockRows(
            sequences,
            epochs[chosen],
            lps,
            hashes,
            stored[chosen],
            np.concatenate(sent).astype(np.int64)[chosen],
            ids=(np.concatenate([each for each, _ in ids])[chosen], np.concatenate([each for _, each in ids])[chosen]),
            unordered=np.concatenate([_unordered(frame) for frame in frames])[chosen],
            astray=astray(sequences, lps, partition.taken, partition.fences),
            places=np.repeat(np.array(places, np.int64), counts)[chosen] if places is not None else None,
            spans=np.searchsorted([since for since, _ in partition.taken], sequences, "right") if moved else None,
        )

    def key_of(self, row: int) -> str:
        """The text of a row's key."""
        at = int(self._chosen[row])
        frame = int(np.searchsorted(self._ends, at, "right"))
        before = int(self._ends[frame - 1]) if frame else 0
        text: bytes = self._frames[frame].binary(Column.KEY)[at - before].as_py()
        return text.decode()


def _unordered(frame: FrameView) -> Flags:
    """Rows that were delayed or sent one-way."""
    if frame.has(Column.DELIVER_AT) and not frame.flags & FLAG_UNSEQUENCED:
        delayed: Flags = frame.values(Column.DELIVER_AT) > 0
        return delayed
    return np.full(frame.count, bool(frame.flags & FLAG_UNSEQUENCED))


@dataclass
class Coverage:
    """The sequences and store times in the frame headers of a partition. A gap between the sequences is lost rows."""

    #: Ranges [start, end) of the sequences in the log, ascending.
    ranges: Ranges = field(default_factory=list)
    #: The ranges of the requested frames.
    wanted: Ranges = field(default_factory=list)
    #: The first and the last store time of each piece of the log.
    times: list[int] = field(default_factory=list)


def cover(walk: LogWalk, wanted: WantedRows) -> tuple[dict[int, Coverage], int]:
    """Run a walk to its end: partition → its coverage, and the log offset after the last frame."""

    def look(piece: LogPiece, frames: list[FrameHeader]) -> tuple[int, dict[int, Coverage]]:
        columns = np.array(frames, np.int64).reshape(-1, 7)
        found = {}
        for number in np.unique(columns[:, 3]).tolist():
            part = columns[columns[:, 3] == number]
            times = part[:, 5]
            chosen = (times >= wanted.time_min) & (times <= wanted.time_max)
            found[number] = Coverage(_joined(part), _joined(part[chosen]), [int(times.min()), int(times.max())])
        return piece.end, found

    total: defaultdict[int, Coverage] = defaultdict(Coverage)
    log_end = 0
    for end, found in survey(walk, wanted.covers, look):
        log_end = max(log_end, end)
        for number, each in found.items():
            known = total[number]
            known.ranges += each.ranges
            known.wanted += each.wanted
            known.times += each.times
    for known in total.values():
        known.ranges, known.wanted = merged(known.ranges), merged(known.wanted)
    return dict(total), log_end


def _joined(part: npt.NDArray[np.int64]) -> Ranges:
    """Ranges [start, end) of consecutive frames."""
    if not len(part):
        return []
    base, ends = part[:, 4], part[:, 4] + part[:, 2]
    apart = np.flatnonzero(base[1:] != ends[:-1])
    starts, stops = base[np.concatenate([[0], apart + 1])], ends[np.concatenate([apart, [len(base) - 1]])]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _read_actions(
    path: str, message_end: int, *, fail_on_damage: bool, progress: ProgressListener
) -> tuple[dict[int, GroupFacts], list[ActionPart], list[Spans], list[int]]:
    """Read the action log: its groups, its parts with the sequences that each names, and its first and last times.

    Events that depend on messages that were stored since, or are lost, are ignored.
    """
    actions = open_actions(path)
    parts = actions.look(part_size=PART_SIZE, fail_on_damage=fail_on_damage, message_end=message_end).parts
    log_start = actions.files[0][0] if actions.files else 0
    table = GroupTable(whole=log_start == 0)
    disk = RealDisk(path, read_only=True)
    spans: list[Spans] = []
    times: list[int] = []
    progress.step("reading the action log", len(parts), "parts")
    for number, part in enumerate(parts):
        progress.update(number)
        events, part_times = read_part(disk, path, part, table)
        spans.append(spans_of(events))
        times += part_times
    if log_start and times:
        for group in table.groups.values():
            group.begins = times[0]
    return table.groups, parts, spans, times


def open_live(
    path: str,
    wanted: WantedRows,
    groups: frozenset[str],
    broker_group: str,
    *,
    fail_on_damage: bool,
    progress: ProgressListener,
) -> LiveInput:
    """Read the headers of the message log and all of the action log, and plan the work."""
    reader = open_log(path)
    progress.step("looking at the message log", 1, "parts")
    walk = LogWalk(reader, fail_on_damage=fail_on_damage)
    coverage, log_end = cover(walk, wanted)
    log_groups, parts, spans, times = _read_actions(path, log_end, fail_on_damage=fail_on_damage, progress=progress)
    planned = plan(reader, wanted, chunk_size=BLOCK_SIZE, chunks_min=TASKS_MIN, fail_on_damage=fail_on_damage)
    rows = {row.id: row for row in walk.partitions.values() if not row.deleted and wanted.covers(row)}
    known = requested_groups(log_groups, rows, groups, path)
    starts = {number: each.start for chunk in planned.chunks for number, each in chunk.partitions.items()}
    nexts = logical_ends(reader.checkpoint)
    from_zero = not reader.files or reader.files[0][0] == 0
    partitions = {}
    for number, row in rows.items():
        found = coverage.get(number, Coverage())
        times += found.times
        first, last = (found.ranges[0][0], found.ranges[-1][1]) if found.ranges else (0, 0)
        # Retention may have removed segments since the checkpoint.
        start = max(starts.get(number, 0), 0 if from_zero else first)
        end = max(last, nexts.get(number, 0))
        if not from_zero and not found.ranges:
            # Every row has expired: the checkpoint has the partition's next sequence.
            start = max(start, end)
        partitions[number] = AuditedPartition(
            row.subject,
            f"{row.name}@{broker_group}",
            first=max(start, first),
            end=end,
            missing=without([(start, end)], found.ranges),
            readable=0 if fail_on_damage else sum(max(high - max(low, start), 0) for low, high in found.wanted),
            strict=row.settings.order == STRICT,
        )
    for group in known.values():
        group.learn_order(rows[group.partition].settings.order)
        if not from_zero and group.partition not in coverage:
            # The checkpoint may be older than some rows that have expired.
            group.reach = min(group.reach, partitions[group.partition].end)
    return LiveInput(
        place=path,
        wanted=wanted,
        fail_on_damage=fail_on_damage,
        partitions=partitions,
        rows=rows,
        groups=known,
        chunks=planned.chunks,
        parts=parts,
        spans=spans,
        time_min=max(min(times, default=0), wanted.time_min),
        time_max=max(times, default=0),
    )


def read_part(
    disk: RealDisk, place: str, part: ActionPart, table: GroupTable | None = None
) -> tuple[Events, list[int]]:
    """The events of a part, and the times of its first and last frame. ``table`` takes them; call in log order."""
    found: list[tuple[int, int, Any]] = []
    times: list[int] = []
    for offset, frame in read_actions(disk, place, part, alone=True):
        times = [times[0] if times else frame.store_time, frame.store_time]
        if frame.partition == EVENTS:
            found.append((offset, frame.store_time, read_events(frame)))
        elif frame.partition == DEFINITIONS and table is not None:
            for definition in read_definitions(frame):
                table.define(definition, head=frame.previous != 0 or offset == part.base)
    events = audited(found)
    if table is not None:
        table.take(events)
    return events, times
