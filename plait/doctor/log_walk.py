"""One pass over every frame of a log, which also classifies the bytes that are not frames.

Every byte of a segment is read before its mapping is used: reading a bad disk block through a mapping kills the process
(SIGBUS). A check must survive that and report the place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from plait.doctor.findings import LogFacts
from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.storage.disk import RealDisk
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import MISSING, Damage, LogScan, Plausible
from plait.storage.logs.segment import Segment, segment_name, used_size
from plait.storage.marks import read_mark

#: The size of one read.
BLOCK_SIZE = 4 << 20

#: Called with the bytes read and the total.
OnProgress = Callable[[int, int], None]


class Walk:
    """All frames from the first segment on. Afterwards ``damages`` has what could not be read.

    While a server writes, its last frame may be incomplete, and more frames follow during the walk. Only bytes that
    existed when the walk began are judged, and a frame that looks damaged is read again.
    """

    def __init__(
        self,
        disk: RealDisk,
        directory: str,
        *,
        durable: int,
        in_use: bool,
        stamps_durable: bool,
        on_progress: OnProgress,
    ) -> None:
        self.directory = directory
        self._log = Log(disk, directory, 0) if disk.exists(directory) else None
        # Read after the files were listed: retention writes the mark before it removes a file.
        mark = read_mark(disk, directory)
        self._durable = durable if mark is None or in_use else max(durable, mark.durable)
        self._in_use = in_use
        self._stamps_durable = stamps_durable
        self._on_progress = on_progress
        opened = self._log.segments if self._log else []
        self._path = disk.root / directory
        self._segments = opened
        self.start = opened[0].base if opened else 0
        #: Retention removed the log before this offset. None: not known.
        self.floor = mark.start if mark is not None else None
        self.end = self.start
        self.facts = LogFacts(name=directory, segments=len(opened), start=self.start, end=self.start)
        self.damages: list[Damage] = []
        #: Decides whether a frame found after damage is a frame of the log.
        self.plausible: Plausible | None = None

    def frames(self) -> Iterator[tuple[int, FrameView]]:
        """(offset, frame) of every intact frame."""
        segments = self._segments
        if not segments:
            start = self.floor or 0
            if self._durable > start:
                self.damages = [Damage(self.directory, start, self._durable - start, "damaged", MISSING)]
                self._count_damages()
            return
        last = segments[-1]
        total = last.end - self.start
        runs, bad = readable_runs(
            self._path, segments, lambda offset: self._on_progress(offset - self.start, 2 * total)
        )
        found = [Damage(self.directory, segment.base, segment.size, "damaged", reason) for segment, reason in bad]
        for run in runs:
            whole = run.segments[-1] is last
            # Only the last run reaches the end of the log, where a tail can be torn and a durable end is known.
            durable = self._durable if whole else 0
            scan = LogScan(run, run.segments[0].base, durable, self.plausible, stamps_durable=self._stamps_durable)
            limit = last.base + used_size(last.view, 0) if self._in_use and whole else run.segments[-1].end
            for offset, frame in scan:
                if offset >= limit:
                    break
                self.facts.frames += 1
                self.facts.end = offset + frame.size
                yield offset, frame
                self._on_progress(total + offset - self.start, 2 * total)
            for damage in scan.damages:
                if not whole:
                    found.append(msgspec.structs.replace(damage, kind="damaged"))
                elif not self._was_being_written(damage):
                    found.append(damage)
            if whole and not self._in_use:
                self.facts.end = max(self.facts.end, scan.end)
        if bad and bad[-1][0] is last:
            self.facts.end = last.end
        self.end = self.facts.end
        self.damages = found
        self._find_missing_files()
        self._count_damages()

    def _was_being_written(self, damage: Damage) -> bool:
        if not self._in_use:
            return False
        if damage.kind == "torn":
            return True
        for segment in self._segments:
            if segment.base <= damage.offset < segment.end:
                try:
                    FrameView(segment.view, damage.offset - segment.base).verify()
                except FrameError:
                    return False
                return True
        return False

    def _find_missing_files(self) -> None:
        """Find files that are missing before or between others, where the scan of frames did not find it."""
        if self.floor is not None and self.floor < self.start:
            self.damages.append(Damage(self.directory, self.floor, self.start - self.floor, "damaged", MISSING))
        for one, other in zip(self._segments, self._segments[1:], strict=False):
            known = any(d.offset < other.base and d.offset + d.size > one.end for d in self.damages)
            if other.base > one.end and not known:
                size = other.base - one.end
                self.damages.append(Damage(self.directory, one.end, size, "damaged", MISSING))

    def _count_damages(self) -> None:
        self.damages.sort(key=lambda damage: damage.offset)
        for damage in self.damages:
            if damage.kind == "torn":
                self.facts.torn_bytes += damage.size
            else:
                self.facts.damaged_bytes += damage.size

    def place(self, offset: int) -> tuple[str, int | None]:
        """(file, position in it) of a log offset. For a missing file: the name that it would have, and None."""
        for segment in self._segments:
            if segment.base <= offset < segment.end:
                return f"{self.directory}/{segment_name(segment.base)}", offset - segment.base
        return f"{self.directory}/{segment_name(offset)}", None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


class SomeSegments:
    """The log that a scan sees: consecutive readable segments."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.segments: list[Segment] = []


def readable_runs(
    directory: Path, segments: Sequence[Segment], on_read: Callable[[int], None]
) -> tuple[list[SomeSegments], list[tuple[Segment, str]]]:
    """(runs of readable segments, unreadable segments with the reason). ``on_read`` gets log offsets."""
    runs: list[SomeSegments] = []
    bad: list[tuple[Segment, str]] = []
    broken = True
    for segment in segments:
        problem = _probe(directory / segment_name(segment.base), segment, on_read)
        if problem:
            bad.append((segment, problem))
        else:
            if broken:
                runs.append(SomeSegments(directory.name))
            runs[-1].segments.append(segment)
        broken = bool(problem)
    return runs, bad


def _probe(path: Path, segment: Segment, on_read: Callable[[int], None]) -> str:
    """The reason why the file cannot be read. Empty: it can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # The server has removed it; the open mapping still has its bytes.
        return ""
    try:
        for position in range(0, segment.size, BLOCK_SIZE):
            try:
                os.pread(fd, BLOCK_SIZE, position)
            except OSError as error:
                return f"the disk cannot read the block at byte {position} ({error.strerror}): file not checked"
            on_read(segment.base + position)
    finally:
        os.close(fd)
    return ""
