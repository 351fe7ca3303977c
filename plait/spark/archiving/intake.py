"""Plans what is new in a data directory since it was last archived: tasks, in rounds that are committed one by one.

The files may be in use by a server. The intake makes them durable before tasks read them: otherwise a power loss could
remove rows from the log that are in the archive, and the log would give their sequences to other messages.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import zip_longest
from typing import Final

import msgspec

from plait.errors import DataDirError, FrameError
from plait.frame.header import HEADER_SIZE
from plait.frame.view import FrameView
from plait.limits import GIB, MIB
from plait.spark.archiving.archive_files import sync_path
from plait.spark.archiving.archive_round import Round
from plait.spark.archiving.archive_tasks import ArchiveTask, EventTask, MessageTask, RawTask
from plait.spark.archiving.manifest import (
    ACTIONS,
    DEATHS,
    RAW,
    ArchivedSettings,
    ArchivedSource,
    FrameMark,
    LeftOut,
)
from plait.storage.catalog import PartitionRow
from plait.storage.logs.recovery import Damage
from plait.storage.reading.action_reader import ActionReader, open_actions, open_retained
from plait.storage.reading.log_chunks import ChunkPlan, WantedRows, logical_ends, plan
from plait.storage.reading.log_reader import LogReader, MappedSegment, expired_error, open_log

#: The size of the message log that is committed at once. It bounds the work that a run repeats after a crash.
ROUND_SIZE: Final = 8 * GIB
#: A smaller part of a log is not split between tasks: two small files cost readers more than a second core saves.
SHARE_SIZE_MIN: Final = 16 * MIB
#: The part of a retained log that one task reads. Small, because each row of the result repeats the reason of its
#: death, which may be long and shared by many short messages.
DEATHS_SIZE: Final = 8 * MIB


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
        source, fail, reader = self._source, self._fail_on_damage, open_log(self._data)
        sealed_end = _sealed_end(reader)
        planned = self._plan(reader, wanted, source.message_offset, None if self._now else sealed_end)
        # After a torn tail there may be segments that a server removes when it starts.
        message_end = max(planned.end if self._now else min(sealed_end, planned.end), source.message_offset)
        # Before the action log: events that refer to a later part of the retained log come with the next run.
        kept = open_retained(self._data)
        kept_plan = kept.look(source.retained_offset, part_size=DEATHS_SIZE, fail_on_damage=fail)
        actions = open_actions(self._data)
        action_plan = actions.look(
            source.action_offset,
            closed_only=not self._now,
            message_end=planned.end,
            retained_end=kept_plan.end,
            fail_on_damage=fail,
        )
        # Deaths are archived up to the last one that an archived event records, whether their segment is full or not.
        retained_end = max(min(action_plan.retained_end, kept_plan.end), source.retained_offset)
        self._make_durable(reader, source.message_offset, message_end)
        self._make_durable(kept, source.retained_offset, retained_end)
        self._make_durable(actions, source.action_offset, action_plan.end)
        rounds = self._rounds_of(planned, wanted, message_end, round_size)
        last = rounds[-1]
        slim = {row.id: PartitionRow(row.id, row.subject, row.name, 0) for row in planned.partitions.values()}
        last.tasks += [EventTask(ACTIONS, self._data, self._group, part, slim, wanted) for part in action_plan.parts]
        deaths = [
            replace(part, end=min(part.end, retained_end)) for part in kept_plan.parts if part.start < retained_end
        ]
        last.tasks += [
            EventTask(DEATHS, self._data, self._group, part, slim, wanted, actions.groups) for part in deaths
        ]
        last.action_offset, last.retained_offset = action_plan.end, retained_end
        last.damages += _left_out("action", action_plan.damages)
        last.damages += _left_out("retained", [damage for damage in kept_plan.damages if damage.offset < retained_end])
        last.rests_on = max(action_plan.message_end, source.rests_on)
        last.mark = _mark(reader, planned.last)
        # Lost ranges lie before the first round.
        rounds[0].lost = [
            *_lost(reader, "message", source.message_offset),
            *_lost(actions, "action", source.action_offset),
            *_lost(kept, "retained", source.retained_offset),
        ]
        reached = (source.message_offset, source.action_offset, source.retained_offset)
        if not last.tasks and (message_end, action_plan.end, retained_end) == reached:
            rounds.pop()
        for each in rounds:
            self._describe(each, wanted, planned, reader, last=each is last)
        return rounds

    def _plan(self, reader: LogReader, wanted: WantedRows, start: int, end: int | None) -> ChunkPlan:
        """Plan the message log between two offsets, and check that it is the log that was archived."""
        known = self._source.mark
        # The frame of the mark may be gone or damaged.
        if known is not None and _mark(reader, known.offset) not in (None, known):
            raise DataDirError(
                f"the message log of {self._data} has another frame at offset {known.offset} than the log that was "
                "archived: it is another log, or continued from an older copy of that data directory. Use the one that "
                "was archived, or another archive"
            )
        reader.skip_before(start)
        planned = plan(
            reader,
            wanted,
            chunks_min=_shares(reader, start),
            fail_on_damage=self._fail_on_damage,
            offsets=(start, end),
            expired=True,
            may_be_empty=not self._source.subjects,
        )
        self._check_copy(reader, planned, start)
        return planned

    def _describe(self, done: Round, wanted: WantedRows, planned: ChunkPlan, reader: LogReader, *, last: bool) -> None:
        """Set the settings of all current partitions, and of deleted ones that have archived rows."""
        source = self._source
        first = _first(reader)
        overtaken = bool(_lost(reader, "message", source.message_offset))
        # A checkpoint covers rows that a later round or, without ``now``, a later run archives.
        nexts = logical_ends(reader.checkpoint) if self._now and last else {}
        archived = {life.number for lives in source.lives.values() for life in lives}
        known = dict(source.settings)
        former = {settings.number: settings for settings in source.former}
        # A partition that was created again has a higher id than the deleted one.
        for row in sorted(planned.partitions.values(), key=lambda row: row.id):
            if not wanted.covers(row):
                continue
            name = f"{row.name}@{self._group}"
            replaced = known.get(name)
            if replaced is not None and replaced.number != row.id and replaced.number in archived:
                former[replaced.number] = msgspec.structs.replace(replaced, deleted=True)
            before = source.settings.get(name)
            if before is not None and before.number != row.id:
                before = None
            if source.message_offset:
                # Another partition was created since the last run, which recorded all partitions.
                whole = not overtaken and (before is None or before.whole)
            else:
                whole = first is not None and first.base == 0
            known[name] = ArchivedSettings(
                number=row.id,
                subject=row.subject,
                order=row.settings.order,
                created=row.created,
                deleted=row.deleted,
                taken=row.taken,
                fences=row.fences,
                whole=whole,
                # The last messages of a deleted partition may be in no archive.
                next=max(0 if row.deleted else nexts.get(row.id, 0), 0 if before is None else before.next),
            )
        now = {settings.number for settings in known.values()}
        done.settings = known
        done.former = [settings for number, settings in sorted(former.items()) if number not in now]

    def _rounds_of(self, planned: ChunkPlan, wanted: WantedRows, end: int, round_size: int) -> list[Round]:
        """Rounds of whole segments; a round ends where the first segment of the next round starts."""
        source = self._source
        rounds: list[Round] = []
        taken: list[ArchiveTask] = []
        size = base = 0
        for chunk in planned.chunks:
            base_of_chunk = int(chunk.segment.rpartition("/")[2].partition(".")[0])
            task = MessageTask(self._data, self._group, chunk, base_of_chunk, wanted, self._fail_on_damage)
            if taken and task.base != base and size >= round_size:
                rounds.append(Round(taken, task.base, source.action_offset, source.retained_offset))
                taken, size = [], 0
            taken.append(task)
            size += task.weight
            base = task.base
        rounds.append(Round(taken, end, source.action_offset, source.retained_offset))
        begun = source.message_offset
        for each in rounds:
            found = [damage for damage in planned.damages if begun <= damage.offset < each.message_offset]
            each.damages = _left_out("message", found)
            each.rests_on = source.rests_on
            begun = each.message_offset
        return rounds

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

    # --- whole segments -------------------------------------------------------------------------

    def raw_rounds(self, source_name: str) -> list[Round]:
        """Rounds for the complete segments that are not copied yet."""
        source, fail = self._source, self._fail_on_damage
        message, kept, action = open_log(self._data), open_retained(self._data), open_actions(self._data)
        sealed_end = _sealed_end(message)
        planned = self._plan(message, WantedRows(), source.raw_message_offset, sealed_end)
        retained_end = kept.look(source.raw_retained_offset, closed_only=True, fail_on_damage=fail).end
        looked = action.look(source.raw_action_offset, closed_only=True, message_end=planned.end, fail_on_damage=fail)
        tasks: list[ArchiveTask] = []
        ends = []
        for reader, start, found in (
            (message, source.raw_message_offset, min(sealed_end, planned.end)),
            (action, source.raw_action_offset, looked.end),
            (kept, source.raw_retained_offset, retained_end),
        ):
            # Whole segments only: a segment that a server truncates when it starts is not complete.
            end = max(max((base for base, _ in reader.files if base <= found), default=0), start)
            self._make_durable(reader, start, end)
            bases = [base for base, _ in reader.files if base <= end]
            for (base, path), following in zip(reader.files, [*bases[1:], end], strict=False):
                if start <= base < end:
                    tasks.append(RawTask(self._data, path, base, following, f"{RAW}/{source_name}/{path}", fail))
            ends.append(end)
        return [Round(tasks, ends[0], ends[1], ends[2], mark=_mark(message, planned.last))] if tasks else []

    # --- both -----------------------------------------------------------------------------------

    def _make_durable(self, reader: LogReader, start: int, end: int) -> None:
        for (base, path), following in zip_longest(reader.files, reader.files[1:]):
            # Also the next segment: if its first frame were lost, the log would continue before ``end``.
            if base <= end and (following is None or following[0] > start):
                try:
                    sync_path(os.path.join(self._data, path))
                except FileNotFoundError:
                    raise expired_error(self._data, path) from None
        if start < end:
            sync_path(os.path.join(self._data, reader.directory))


def _mark(reader: LogReader, offset: int) -> FrameMark | None:
    """The mark of the frame at an offset; None: the frame is gone or does not verify."""
    segment = reader.map(reader.index_of(offset)) if reader.files else None
    if segment is None or not segment.base <= offset <= segment.end - HEADER_SIZE:
        return None
    try:
        frame = FrameView(segment.view, offset - segment.base).verify_stamp()
        frame.verify()
    except FrameError:
        return None
    return FrameMark(offset=offset, stamp_crc=frame.stamp_crc, crc=frame.crc)


def _lost(reader: LogReader, log: str, begun: int) -> list[LeftOut]:
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
    return [LeftOut(log, begun, segment.base - begun, "retention removed it before it was archived")]


def _left_out(log: str, damages: list[Damage]) -> list[LeftOut]:
    return [LeftOut(log, damage.offset, damage.size, damage.reason) for damage in damages]


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
