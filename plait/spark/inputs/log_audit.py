"""A data directory as the input of an audit: planned from frame headers, read in parts. A server may be using it.

The audit uses only events that depend on messages in the log, as a server that starts on these files does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from plait.frame.columns import Column
from plait.frame.frame_lps import key_hashes
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.model.logical_partitions import NO_KEY_HASH, Hashes
from plait.spark.auditing.block import Block
from plait.spark.auditing.block_rows import BlockRows, Flags, Numbers, slots_of
from plait.spark.auditing.events import NONE, Events, audited, of_rows, spans_of
from plait.spark.auditing.group_facts import STRICT, GroupFacts, GroupTable
from plait.spark.auditing.stored_order import astray
from plait.spark.inputs.audit_input import AuditedPartition, requested_groups
from plait.spark.inputs.coverage import cover
from plait.spark.inputs.death_causes import Cause, deaths
from plait.spark.runtime.job_runner import ProgressListener
from plait.storage.catalog import PartitionRow
from plait.storage.disk import RealDisk
from plait.storage.logs.action_log import DEFINITIONS, EVENTS, read_definitions, read_events
from plait.storage.reading.action_reader import ActionPart, open_actions, read_actions
from plait.storage.reading.log_chunks import LogChunk, WantedRows, logical_ends, plan, read_chunk
from plait.storage.reading.log_reader import open_log
from plait.storage.reading.log_walk import LogWalk

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


@dataclass(frozen=True)
class LiveInput:
    """The planned audit of a data directory, as an ``AuditInput``."""

    place: str
    wanted: WantedRows
    fail_on_damage: bool
    partitions: dict[int, AuditedPartition]
    rows: dict[int, PartitionRow]
    groups: dict[int, GroupFacts]
    chunks: list[LogChunk]
    parts: list[ActionPart]
    spans: list[Spans]
    time_min: int
    time_max: int

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
        parts = _Parts(self, disk)
        groups: dict[int, list[int]] = {}
        for group in self.groups.values():
            groups.setdefault(group.partition, []).append(group.id)
        for partition_id, views in frames.items():
            table = FrameRows(views, self.rows[partition_id], starts[partition_id], places[partition_id])
            yield Block(
                partition_id,
                table.rows,
                table.key_of,
                _LiveEvents(parts, self.spans, groups.get(partition_id, []), table.rows).events_of,
            )

    def deaths(self) -> Counter[Cause]:
        """From the retained log."""
        return deaths(self.place, since=self.wanted.time_min, until=self.wanted.time_max)


class _Parts:
    """A cache of parts of the action log. The partitions of a chunk mostly need the same parts."""

    def __init__(self, source: LiveInput, disk: RealDisk) -> None:
        self._source = source
        self._disk = disk
        self._known: dict[int, Events] = {}

    def events(self, number: int) -> Events:
        """The events of a part about rows."""
        known = self._known.pop(number, None)
        if known is None:
            known = of_rows(read_part(self._disk, self._source.place, self._source.parts[number])[0])
            if len(self._known) >= PARTS_MAX:
                del self._known[next(iter(self._known))]
        # Re-inserted at the end: the least recently used part is evicted first.
        self._known[number] = known
        return known


class _LiveEvents:
    """The events about some rows. Each part of the action log is read once for all groups."""

    def __init__(self, parts: _Parts, spans: list[Spans], groups: list[int], rows: BlockRows) -> None:
        self._parts = parts
        self._spans = spans
        self._groups = groups
        self._low = int(rows.sequences[0]) if len(rows) else 0
        self._high = int(rows.sequences[-1]) + 1 if len(rows) else 0
        self._known: dict[int, list[Events]] | None = None

    def events_of(self, group: GroupFacts) -> Events:
        """The events of a group, in log order."""
        if self._known is None:
            self._known = self._read()
        found = self._known.get(group.id)
        return np.concatenate(found) if found else NONE

    def _read(self) -> dict[int, list[Events]]:
        found: dict[int, list[Events]] = {}
        for part, spans in enumerate(self._spans):
            here = [number for number in self._groups if number in spans and self._meets(*spans[number])]
            if not here:
                continue
            events = self._parts.events(part)
            events = events[(events["start"] < self._high) & (events["end"] > self._low)]
            for number in here:
                mine = events[events["group"] == number]
                if len(mine):
                    found.setdefault(number, []).append(mine)
        return found

    def _meets(self, low: int, high: int) -> bool:
        return low < self._high and high > self._low


class FrameRows:
    """Frames of one partition as rows."""

    def __init__(
        self, frames: list[FrameView], partition: PartitionRow, start: int, places: Sequence[int] | None = None
    ) -> None:
        self._frames = frames
        counts = np.array([frame.count for frame in frames])
        self._ends = np.cumsum(counts)
        sequences = np.concatenate([frame.sequences() for frame in frames])
        hashes: Hashes | None = None
        if any(frame.has(Column.KEY_HASH) for frame in frames):
            found = [key_hashes(frame) for frame in frames]
            hashes = np.concatenate(
                [np.full(frame.count, NO_KEY_HASH) if h is None else h for frame, h in zip(frames, found, strict=True)]
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
        if hashes is not None:
            hashes = hashes[chosen]
        sequences = sequences[chosen]
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
            unordered=_unordered(frames, chosen),
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


def _unordered(frames: list[FrameView], chosen: Numbers) -> Flags | None:
    """Rows that were delayed or sent one-way. None: there are none."""
    if not any(frame.has(Column.DELIVER_AT) or frame.flags & FLAG_UNSEQUENCED for frame in frames):
        return None
    found = []
    for frame in frames:
        if frame.flags & FLAG_UNSEQUENCED:
            found.append(np.ones(frame.count, bool))
        elif frame.has(Column.DELIVER_AT):
            found.append(frame.values(Column.DELIVER_AT) > 0)
        else:
            found.append(np.zeros(frame.count, bool))
    return np.concatenate(found)[chosen]


@dataclass(frozen=True)
class _Actions:
    """The whole action log: its groups, its parts with the sequences that each names, and its first and last times."""

    groups: dict[int, GroupFacts]
    parts: list[ActionPart]
    spans: list[Spans]
    times: list[int]


def _read_actions(path: str, message_end: int, *, fail_on_damage: bool, progress: ProgressListener) -> _Actions:
    """Read the action log. Ignore events that depend on messages that were stored since, or are lost."""
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
    return _Actions(table.groups, parts, spans, times)


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
    coverage = cover(walk, wanted)
    actions = _read_actions(path, coverage.log_end, fail_on_damage=fail_on_damage, progress=progress)
    planned = plan(reader, wanted, chunk_size=BLOCK_SIZE, chunks_min=TASKS_MIN, fail_on_damage=fail_on_damage)
    rows = {row.id: row for row in walk.partitions.values() if not row.deleted and wanted.covers(row)}
    known = requested_groups(actions.groups, rows, groups, path)
    starts = {number: each.start for chunk in planned.chunks for number, each in chunk.partitions.items()}
    nexts = logical_ends(reader.checkpoint)
    from_zero = not reader.files or reader.files[0][0] == 0
    partitions = {}
    for number, row in rows.items():
        # Retention may have removed segments since the checkpoint.
        start = max(starts.get(number, 0), 0 if from_zero else coverage.first(number))
        end = max(coverage.end(number), nexts.get(number, 0))
        if not from_zero and number not in coverage.ranges:
            # Every row has expired: the checkpoint has the partition's next sequence.
            start = max(start, end)
        partitions[number] = AuditedPartition(
            row.subject,
            f"{row.name}@{broker_group}",
            first=max(start, coverage.first(number)),
            end=end,
            missing=coverage.missing(number, start, end),
            readable=0 if fail_on_damage else coverage.count(number, start),
            strict=row.settings.order == STRICT,
        )
    for group in known.values():
        group.learn_order(rows[group.partition].settings.order)
        if not from_zero and group.partition not in coverage.ranges:
            # The checkpoint may be older than some rows that have expired.
            group.reach = min(group.reach, partitions[group.partition].end)
    times = [*actions.times, *(time for number in rows for time in coverage.times.get(number, ()))]
    return LiveInput(
        place=path,
        wanted=wanted,
        fail_on_damage=fail_on_damage,
        partitions=partitions,
        rows=rows,
        groups=known,
        chunks=planned.chunks,
        parts=actions.parts,
        spans=actions.spans,
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
