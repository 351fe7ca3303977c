"""Plans what is new in a data directory since it was last archived: tasks, in rounds that are committed one by one.

The files may be in use by a server. The intake makes them durable before tasks read them: otherwise a power loss could
remove rows from the log that are in the archive, and the log would give their sequences to other messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Final

import msgspec

from plait.errors import ArchiveError, DataDirError, FrameError
from plait.frame.header import HEADER_SIZE
from plait.frame.view import FrameView
from plait.limits import GIB, MIB
from plait.spark.archiving.archive_tasks import ActionTask, ArchiveTask, DeathTask, MessageTask, RawTask, TaskFacts
from plait.spark.archiving.manifest import (
    RAW,
    ArchivedGap,
    ArchivedSettings,
    ArchivedSource,
    FrameMark,
    LeftOut,
    PartitionLife,
    sync_directory,
)
from plait.storage.catalog import PartitionRow
from plait.storage.disk import RealDisk
from plait.storage.logs.recovery import Damage
from plait.storage.reading.action_reader import ActionReader, open_actions, open_retained
from plait.storage.reading.log_chunks import ChunkPlan, WantedRows, extend, logical_ends, note_epoch, plan
from plait.storage.reading.log_reader import LogReader, MappedSegment, expired_error, open_log

#: The size of the message log that is committed at once. It bounds the work that a run repeats after a crash.
ROUND_SIZE: Final = 8 * GIB
#: A smaller part of a log is not split between tasks: two small files cost readers more than a second core saves.
SHARE_SIZE_MIN: Final = 16 * MIB
#: The part of a retained log that one task reads. Small, because each row of the result repeats the reason of its
#: death, which may be long and shared by many short messages.
DEATHS_SIZE: Final = 8 * MIB


@dataclass(frozen=True)
class Round:
    """Tasks that are committed together, and the state of the source after them."""

    tasks: list[ArchiveTask]
    message_offset: int
    action_offset: int
    kept_offset: int
    damages: list[Damage] = field(default_factory=list)
    #: Ranges before this round that retention removed before they were archived.
    lost: list[Damage] = field(default_factory=list)
    #: The end of the message log that the archived events refer to.
    rests_on: int | None = None
    #: A frame of the message log, by which the next run recognizes the log; None: keep the mark of the run before.
    mark: FrameMark | None = None
    #: ``name@group`` → the settings of the partition, and those of deleted partitions with the same name.
    settings: dict[str, ArchivedSettings] = field(default_factory=dict)
    former: list[ArchivedSettings] = field(default_factory=list)


class Intake:
    """Plans the rounds that bring one archive up to date with a data directory."""

    def __init__(self, data: str, group: str, source: ArchivedSource, *, now: bool, fail_on_damage: bool) -> None:
        self._data = data
        self._group = group
        self._source = source
        self._now = now
        self._fail_on_damage = fail_on_damage

    # --- rows -----------------------------------------------------------------------------------

    def rounds(self, wanted: WantedRows, *, round_size: int = ROUND_SIZE) -> list[Round]:
        """Rounds for everything new: first the message log, then the events that refer to it and the deaths that these
        events record."""
        source, fail = self._source, self._fail_on_damage
        reader = open_log(self._data)
        self._check_mark(reader)
        sealed_end = _sealed_end(reader)
        reader.skip_before(source.message_offset)
        planned = plan(
            reader,
            wanted,
            chunks_min=_shares(reader, source.message_offset),
            fail_on_damage=fail,
            offsets=(source.message_offset, None if self._now else sealed_end),
            expired=True,
            may_be_empty=not source.subjects,
        )
        self._check_copy(reader, planned, source.message_offset)
        # After a torn tail there may be segments that a server removes when it starts.
        message_end = max(planned.end if self._now else min(sealed_end, planned.end), source.message_offset)
        # Before the action log: events that refer to a later part of the retained log come with the next run.
        kept = open_retained(self._data)
        kept_plan = kept.look(source.kept_offset, part_size=DEATHS_SIZE, fail_on_damage=fail)
        actions = open_actions(self._data)
        action_plan = actions.look(
            source.action_offset,
            closed_only=not self._now,
            message_end=planned.end,
            retained_end=kept_plan.end,
            fail_on_damage=fail,
        )
        # Deaths are archived up to the last one that an archived event records, whether their segment is full or not.
        kept_end = max(min(action_plan.retained_end, kept_plan.end), source.kept_offset)
        self._make_durable(reader, source.message_offset, message_end)
        self._make_durable(kept, source.kept_offset, kept_end)
        self._make_durable(actions, source.action_offset, action_plan.end)
        messages = [
            MessageTask(self._data, self._group, chunk, _base_of(chunk.segment), wanted, fail)
            for chunk in planned.chunks
        ]
        rounds = self._rounds_of(messages, message_end, round_size)
        slim = {row.id: PartitionRow(row.id, row.subject, row.name, 0) for row in planned.partitions.values()}
        events: list[ArchiveTask] = [ActionTask(self._data, self._group, part, slim) for part in action_plan.parts]
        events += [
            DeathTask(self._data, self._group, replace(part, end=min(part.end, kept_end)), slim, actions.groups, wanted)
            for part in kept_plan.parts
            if part.start < kept_end
        ]
        begun = source.message_offset
        for number, each in enumerate(rounds):
            found = [damage for damage in planned.damages if begun <= damage.offset < each.message_offset]
            rounds[number] = replace(each, damages=_of_log("message", found))
            begun = each.message_offset
        last = rounds[-1]
        damages = last.damages + _of_log("action", action_plan.damages)
        damages += _of_log("kept", [damage for damage in kept_plan.damages if damage.offset < kept_end])
        rests_on = max(action_plan.message_end, source.rests_on or 0)
        tasks = [*last.tasks, *events]
        mark = _mark(reader, planned.last)
        rounds[-1] = Round(tasks, message_end, action_plan.end, kept_end, damages, rests_on=rests_on, mark=mark)
        # Lost ranges lie before the first round.
        lost = self._lost(reader, "message", source.message_offset)
        lost += self._lost(actions, "action", source.action_offset)
        lost += self._lost(kept, "kept", source.kept_offset)
        rounds[0] = replace(rounds[0], lost=lost)
        reached = (source.message_offset, source.action_offset, source.kept_offset)
        if not rounds[-1].tasks and (message_end, action_plan.end, kept_end) == reached:
            rounds.pop()
        is_whole = _is_whole(source, reader, lost)
        for number, each in enumerate(rounds, 1):
            # A checkpoint covers rows that a later round or, without ``now``, a later run archives.
            nexts = logical_ends(reader.checkpoint) if self._now and number == len(rounds) else {}
            settings, former = self._settings(wanted, planned, nexts, is_whole)
            rounds[number - 1] = replace(each, settings=settings, former=former)
        return rounds

    def _settings(
        self, wanted: WantedRows, planned: ChunkPlan, nexts: Mapping[int, int], is_whole: Callable[[str, int], bool]
    ) -> tuple[dict[str, ArchivedSettings], list[ArchivedSettings]]:
        """The settings of all current partitions, and of deleted ones that have archived rows."""
        archived = {life.number for lives in self._source.lives.values() for life in lives}
        known = dict(self._source.settings)
        former = {settings.number: settings for settings in self._source.former}
        # A partition that was created again has a higher id than the deleted one.
        for row in sorted(planned.partitions.values(), key=lambda row: row.id):
            if not wanted.covers(row):
                continue
            name = f"{row.name}@{self._group}"
            before = known.get(name)
            if before is not None and before.number != row.id and before.number in archived:
                former[before.number] = msgspec.structs.replace(before, deleted=True)
            begun = before.next if before is not None and before.number == row.id else 0
            # The last messages of a deleted partition may be in no archive.
            reached = 0 if row.deleted else nexts.get(row.id, 0)
            known[name] = ArchivedSettings(
                row.settings.order,
                row.created,
                row.deleted,
                row.taken,
                row.fences,
                number=row.id,
                subject=row.subject,
                whole=is_whole(name, row.id),
                next=max(reached, begun),
            )
        now = {settings.number for settings in known.values()}
        return known, [settings for number, settings in sorted(former.items()) if number not in now]

    def _rounds_of(self, tasks: list[MessageTask], end: int, round_size: int) -> list[Round]:
        """Rounds of whole segments; a round ends where the first segment of the next round starts."""
        rounds: list[Round] = []
        taken: list[ArchiveTask] = []
        size = base = 0
        for task in tasks:
            if taken and task.base != base and size >= round_size:
                rounds.append(Round(taken, task.base, self._source.action_offset, self._source.kept_offset))
                taken, size = [], 0
            taken.append(task)
            size += task.weight
            base = task.base
        rounds.append(Round(taken, end, self._source.action_offset, self._source.kept_offset))
        return rounds

    def _lost(self, reader: LogReader, log: str, begun: int) -> list[Damage]:
        """The range that retention removed before it was archived; the archive has the log up to ``begun``."""
        segment = _first(reader)
        if not begun or segment is None or segment.base <= begun:
            return []
        try:
            ended = FrameView(segment.view, 0).verify_stamp().previous
        except FrameError:
            ended = 0
        if 0 < ended <= begun:
            # The removed segment ended before ``begun``: all of it is archived.
            return []
        reason = "retention removed it before it was archived"
        return [Damage(log, begun, segment.base - begun, "damaged", reason)]

    def _check_copy(self, reader: LogReader, planned: ChunkPlan, archived: int) -> None:
        """Check that the log is the one that was archived: it continues at the offset where the archive ends."""
        older = "older copy of the data directory that was archived. Use the newest one, or another archive"
        if planned.end < archived:
            raise DataDirError(
                f"the message log of {self._data} ends at offset {planned.end}, and the archive has it up to "
                f"{archived}: this is an {older}"
            )
        first = _first(reader)
        if planned.meets_start or archived in (0, planned.end) or first is None or first.base > archived:
            return
        if any(damage.offset <= archived <= damage.offset + damage.size for damage in planned.damages):
            return
        raise DataDirError(
            f"the message log of {self._data} has no frame at offset {archived}, where the archive ends: it continued "
            f"from an {older}"
        )

    def _check_mark(self, reader: LogReader) -> None:
        """Check that the log has the frame of the mark of the last run, unless that frame is gone or damaged."""
        known = self._source.mark
        found = None if known is None else _mark(reader, known.offset)
        if known is not None and found is not None and found != known:
            raise DataDirError(
                f"the message log of {self._data} has another frame at offset {known.offset} than the log that was "
                "archived: it is another log, or continued from an older copy of that data directory. Use the one that "
                "was archived, or another archive"
            )

    # --- whole segments -------------------------------------------------------------------------

    def raw_rounds(self, source_name: str) -> list[Round]:
        """Rounds for the complete segments that are not copied yet."""
        source = self._source
        message, kept, action = open_log(self._data), open_retained(self._data), open_actions(self._data)
        self._check_mark(message)
        sealed_end = _sealed_end(message)
        message.skip_before(source.raw_message_offset)
        fail = self._fail_on_damage
        there = (source.raw_message_offset, sealed_end)
        planned = plan(message, WantedRows(), fail_on_damage=fail, offsets=there, expired=True, may_be_empty=True)
        self._check_copy(message, planned, source.raw_message_offset)
        kept_end = kept.look(source.raw_kept_offset, closed_only=True, fail_on_damage=fail).end
        looked = action.look(source.raw_action_offset, closed_only=True, message_end=planned.end, fail_on_damage=fail)
        tasks: list[ArchiveTask] = []
        ends = []
        for reader, start, found in (
            (message, source.raw_message_offset, min(sealed_end, planned.end)),
            (action, source.raw_action_offset, looked.end),
            (kept, source.raw_kept_offset, kept_end),
        ):
            # Whole segments only: a segment that a server truncates when it starts is not complete.
            end = max(max((base for base, _ in reader.files if base <= found), default=0), start)
            self._make_durable(reader, start, end)
            bases = [base for base, _ in reader.files if base <= end]
            for (base, path), following in zip(reader.files, [*bases[1:], end], strict=False):
                if start <= base < end:
                    target = f"{RAW}/{source_name}/{path}"
                    tasks.append(RawTask(self._data, path, base, following, target, self._fail_on_damage))
            ends.append(end)
        return [Round(tasks, ends[0], ends[1], ends[2], mark=_mark(message, planned.last))] if tasks else []

    # --- both -----------------------------------------------------------------------------------

    def _make_durable(self, reader: LogReader, start: int, end: int) -> None:
        for (base, path), following in zip_longest(reader.files, reader.files[1:]):
            # Also the next segment: if its first frame were lost, the log would continue before ``end``.
            if base <= end and (following is None or following[0] > start):
                try:
                    file = RealDisk(self._data, read_only=True).open(path)
                except FileNotFoundError:
                    raise expired_error(self._data, path) from None
                try:
                    file.sync()
                finally:
                    file.close()
        if start < end:
            sync_directory(os.path.join(self._data, reader.directory))


def settle(source: ArchivedSource, done: Round, facts: Iterable[TaskFacts], group: str) -> ArchivedSource:
    """The source after a round: its offsets, gaps and left-out ranges. Raises ``ArchiveError`` where rows are missing
    that the frame headers of the log announce, unless damage is to be skipped."""
    lives = dict(source.lives)
    gaps = list(source.gaps)
    left_out = [*source.left_out, *(LeftOut(d.log, d.offset, d.size, d.reason) for d in done.lost + done.damages)]
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
                    gaps.append(ArchivedGap(name, life.end, pieces[0][0], expired=name in overtaken, number=number))
            elif pieces[0][0] and name in done.settings and done.settings[name].whole:
                gaps.append(ArchivedGap(name, 0, pieces[0][0], number=number))
            overtaken.discard(name)
            gaps += [ArchivedGap(name, end, first, number=number) for (_, end), (first, _) in pairwise(pieces)]
            lives[name] = [*known, _grown(life, pieces, task.chunk.epochs[number])]
    return msgspec.structs.replace(
        source,
        message_offset=done.message_offset,
        action_offset=done.action_offset,
        lives=lives,
        gaps=gaps,
        left_out=left_out,
        overtaken=sorted(overtaken),
        kept_offset=done.kept_offset,
        rests_on=source.rests_on if done.rests_on is None else done.rests_on,
        settings=done.settings,
        former=done.former,
        mark=done.mark or source.mark,
    )


def _written(planned: Sequence[tuple[int, int]], written: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The written ranges of the planned ones, which may lack frames that do not verify. Start and end are those of the
    plan: an empty range takes the place of a frame that was left out there."""
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


