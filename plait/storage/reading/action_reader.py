"""Reading an action log or a retained log that another process may be writing. Nothing is changed, locked or repaired.

``look`` decides once, as recovery would (``LogScan``), which frames are valid, where the log ends, and which bytes
before that are damage. The result is a plan of parts that several tasks can read: each part lies in one segment, and a
segment starts with the definitions of all names (``encode_definitions``).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, TypeAlias

import msgspec

from plait.errors import DamageError, DataDirError, FrameError
from plait.frame.header import PREFIX
from plait.frame.view import FrameView
from plait.storage.disk import Disk, RealDisk
from plait.storage.logs.action_log import (
    DEFINITIONS,
    DIRECTORY,
    EVENTS,
    GroupDefinition,
    presumed_retained,
    read_definitions,
)
from plait.storage.logs.recovery import Damage, LogScan
from plait.storage.logs.retained_log import DIRECTORY as RETAINED_DIRECTORY
from plait.storage.reading.log_reader import LOOKS_MAX, LogReader, MappedLog, MappedSegment, map_segment

#: The approximate size of a part: what one task reads of one segment.
PART_SIZE: Final = 32 << 20


@dataclass(frozen=True)
class ActionPart:
    """Frames of one segment: [start, end) in log offsets. Of the frames before ``start``, only definitions are used."""

    segment: str
    base: int
    start: int
    end: int
    #: (log offset, size) of the damaged bytes, which are skipped.
    damages: tuple[tuple[int, int], ...] = ()
    #: True if no earlier part of the segment was read: the definitions before ``start`` are new too.
    first: bool = False


@dataclass(frozen=True)
class ActionPlan:
    """An action log up to its end, cut into parts in log order."""

    parts: list[ActionPart]
    #: The log offsets that the plan covers.
    start: int
    end: int
    damages: list[Damage] = field(default_factory=list)
    #: The offsets up to which the frames depend on the message log and on the retained log.
    message_end: int = 0
    retained_end: int = 0


#: (offset, message end, retained end): frames from ``offset`` on depend on the message log and on the retained log up
#: to these ends.
Presumed: TypeAlias = tuple[int, int, int]


class ActionReader(LogReader):
    """The segments of an action log or of a retained log, as of opening it."""

    def __init__(self, disk: Disk, directory: str, place: str = "") -> None:
        super().__init__(disk, directory, place)
        #: Group id → the definition found by ``look``.
        self.groups: dict[int, GroupDefinition] = {}

    def look(
        self,
        start: int = 0,
        *,
        closed_only: bool = False,
        message_end: int | None = None,
        retained_end: int | None = None,
        part_size: int = PART_SIZE,
        fail_on_damage: bool = True,
    ) -> ActionPlan:
        """Plan to read the log from ``start``; with ``closed_only`` without the segment that the broker appends to.

        The plan ends before the first frame that depends on the message log beyond ``message_end``, or on the retained
        log beyond ``retained_end``. A server that starts on these files cuts off that frame too.
        """
        for _ in range(LOOKS_MAX):
            log = self.mapped(start)
            frames, presumed, scan = self._scan(log, start)
            damages, being_written = log.damages(scan)
            if not being_written:
                break
        else:
            raise DataDirError(f"{self.place}/{self.directory} changes faster than it can be read; try again")
        end = scan.end
        if end < start:
            raise DataDirError(
                f"{self.place}/{self.directory} ends at {end}, before {start}: it is not the log that was read before"
            )
        for offset, messages, retained in presumed:
            if (message_end is not None and messages > message_end) or (
                retained_end is not None and retained > retained_end
            ):
                end = max(min(end, offset), start)
                break
        used = [segment for segment in log.segments if segment.base < end]
        if closed_only:
            used = used[:-1]
            end = min(end, max(log.segments[len(used)].base if used else start, start))
        damages = [damage for damage in damages if damage.offset < end]
        if damages and fail_on_damage:
            raise log.error(damages[0])
        parts = _parts(used, frames, start, end, damages, part_size)
        depends_on = max((each[1:] for each in presumed if each[0] < end), default=(0, 0))
        return ActionPlan(parts, start, end, damages, *depends_on)

    def _scan(self, log: MappedLog, start: int) -> tuple[list[int], list[Presumed], LogScan]:
        """Scan a log. Returns the offsets of its frames, a ``Presumed`` wherever its ends grow, and the scan."""
        begin = log.segments[0].base if log.segments else start
        manifest = self.checkpoint.manifest if self.checkpoint is not None else None
        known = 0 if manifest is None else manifest.action_end if self._has_actions else manifest.retained_end
        scan = LogScan(log, begin, max(known, begin), stamps_durable=False)
        frames: list[int] = []
        presumed: list[Presumed] = []
        messages = retained = -1
        for offset, frame in scan:
            frames.append(offset)
            more = self._presumes(frame)
            if more[0] > messages or more[1] > retained:
                messages, retained = max(more[0], messages), max(more[1], retained)
                presumed.append((offset, messages, retained))
        return frames, presumed, scan

    @property
    def _has_actions(self) -> bool:
        return self.directory == DIRECTORY

    def _presumes(self, frame: FrameView) -> tuple[int, int]:
        """The message-log and retained-log offsets up to which a frame depends on them. Records group definitions."""
        if not self._has_actions:
            # A copy of rows is complete in itself. The action log decides whether it is needed.
            return 0, 0
        if frame.partition == DEFINITIONS:
            # A frame that does not decode is reported as damage when it is read.
            with contextlib.suppress(msgspec.MsgspecError):
                named = read_definitions(frame)
                self.groups |= {each.id: each for each in named if isinstance(each, GroupDefinition)}
        return frame.durable, presumed_retained(frame) if frame.partition == EVENTS else 0


def _parts(
    segments: list[MappedSegment], frames: list[int], start: int, end: int, damages: list[Damage], part_size: int
) -> list[ActionPart]:
    """Cut [start, end) at frames; a part has about ``part_size`` bytes of one segment."""
    parts: list[ActionPart] = []
    unseen = not start or _follows_unseen(segments, start)
    for segment, following in zip_longest(segments, segments[1:]):
        segment_end = min(end, following.base if following is not None else end)
        bad = tuple((d.offset, d.size) for d in damages if segment.base <= d.offset < segment_end)
        at = max(start, segment.base)
        while at < segment_end:
            index = bisect_left(frames, at + part_size)
            until = min(frames[index] if index < len(frames) else segment_end, segment_end)
            parts.append(ActionPart(segment.path, segment.base, at, until, bad, not parts and unseen))
            at = until
    return parts


def open_actions(path: str) -> ActionReader:
    """The action log of a data directory; empty if the directory has none."""
    return ActionReader(RealDisk(path, read_only=True), DIRECTORY, path)


def open_retained(path: str) -> ActionReader:
    """The retained log of a data directory; empty if the directory has none. Its frames depend on no other log."""
    return ActionReader(RealDisk(path, read_only=True), RETAINED_DIRECTORY, path)


def read_actions(disk: Disk, place: str, part: ActionPart, *, alone: bool = False) -> Iterator[tuple[int, FrameView]]:
    """(log offset, verified frame) of a part; unless ``alone``, also of the frames before it in its segment."""
    view = map_segment(disk, place, part.segment)
    bad = dict(part.damages)
    offset = part.start if alone else part.base
    while offset < part.end:
        size = bad.get(offset)
        if size is None:
            position = offset - part.base
            if not any(view[position : position + len(PREFIX)]):
                # The rest of the segment was never written.
                return
            try:
                frame = FrameView(view, position).verify()
            except FrameError as error:
                raise DamageError(
                    f"{place}/{part.segment} has changed at offset {position} since it was planned ({error}); "
                    "read again"
                ) from error
            yield offset, frame
            size = frame.size
        offset += size


def _follows_unseen(segments: list[MappedSegment], start: int) -> bool:
    """True if frames between ``start`` and the first segment were removed."""
    if not segments or segments[0].base <= start:
        return False
    try:
        # The segment header names the end of the segment before.
        return FrameView(segments[0].view, 0).verify_stamp().previous > start
    except FrameError:
        return True
