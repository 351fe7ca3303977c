"""Reading a log back after any kind of stop: which frames stand, what is damaged, where the log goes on.

The rule (R18): a bad frame below an offset that is known durable, or before a valid frame, is *damage*: its bytes are
copied to quarantine/, reported and left in place, and reading goes on behind it. A bad frame with nothing valid
after it is a *torn tail*: the bytes are kept aside and cut, so that they can never be taken for frames later.

A power loss leaves any subset of the sectors that were under way, so a torn tail may hold whole frames behind missing
ones. It is told from damage by what is missing: a sector that never reached the disk reads as zeros, and the
first frame of a segment names where the segment before ended. Where nothing proves that the missing bytes were ever
durable, everything behind them was under way too, and was not acknowledged: it is part of the tail. So what is left is
always a beginning of what was written, and a producer that sends the rest again finds its order kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from plait.errors import FrameError
from plait.frame.header import HEADER_SIZE, PREFIX
from plait.frame.view import FrameView
from plait.storage.disk import Disk
from plait.storage.logs.log import SECTOR_SIZE, Log, claimed_size, used_size

QUARANTINE = "quarantine"
#: Why a part of a log cannot be read that no file covers.
MISSING = "log files are missing"
#: At most this much of one damaged region is copied aside; the region itself stays in the log.
QUARANTINE_SIZE_MAX = 64 << 20


class Damage(msgspec.Struct, frozen=True):
    """A region of a log that holds no readable frame."""

    log: str
    offset: int
    size: int
    #: "damaged": left in place, skipped. "torn": an unfinished tail, cut.
    kind: str
    reason: str


class ReadableSegment(Protocol):
    """What a scan needs of one file of a log."""

    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def view(self) -> memoryview: ...


class ReadableLog(Protocol):
    """What a scan needs of a log, which may be one that another process writes."""

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
    """[start, end) of a log (``ReadableLog``), where a scan of all that follows would cost too much."""

    def __init__(self, log: ReadableLog, start: int, end: int) -> None:
        self.directory = log.directory
        self.segments = [
            SegmentPart(first, segment.view[first - segment.base : last - segment.base])
            for segment in log.segments
            if (first := max(segment.base, start)) < (last := min(segment.end, end))
        ]


#: Says whether a frame found after damage can be the log's own, not one inside somebody's message body.
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
        #: The frames' ``durable`` field speaks of this log (in the action log it speaks of the message log).
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
        """What stands from ``offset`` on, in all segments, is a tail to be cut.

        A segment that goes as a whole leaves the log to go on where the one before ended.
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
            # Whether this is damage or a torn tail depends on whether a valid frame follows: ``_finish`` knows.
            self.damages.append(Damage(self._log.directory, offset, behind - position, "damaged", reason))
            position = behind

    def _follows_missing(self, segment: ReadableSegment, frame: FrameView) -> bool:
        """The first frame of a segment says that the one before ended later than it was found to end."""
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
        """A part of the bad region never reached the disk, and nothing says that it had to."""
        offset = segment.base + position
        end = behind
        if behind >= used_end:
            # The last frame of the segment may have been meant to reach further than anything that is there.
            end = max(end, position + claimed_size(segment.view, position))
        return (
            offset >= self.durable
            and _missing_sector(segment.view, position, end)
            and offset >= self._durable_from(segment, behind)
        )

    def _tail_from(self, offset: int, durable: int) -> int:
        """Where a tail that goes on at ``offset`` begins: with the bad frames right before it that had no need to be.

        A cut that was interrupted leaves such: the frame that was the reason for it, half zeroed.
        """
        while self.damages and self.damages[-1].offset + self.damages[-1].size == offset:
            if self.damages[-1].offset < durable:
                break
            offset = self.damages.pop().offset
        return offset

    def _durable_from(self, segment: ReadableSegment, position: int) -> int:
        """The highest offset that is known durable, when all headers from here on are heard as well."""
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
        """Where to go on after a bad frame."""
        try:
            frame = FrameView(segment.view, position)
        except FrameError:
            found = self._next_valid(segment, position + 8, used_end)
            return found if found >= 0 else used_end
        # Header and directory agree, so the size can be believed: what looks like a frame inside is a message body.
        return position + frame.size

    def _next_valid(self, segment: ReadableSegment, position: int, used_end: int) -> int:
        """Where the next believable frame starts, or -1."""
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
        """Tell the torn tail from damage, and never reuse an offset that was durable."""
        kept: list[Damage] = []
        for damage in self.damages:
            tail = damage.offset >= self.end
            if tail and damage.offset >= self.durable:
                damage = msgspec.structs.replace(damage, kind="torn")
            elif tail and damage.offset + damage.size > self.durable:
                size = self.durable - damage.offset
                kept.append(msgspec.structs.replace(damage, size=size))
                damage = msgspec.structs.replace(damage, offset=self.durable, size=damage.size - size, kind="torn")
            kept.append(damage)
        if self.end < self.durable and not any(
            d.kind == "damaged" and d.offset <= self.end < d.offset + d.size for d in kept
        ):
            size = self.durable - self.end
            kept.append(Damage(self._log.directory, self.end, size, "damaged", "durable bytes are missing"))
        self.damages = kept
        self.end = max(self.end, self.durable)


def _missing_sector(view: memoryview, start: int, end: int) -> bool:
    """Some sector of [start, end) was not written since the segment was made: from ``start`` on it is zeros."""
    for sector in range(start - start % SECTOR_SIZE, min(end, len(view)), SECTOR_SIZE):
        piece = bytes(view[max(start, sector) : sector + SECTOR_SIZE])
        if piece.count(0) == len(piece):
            return True
    return False


def missing_files(log: ReadableLog, start: int, end: int) -> list[Damage]:
    """Parts of [start, end) that no file of the log covers, though they were written and nothing removed them."""
    found: list[Damage] = []
    for segment in [*log.segments, None]:
        stop = end if segment is None else min(segment.base, end)
        if start < stop:
            found.append(Damage(log.directory, start, stop - start, "damaged", MISSING))
        start = max(start, stop if segment is None else segment.end)
    return found


def settle(disk: Disk, log: Log, scan: LogScan) -> None:
    """Keep the bad bytes aside, cut the torn tail, and continue the log, durably, where the scan ended."""
    for damage in scan.damages:
        keep_aside(disk, log, damage)
    log.zero_from(scan.end)
    # The checkpoint and the headers name offsets that were durable when they were written.
    log.resume_at(scan.end, scan.durable)


def keep_aside(disk: Disk, log: Log, damage: Damage) -> None:
    """Copy a region to quarantine/, whole and once; what is not there any more cannot be kept."""
    data = _bytes_of(log, damage)
    if not data:
        return
    name = f"{QUARANTINE}/{log.directory}-{damage.offset:020d}-{damage.kind}"
    path, number = name, 1
    while disk.exists(path):
        if disk.read(path) == data:
            return
        # The same place was hit before, with other bytes.
        path, number = f"{name}.{number}", number + 1
    disk.make_directory(QUARANTINE)
    file = disk.open(f"{QUARANTINE}/new", create=True)
    try:
        file.truncate(0)
        file.write([data], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(f"{QUARANTINE}/new", path)
    disk.sync_directory(QUARANTINE)


def move_aside(disk: Disk, directory: str, names: Sequence[str]) -> None:
    """Move files that nobody knows what to do with to quarantine/, where they stay."""
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
