"""Segments: the files of a log, named by the offset of their first byte, the space that they reserve, and the rows of
their headers."""

from __future__ import annotations

import errno
import threading
from typing import Final, NamedTuple

from plait.frame.builder import Encoded, FrameParts, assemble, body_column
from plait.frame.header import HEADER_SIZE, PREFIX, SIZE_OFFSET
from plait.limits import MIB
from plait.storage.disk import Disk, File

SUFFIX: Final = ".log"
#: The unit that a disk writes atomically.
SECTOR_SIZE: Final = 512
#: Space reserved for a new segment: all that a server needs before its first message.
ALLOCATE_MIN: Final = 1 * MIB
#: The most space reserved at a time. A growing segment reserves as much as it already has, up to this.
ALLOCATE_MAX: Final = 64 * MIB
ZEROS: Final = bytes(1 << 18)
_PIECE_SIZE: Final = 64
assert _PIECE_SIZE < HEADER_SIZE


def segment_name(base: int) -> str:
    return f"{base:020d}{SUFFIX}"


class Segment:
    """One file of the log: [base, end) in log offsets. ``size`` is the length of the file, including unused space."""

    __slots__ = ("allocated", "base", "end", "file", "header_end", "mapped", "size", "synced", "written", "zeroed")

    def __init__(self, base: int, file: File) -> None:
        self.base = base
        self.file = file
        self.size = file.size
        self.end = base + self.size
        #: The log offsets up to which bytes are written, and durable.
        self.written = self.synced = base
        #: The log offset up to which every block was written at least once, possibly with zeros.
        self.zeroed = base
        #: The log offset up to which this process has reserved space on the disk.
        self.allocated = base
        #: The log offset of the end of the segment header.
        self.header_end = base
        #: The map of the file, once it was read.
        self.mapped: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The whole file, read-only; it also shows later writes."""
        if self.mapped is None:
            self.mapped = self.file.view()
        return self.mapped

    def unmap(self) -> None:
        """Drop the map; the next access makes it again."""
        self.mapped = None
        self.file.unmap()

    def close(self) -> None:
        self.mapped = None
        self.file.close()

    def write_again(self, start: int) -> None:
        """Read [start, ``written``), write the same bytes again, which makes their pages dirty, and sync them."""
        for at in range(start - self.base, self.written - self.base, len(ZEROS)):
            # A copy: a write must not read from the pages that it writes.
            piece = bytes(self.view[at : min(at + len(ZEROS), self.written - self.base)])
            self.file.write([piece], at)
        self.file.sync()

    def zero_from(self, offset: int) -> None:
        """Zero everything from ``offset`` on, durably and from the end to the front.

        The frame at ``offset`` is the reason for the cut, so everything after this frame is zeroed before any part of
        it. In the sector where the cut begins, the zeros are written in pieces smaller than any frame.
        """
        start = max(offset, self.base) - self.base
        dirty = used_size(self.view, start) if start < self.size else 0
        front = min(dirty, SECTOR_SIZE - start % SECTOR_SIZE)
        behind = min(dirty, max(front, claimed_size(self.view, start)))
        for begin, end in ((behind, dirty), (front, behind)):
            for done in range(begin, end, len(ZEROS)):
                self.file.write([ZEROS[: end - done]], start + done)
            if begin < end:
                self.file.sync()
        for done in reversed(range(0, front, _PIECE_SIZE)):
            self.file.write([ZEROS[: min(_PIECE_SIZE, front - done)]], start + done)
        if dirty:
            self.file.sync()


class SegmentFiles:
    """Makes the files of one log and reserves space for them. One file may be made in advance, by another thread."""

    def __init__(self, disk: Disk, directory: str, segment_size: int) -> None:
        self._disk = disk
        self._directory = directory
        #: Space reserved for a new segment: only a part of it, also for small segments.
        self._first_size = min(ALLOCATE_MIN, max(segment_size // 8, 1))
        self._spare: tuple[int, File] | None = None
        #: The base of the file that was taken last.
        self._taken = -1
        # A thread may be making the next segment while the loop needs it.
        self._making = threading.Lock()
        #: After a reservation was refused because of ``leave_free``: the free space that it needs. Otherwise 0.
        self.lacking = 0

    def path(self, base: int) -> str:
        return f"{self._directory}/{segment_name(base)}"

    def take(self, base: int, size: int, needed: int) -> File:
        """The file made in advance if it fits, else a new one of ``size`` bytes. It has at least ``needed`` bytes."""
        with self._making:
            spare, self._spare, self._taken = self._spare, None, base
            if spare is not None and spare[0] == base and spare[1].size >= needed:
                return spare[1]
            if spare is not None:
                spare[1].close()
            return self._create(base, max(size, needed))

    def prepare(self, base: int, size: int) -> None:
        """Make a file in advance, unless there is one or the loop has taken it meanwhile. May block."""
        with self._making:
            if self._spare is None and base != self._taken:
                self._spare = (base, self._create(base, size))

    def _create(self, base: int, size: int) -> File:
        file = self._disk.open(self.path(base), create=True)
        try:
            if size > self._first_size:
                # The file has its full length from the beginning; space is reserved as needed (``reserve``).
                file.truncate(size)
            file.allocate(min(self._first_size, size))
            file.sync()
            self._disk.sync_directory(self._directory)
        except OSError:
            file.close()
            self._disk.remove(self.path(base))
            raise
        return file

    def open(self, base: int, file: File, needed: int, leave_free: int) -> Segment:
        """The segment of a file that ``take`` returned, with space reserved for ``needed`` bytes."""
        segment = Segment(base, file)
        segment.allocated = base + min(self._first_size, file.size)
        if needed > segment.allocated - base:
            try:
                self.reserve(segment, base + needed, leave_free)
            except OSError:
                file.close()
                self._disk.remove(self.path(base))
                raise
        return segment

    def reserve(self, segment: Segment, end: int, leave_free: int) -> None:
        """Reserve space up to ``end`` and as much again as the segment has, so that disk use follows the stored data.

        Raises ENOSPC if less than ``leave_free`` would be left on the disk.
        """
        ahead = min(max(end - segment.base, self._first_size), ALLOCATE_MAX)
        target = min(end + ahead, segment.end)
        if leave_free and self._disk.space()[0] - (target - segment.allocated) < leave_free:
            target = end
            lacking = leave_free + target - segment.allocated
            if self._disk.space()[0] < lacking:
                self.lacking = lacking
                raise OSError(errno.ENOSPC, "No space left for messages", self._directory)
        self.lacking = 0
        try:
            segment.file.allocate(target - segment.base)
        except OSError as error:
            if error.errno != errno.ENOSPC or target == end:
                raise
            # There is less space than that; the frame itself may still fit.
            target = end
            segment.file.allocate(target - segment.base)
        segment.allocated = target

    def close(self) -> None:
        """Close the file that was made in advance."""
        if self._spare is not None:
            self._spare[1].close()
        self._spare = None


def claimed_size(view: memoryview, start: int) -> int:
    """The frame size in an unverified header; 0 if there is no header."""
    if view[start : start + len(PREFIX)] != PREFIX:
        return 0
    return int.from_bytes(view[start + SIZE_OFFSET : start + SIZE_OFFSET + 4], "little")


def used_size(view: memoryview, start: int) -> int:
    """The number of bytes in use after ``start``: up to the last byte that is not zero, rounded up to 8."""
    end = len(view)
    while end > start:
        begin = max(start, end - len(ZEROS))
        piece = bytes(view[begin:end])
        # Most pieces are zeros: comparing is many times faster than stripping.
        if piece != ZEROS[: len(piece)]:
            used = begin + len(piece.rstrip(b"\0")) - start
            return min(used + (-used & 7), len(view) - start)
        end = begin
    return 0


#: Header rows are compressed, because the headers of many subjects are read and held in memory in full. They consist of
#: similar names and numbers, so they shrink to an eighth.
COMPRESSION: Final = "lz4"


class HeaderRows(NamedTuple):
    """The rows of one frame that is not numbered and stamped yet."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    column: Encoded

    @property
    def size(self) -> int:
        """The size in memory, in bytes."""
        return sum(map(len, self.column[2]))

    def frame(self, first: int, previous_end: int, stamp: bytes) -> FrameParts:
        """The frame for a segment whose predecessor ended at ``previous_end``."""
        return assemble(
            [self.column], count=self.count, producer=0, first=first, previous=previous_end, flags=0, stamp=stamp
        )


def header_rows(rows: list[bytes], rows_max: int) -> list[HeaderRows]:
    """The rows, divided into frames of at most ``rows_max`` rows."""
    pages = (rows[start : start + rows_max] for start in range(0, len(rows), rows_max))
    return [HeaderRows(len(page), body_column(page, COMPRESSION)) for page in pages]