def _is_whole(source: ArchivedSource, reader: LogReader, lost: list[Damage]) -> Callable[[str, int], bool]:
    """Returns a function that says, by name and number, whether nothing of a partition was removed before it was
    archived."""
    first = _first(reader)
    from_start = first is not None and first.base == 0
    overtaken = any(each.log == "message" for each in lost)

    def is_whole(name: str, number: int) -> bool:
        if not source.message_offset:
            return from_start
        known = source.settings.get(name)
        if known is not None and known.number in (0, number):
            return known.whole and not overtaken
        # The partition was created since the last run, which recorded all partitions.
        return bool(source.settings) and not overtaken

    return is_whole


def _mark(reader: LogReader, offset: int) -> FrameMark | None:
    """The mark of the frame at an offset; None: the frame is gone or does not verify."""
    index = reader.index_of(offset)
    segment = reader.map(index) if reader.files else None
    if segment is None or not segment.base <= offset <= segment.end - HEADER_SIZE:
        return None
    try:
        frame = FrameView(segment.view, offset - segment.base).verify_stamp()
        frame.verify()
    except FrameError:
        return None
    return FrameMark(offset=offset, stamp_crc=frame.stamp_crc, crc=frame.crc)


def _of_log(log: str, damages: list[Damage]) -> list[Damage]:
    """Damages with the name of the log, as in the manifest, instead of the path that a scan gives."""
    return [msgspec.structs.replace(damage, log=log) for damage in damages]


def _first(reader: LogReader) -> MappedSegment | None:
    """The oldest segment. Some may have been removed since they were listed."""
    segments = (reader.map(index) for index in range(len(reader.files)))
    return next((segment for segment in segments if segment is not None), None)


def _shares(reader: LogReader, start: int) -> int:
    """The minimum number of tasks for the log after ``start``: one per core, unless that makes files too small."""
    last = reader.map(len(reader.files) - 1) if reader.files else None
    size = last.end - start if last is not None else 0
    return min(max(size // SHARE_SIZE_MIN, 1), os.cpu_count() or 1)


def _sealed_end(reader: LogReader | ActionReader) -> int:
    """The offset of the segment that frames are appended to."""
    for index in range(len(reader.files) - 1, -1, -1):
        segment = reader.map(index)
        if segment is not None and not segment.blank:
            return segment.base
    return 0


def _base_of(segment: str) -> int:
    return int(segment.rpartition("/")[2].partition(".")[0])
