"""Reading an action log that somebody else may be writing. Nothing is changed, locked or repaired.

Looking at it once decides which frames stand, as recovery would (``LogScan``): how far the log goes, and which bytes
before that are damage. Reading follows that decision, segment by segment, so that others can share the work: each
segment starts with all names (``head_frames``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from plait.errors import DamageError, DataDirError, FrameError
from plait.frame.header import PREFIX
from plait.frame.view import FrameView
from plait.storage.action_log import DIRECTORY
from plait.storage.disk import Disk, RealDisk
from plait.storage.reader import LOOKS_MAX, LogReader, MappedLog, MappedSegment, damage_error, expired_error
from plait.storage.recovery import Damage, LogScan

#: A part of one segment that one task reads comes to about this much.
PART_SIZE: Final = 32 << 20


@dataclass(frozen=True)
class ActionPart:
    """Frames of one segment: [start, end) in log offsets. What stands before ``start`` is read for its names."""

    segment: str
    base: int
    start: int
    end: int
    #: (log offset, size) of what is to be passed over.
    damages: tuple[tuple[int, int], ...] = ()
    #: Nothing stands before ``start`` that anybody has seen: names are news, too.
    first: bool = False


@dataclass(frozen=True)
class ActionPlan:
    """How far an action log goes, cut into parts in log order."""

    parts: list[ActionPart]
    #: Where it was read from, and where it ends.
    start: int
    end: int
    damages: list[Damage] = field(default_factory=list)


class ActionReader(LogReader):
    """The segments of an action log as they were when it was opened."""

    def look(
        self,
        start: int = 0,
        *,
        sealed: bool = False,
        message_end: int | None = None,
        part_size: int = PART_SIZE,
        fail_on_damage: bool = True,
    ) -> ActionPlan:
        """What there is from ``start`` on: all of it, or what is in segments that nothing is added to any more.

        Frames that rest on messages from ``message_end`` on, and what follows them, do not count: a server that
        starts on these files cuts them off.
        """
        for _ in range(LOOKS_MAX):
            segments, scan, cuts = self._scan(start)
            damages = [damage for damage in scan.damages if damage.kind == "damaged"]
            # What was being written when it was looked at is no damage: look again.
            if not any(_reads(segments, damage.offset) for damage in damages):
                break
        else:
            raise DataDirError(f"{self.place}/{self.directory} changes faster than it can be read; try again")
        end = scan.end
        if end < start:
            raise DataDirError(
                f"the action log of {self.place} ends at {end}, before {start}: it is not the log that was read before"
            )
        if message_end is not None:
            end = max(min([end, *(offset for offset, presumed in cuts if presumed > message_end)]), start)
        used = [segment for segment in segments if segment.base < end]
        if sealed:
            used = used[:-1]
            end = min(end, max(segments[len(used)].base if used else start, start))
        damages = [damage for damage in damages if damage.offset < end]
        if damages and fail_on_damage:
            damage = damages[0]
            holder = max((s for s in segments if s.base <= damage.offset), key=lambda s: s.base)
            raise damage_error(self.place, holder.path, damage.offset - holder.base, damage.size, damage.reason)
        return ActionPlan(self._parts(used, start, end, damages, part_size), start, end, damages)

    def _scan(self, start: int) -> tuple[list[MappedSegment], LogScan, list[tuple[int, int]]]:
        """Every frame from the segment that holds ``start`` on; also where they begin to presume more messages."""
        bases = [base for base, _ in self.files]
        first = max(bisect_right(bases, start) - 1, 0)
        mapped = [self.map(number) for number in range(first, len(self.files))]
        segments = [segment for segment in mapped if segment is not None and not segment.blank]
        known = self.checkpoint.manifest.action_offset if self.checkpoint is not None else 0
        begin = segments[0].base if segments else start
        scan = LogScan(MappedLog(self.place, segments), begin, max(known, begin), stamps_durable=False)
        cuts: list[tuple[int, int]] = []
        for offset, frame in scan:
            if not cuts or frame.durable > cuts[-1][1]:
                cuts.append((offset, frame.durable))
        return segments, scan, cuts

    def _parts(
        self, segments: list[MappedSegment], start: int, end: int, damages: list[Damage], part_size: int
    ) -> list[ActionPart]:
        parts: list[ActionPart] = []
        unseen = not start or _follows_unseen(segments, start)
        for segment, following in zip_longest(segments, segments[1:]):
            segment_end = min(end, following.base if following is not None else end)
            bad = tuple((d.offset, d.size) for d in damages if segment.base <= d.offset < segment_end)
            at = max(start, segment.base)
            while at < segment_end:
                until = self._cut(segment, at, min(at + part_size, segment_end), segment_end, dict(bad))
                parts.append(ActionPart(segment.path, segment.base, at, until, bad, not parts and unseen))
                at = until
        return parts

    def _cut(self, segment: MappedSegment, start: int, wanted: int, end: int, bad: dict[int, int]) -> int:
        """Where the first frame after ``wanted`` starts."""
        if wanted >= end:
            return end
        at = start
        while at < wanted:
            if at not in bad and not _is_used(segment.view, at - segment.base):
                return end
            at += bad[at] if at in bad else FrameView(segment.view, at - segment.base).size
        return min(at, end)


def open_actions(path: str) -> ActionReader:
    """The action log of a data directory; one without any events where there is none."""
    return ActionReader(RealDisk(path, read_only=True), DIRECTORY, path)


def read_actions(disk: Disk, place: str, part: ActionPart, *, alone: bool = False) -> Iterator[tuple[int, FrameView]]:
    """(log offset, verified frame) of a part, and, unless it is ``alone``, of what stands before it in its segment."""
    try:
        file = disk.open(part.segment)
    except FileNotFoundError:
        raise expired_error(place, part.segment) from None
    try:
        view = file.view()
    finally:
        file.close()
    bad = dict(part.damages)
    offset = part.start if alone else part.base
    while offset < part.end:
        size = bad.get(offset)
        if size is None:
            position = offset - part.base
            if not _is_used(view, position):
                return
            try:
                frame = FrameView(view, position).verify()
            except FrameError as error:
                raise DamageError(
                    f"{place}/{part.segment} has changed at offset {position} since it was looked at ({error}); "
                    "read again"
                ) from error
            yield offset, frame
            size = frame.size
        offset += size


def _follows_unseen(segments: list[MappedSegment], start: int) -> bool:
    """The first segment begins behind frames from ``start`` on that are gone."""
    if not segments or segments[0].base <= start:
        return False
    try:
        # What a segment begins with says where the one before ended.
        return FrameView(segments[0].view, 0).verify_stamp().previous > start
    except FrameError:
        return True


def _is_used(view: memoryview, position: int) -> bool:
    """A frame may stand here; otherwise the rest of the segment was never written."""
    return any(view[position : position + len(PREFIX)])


def _reads(segments: list[MappedSegment], offset: int) -> bool:
    for segment in segments:
        if segment.base <= offset < segment.end:
            try:
                return FrameView(segment.view, offset - segment.base).verify() is not None
            except FrameError:
                return False
    return False
