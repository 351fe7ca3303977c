"""A round of an archiver: tasks that are committed together, and what the source is after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from plait.errors import ArchiveError
from plait.spark.archiving.archive_tasks import ArchiveTask, MessageTask, TaskFacts
from plait.spark.archiving.manifest import (
    ArchivedGap,
    ArchivedSettings,
    ArchivedSource,
    FrameMark,
    LeftOut,
    PartitionLife,
)
from plait.storage.reading.log_chunks import extend, note_epoch


@dataclass
class Round:
    """Tasks that are committed together, and the state of the source after them."""

    tasks: list[ArchiveTask]
    message_offset: int
    action_offset: int
    retained_offset: int
    damages: list[LeftOut] = field(default_factory=list)
    #: Ranges before this round that retention removed before they were archived.
    lost: list[LeftOut] = field(default_factory=list)
    #: The end of the message log that the archived events refer to.
    rests_on: int = 0
    #: A frame of the message log, by which the next run recognizes the log; None: keep the mark of the run before.
    mark: FrameMark | None = None
    #: ``name@group`` → the settings of the partition, and those of deleted partitions with the same name.
    settings: dict[str, ArchivedSettings] = field(default_factory=dict)
    former: list[ArchivedSettings] = field(default_factory=list)


def copied(source: ArchivedSource, done: Round, facts: list[TaskFacts]) -> ArchivedSource:
    """The source after a round of segments."""
    segments = [segment for fact in facts for segment in fact.raw]
    return msgspec.structs.replace(
        source,
        raw_message_offset=done.message_offset,
        mark=done.mark or source.mark,
        raw_action_offset=done.action_offset,
        raw_retained_offset=done.retained_offset,
        raw=[*source.raw, *segments],
    )


def settled(source: ArchivedSource, done: Round, facts: Iterable[TaskFacts], group: str) -> ArchivedSource:
    """The source after a round of rows: its offsets, gaps and left-out ranges. Raises ``ArchiveError`` where rows are
    missing that the frame headers of the log announce, unless damage is to be skipped."""
    lives = dict(source.lives)
    gaps = list(source.gaps)
    left_out = [*source.left_out, *done.lost, *done.damages]
    overtaken = set(source.overtaken)
    if any(lost.log == "message" for lost in done.lost):
        overtaken.update(lives)
    for task, fact in zip(done.tasks, facts, strict=True):
        if not isinstance(task, MessageTask):
            continue
        for name, expected in task.expected().items():
            missing = expected - fact.counts.get(name, 0)
            if missing and (task.fail_on_damage or missing < 0):
                raise ArchiveError(
                    f"{task.data}/{task.chunk.segment} has {expected} messages of {name} by its frame headers, and "
                    f"{expected - missing} were archived; nothing was committed. Run 'plait doctor {task.data}'"
                )
            if missing:
                reason = f"{missing} messages of {name} do not verify"
                offset = task.base + task.chunk.start
                left_out.append(LeftOut("message", offset, task.chunk.end - task.chunk.start, reason))
        for number, planned in task.chunk.ranges.items():
            pieces = _written(planned, fact.ranges.get(number, []))
            name = f"{task.chunk.partitions[number].name}@{group}"
            life = PartitionLife(number=number, offset=source.message_offset, ranges=[], epochs=[])
            known = lives.get(name, [])
            if known and known[-1].number == number:
                known, life = known[:-1], known[-1]
                if life.end < pieces[0][0]:
                    gaps.append(ArchivedGap(name, number, life.end, pieces[0][0], name in overtaken))
            elif pieces[0][0] and name in done.settings and done.settings[name].whole:
                gaps.append(ArchivedGap(name, number, 0, pieces[0][0]))
            overtaken.discard(name)
            gaps += [ArchivedGap(name, number, end, first) for (_, end), (first, _) in pairwise(pieces)]
            lives[name] = [*known, _grown(life, pieces, task.chunk.epochs[number])]
    return msgspec.structs.replace(
        source,
        message_offset=done.message_offset,
        action_offset=done.action_offset,
        lives=lives,
        gaps=gaps,
        left_out=left_out,
        overtaken=sorted(overtaken),
        retained_offset=done.retained_offset,
        rests_on=done.rests_on,
        settings=done.settings,
        former=done.former,
        mark=done.mark or source.mark,
    )


def _written(planned: Sequence[tuple[int, int]], written: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges that were written. They lack frames that do not verify, but start and end where the planned ranges do:
    if the first or the last frame was left out, an empty range takes its place."""
    pieces = list(written)
    if not pieces or pieces[0][0] > planned[0][0]:
        pieces.insert(0, (planned[0][0], planned[0][0]))
    if pieces[-1][1] < planned[-1][1]:
        pieces.append((planned[-1][1], planned[-1][1]))
    return pieces


def _grown(life: PartitionLife, pieces: Sequence[tuple[int, int]], epochs: Sequence[tuple[int, int]]) -> PartitionLife:
    """The life with the sequences of one more chunk."""
    ranges, changes = list(life.ranges), list(life.epochs)
    for first, end in pieces:
        extend(ranges, first, end)
    for first, epoch in epochs:
        note_epoch(changes, first, epoch)
    return msgspec.structs.replace(life, ranges=ranges, epochs=changes)
