"""Recovery of a log after any kind of stop: which frames are valid, what is damaged, and where the log continues.

The rule (R18): a bad frame below an offset that is known to be durable, or before a valid frame, is *damage*: its bytes
are copied to quarantine/, reported and left in place, and reading continues after it. A bad frame with nothing valid
after it is a *torn tail*: its bytes are copied to quarantine/ and zeroed, so that no reader mistakes them for frames.

After a power loss any subset of the sectors that were not yet synced may be on the disk, so a torn tail may contain
whole frames after missing ones. Two facts distinguish it from damage: a sector that never reached the disk reads as
zeros, and the first frame of a segment names the end of the segment before. If nothing proves that the missing bytes
were ever durable, then everything after them was not synced either, and no producer got a receipt that promises
durability: it is part of the tail. So the recovered log is always a prefix of what was written, and a producer that
resends the rest keeps its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from plait.errors import FrameError
from plait.frame.header import HEADER_SIZE, PREFIX
from plait.frame.view import FrameView
from plait.storage.disk import Disk
from plait.storage.logs.log import Log
from plait.storage.logs.segment import SECTOR_SIZE, claimed_size, used_size
from plait.storage.marks import replace_file

QUARANTINE = "quarantine"
#: The reason of damage in a part of a log that no file covers.
MISSING = "log files are missing"
#: The most bytes of one damaged region that are copied to quarantine/; the region itself stays in the log.
QUARANTINE_SIZE_MAX = 64 << 20


class Damage(msgspec.Struct, frozen=True):
    """A region of a log without a readable frame."""

    log: str
    offset: int
    size: int
    #: "damaged": left in place and skipped. "torn": a torn tail, cut.
    kind: str
    reason: str


class ReadableSegment(Protocol):
    """The interface of one log file that a scan uses."""

    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def view(self) -> memoryview: ...


class ReadableLog(Protocol):
    """The interface of a log that a scan uses; another process may be writing the log."""

    @property
    def directory(self) -> str: ...
    @property
    def segments(self) -> Sequence[ReadableSegment]: ...


class SegmentPart(NamedTuple):
    """A part of one file of a log (``ReadableSegment``)."""

    base: int
    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)

    @property
    def end(self) -> int:
        return self.base + len(self.view)


class LogPart:
    """[start, end) of a log (``ReadableLog``), for a scan that must not continue to the end of the log."""

    def __init__(self, log: ReadableLog, start: int, end: int) -> None:
        self.directory = log.directory
        self.segments = [
            SegmentPart(first, segment.view[first - segment.base : last - segment.base])
            for segment in log.segments
            if (first := max(segment.base, start)) < (last := min(segment.end, end))
        ]


#: Whether a frame found after damage can be a frame of the log, and not one inside a message body.
Plausible = Callable[[int, FrameView], bool]


class LogScan:
    """One pass over a log from ``start``; after iterating, ``end``, ``durable`` and ``damages`` are known."""

    def __init__(
        self,
        log: ReadableLog,
        start: int,
        durable: int = 0,
        plausible: Plausible | None = None,
        *,
        stamps_durable: bool = True,
    ) -> None:
        self._log = log
        #: True if the ``durable`` field of a frame is an offset of this log. In frames of the action log and the
        #: retained log it is an offset of the message log.
        self._stamps_durable = stamps_durable
        self._plausible = plausible or (lambda offset, frame: True)
        self.start = start
        self.durable = durable
        self.end = start
        self.damages: list[Damage] = []
        self._stopped = False

    def __iter__(self) -> Iterator[tuple[int, FrameView]]:
        """(offset, frame) of every valid frame in order."""
        for segment in list(self._log.segments):
            if segment.end > self.start and not self._stopped:
                yield from self._segment(segment, max(self.start - segment.base, 0))
        self._finish()

    def stop_before(self, offset: int, reason: str) -> None:
        """Everything from ``offset`` on, in all segments, is a tail to be cut.

        If the tail begins exactly where a segment begins, the log still ends where the scan of the earlier segments
        ended.
        """
        self._stopped = True
        offset = self._tail_from(offset, self.durable)
        if all(segment.base != offset for segment in self._log.segments):
            self.end = offset
        for segment in self._log.segments:
            start = max(offset, segment.base)
            size = used_size(segment.view, start - segment.base) if start < segment.end else 0
            if size:
                self.damages.append(Damage(self._log.directory, start, size, "torn", reason))

    def _segment(self, segment: ReadableSegment, position: int) -> Iterator[tuple[int, FrameView]]:
        view = segment.view
        used_end = -1
        while position + HEADER_SIZE <= segment.size:
            offset = segment.base + position
            try:
                frame = FrameView(view, position).verify()
            except FrameError as error:
                reason = str(error)
            else:
                if position == 0 and self._follows_missing(segment, frame):
                    return
                yield offset, frame
                if self._stopped:
                    return
                if self._stamps_durable:
                    self.durable = max(self.durable, frame.durable)
                position += frame.size
                self.end = offset + frame.size
                continue
            if used_end < 0:
                used_end = position + used_size(view, position)
            if position >= used_end:
                return
            behind = self._behind_bad(segment, position, used_end)
            if self._never_durable(segment, position, behind, used_end):
                durable = self._durable_from(segment, behind)
                self.stop_before(self._tail_from(offset, durable), reason)
                return
            # It is damage if a valid frame follows, else a torn tail: ``_finish`` decides.
            self.damages.append(Damage(self._log.directory, offset, behind - position, "damaged", reason))
            position = behind

    def _follows_missing(self, segment: ReadableSegment, frame: FrameView) -> bool:
        """Compare where the scan ended with the end of the segment before, which the first frame of a segment names.

        If frames are missing and nothing proves that they were durable, cut the log at this segment and return True. If
        a part of them was durable, record damage, unless it is recorded already, and return False.
        """
        if frame.producer != 0 or frame.previous <= self.end:
            return False
        if any(damage.offset >= self.end for damage in self.damages):
            return False
        if self._durable_from(segment, 0) <= self.end:
            self.stop_before(segment.base, "follows frames that never reached the disk")
            return True
        size = frame.previous - self.end
        self.damages.append(Damage(self._log.directory, self.end, size, "damaged", "durable bytes are missing"))
        return False

    def _never_durable(self, segment: ReadableSegment, position: int, behind: int, used_end: int) -> bool:
        """True if a part of the bad region never reached the disk, and nothing proves that it was durable."""
        offset = segment.base + position
        end = behind
        if behind >= used_end:
            # The last frame of the segment may be longer than what reached the disk.
            end = max(end, position + claimed_size(segment.view, position))
        return (
            offset >= self.durable
            and _missing_sector(segment.view, position, end)
            and offset >= self._durable_from(segment, behind)
        )

    def _tail_from(self, offset: int, durable: int) -> int:
        """The start of the tail that contains ``offset``: includes bad frames right before it that were not durable.

        An interrupted cut leaves one such frame: the frame that was the reason for the cut, half zeroed.
        """
        while self.damages and self.damages[-1].offset + self.damages[-1].size == offset:
            if self.damages[-1].offset < durable:
                break
            offset = self.damages.pop().offset
        return offset

    def _durable_from(self, segment: ReadableSegment, position: int) -> int:
        """The highest offset known to be durable, including what the frame headers from here on prove."""
        highest = self.durable
        if not self._stamps_durable:
            return highest
        for other in self._log.segments:
            if other.base < segment.base:
                continue
            at = position if other is segment else 0
            used_end = at + used_size(other.view, at)
            while at + HEADER_SIZE <= used_end:
                try:
                    frame = FrameView(other.view, at).verify()
                except FrameError:
                    at = self._behind_bad(other, at, used_end)
                else:
                    if frame.durable <= other.base + at:
                        highest = max(highest, frame.durable)
                    at += frame.size
        return highest

    def _behind_bad(self, segment: ReadableSegment, position: int, used_end: int) -> int:
        """The position at which to continue after a bad frame."""
        try:
            frame = FrameView(segment.view, position)
        except FrameError:
            found = self._next_valid(segment, position + 8, used_end)
            return found if found >= 0 else used_end
        # The header and the frame's column directory agree on the size, so it is taken as right, and anything inside
        # that looks like a frame is part of a body.
        return position + frame.size

    def _next_valid(self, segment: ReadableSegment, position: int, used_end: int) -> int:
        """The position of the next plausible frame, or -1."""
        data = bytes(segment.view[position:used_end])
        at = data.find(PREFIX)
        while at >= 0:
            if (position + at) & 7 == 0:
                try:
                    frame = FrameView(segment.view, position + at).verify()
                except FrameError:
                    pass
                else:
                    if self._plausible(segment.base + position + at, frame):
                        return position + at
            at = data.find(PREFIX, at + 1)
        return -1

    def _finish(self) -> None:
        """Separate the torn tail from damage, and set ``end`` so that no durable offset is used again."""
        settled: list[Damage] = []
        for damage in self.damages:
            tail = damage.offset >= self.end
            if tail and damage.offset >= self.durable:
                damage = msgspec.structs.replace(damage, kind="torn")
            elif tail and damage.offset + damage.size > self.durable:
                size = self.durable - damage.offset
                settled.append(msgspec.structs.replace(damage, size=size))
                damage = msgspec.structs.replace(damage, offset=self.durable, size=damage.size - size, kind="torn")
            settled.append(damage)
        if self.end < self.durable and not any(
            d.kind == "damaged" and d.offset <= self.end < d.offset + d.size for d in settled
        ):
            size = self.durable - self.end
            settled.append(Damage(self._log.directory, self.end, size, "damaged", "durable bytes are missing"))
        self.damages = settled
        self.end = max(self.end, self.durable)


def _missing_sector(view: memoryview, start: int, end: int) -> bool:
    """True if a sector that overlaps [start, end) has only zeros from ``start`` on. Such a sector counts as never
    written.
    """
    for sector in range(start - start % SECTOR_SIZE, min(end, len(view)), SECTOR_SIZE):
        piece = bytes(view[max(start, sector) : sector + SECTOR_SIZE])
        if piece.count(0) == len(piece):
            return True
    return False


def missing_files(log: ReadableLog, start: int, end: int) -> list[Damage]:
    """The parts of [start, end) that no file covers, although they were written and retention did not remove them."""
    found: list[Damage] = []
    for segment in [*log.segments, None]:
        stop = end if segment is None else min(segment.base, end)
        if start < stop:
            found.append(Damage(log.directory, start, stop - start, "damaged", MISSING))
        start = max(start, stop if segment is None else segment.end)
    return found


def settle(disk: Disk, log: Log, scan: LogScan) -> None:
    """Copy the bad bytes to quarantine/, cut the torn tail, and resume the log durably at the end of the scan."""
    for damage in scan.damages:
        keep_aside(disk, log, damage)
    log.zero_from(scan.end)
    # The durable mark, the checkpoint or the frame headers prove that the log was durable up to ``scan.durable``.
    log.resume_at(scan.end, scan.durable)


def keep_aside(disk: Disk, log: Log, damage: Damage) -> None:
    """Copy a region to quarantine/, atomically and only once. Does nothing if its file is missing."""
    data = _bytes_of(log, damage)
    if not data:
        return
    name = f"{QUARANTINE}/{log.directory}-{damage.offset:020d}-{damage.kind}"
    path, number = name, 1
    while disk.exists(path):
        if disk.read(path) == data:
            return
        # The same offset was damaged before, with other bytes.
        path, number = f"{name}.{number}", number + 1
    disk.make_directory(QUARANTINE)
    replace_file(disk, path, data, draft=f"{QUARANTINE}/new")


def move_aside(disk: Disk, directory: str, names: Sequence[str]) -> None:
    """Move unrecognised files to quarantine/."""
    disk.make_directory(QUARANTINE)
    for name in names:
        target = path = f"{QUARANTINE}/{directory}-{name}"
        number = 1
        while disk.exists(path):
            path, number = f"{target}.{number}", number + 1
        disk.rename(f"{directory}/{name}", path)
    disk.sync_directory(QUARANTINE)
    disk.sync_directory(directory)


def _bytes_of(log: Log, damage: Damage) -> bytes:
    for segment in log.segments:
        if segment.base <= damage.offset < segment.end:
            start = damage.offset - segment.base
            return bytes(segment.view[start : start + min(damage.size, QUARANTINE_SIZE_MAX)])
    return b""
