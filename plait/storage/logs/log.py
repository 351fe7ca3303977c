"""An append-only log: frames in segment files of a fixed length, named by the offset of their first byte.

Offsets are logical byte positions that only grow. A frame that does not fit into the rest of a segment starts the next
one, so every frame lies in one file and one map. Appends are buffered until ``write``, which is one system call per
segment. ``begin_sync`` returns the sync as a job, for a thread that may block.

Promise: everything before ``end`` is appended, everything before ``written`` survives the process, and everything
before ``durable`` survives the machine.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

from plait.errors import DamageError
from plait.frame.builder import FrameParts
from plait.frame.header import HEADER_SIZE, PREFIX, SIZE_OFFSET
from plait.limits import FRAME_SIZE_MAX, KIB, MIB
from plait.storage.disk import Buffer, Disk, File
from plait.storage.durable_mark import DurableMark, read_mark, write_mark

SUFFIX = ".log"
#: The unit that a disk writes atomically.
SECTOR_SIZE = 512
#: The smallest segment that can hold any frame.
SEGMENT_SIZE_MIN = FRAME_SIZE_MAX
#: Space reserved for a new segment: all that a server needs before its first message.
ALLOCATE_MIN = 1 * MIB
#: The most space reserved at a time. A growing segment reserves as much as it already has, up to this.
ALLOCATE_MAX = 64 * MIB
#: Space in the active segment that only the broker's own frames (deletions, settings) may use: they free space on a
#: full disk, and a deletion takes 4.5 KiB.
MARGIN = 512 * KIB


def segment_name(base: int) -> str:
    """The file name of the segment that starts at ``base``."""
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


class SyncJob:
    """One sync. ``run`` blocks and may be called in another thread."""

    __slots__ = ("_log", "end", "segments")

    def __init__(self, log: Log, segments: list[tuple[Segment, int]], end: int) -> None:
        self._log = log
        self.segments = segments
        self.end = end

    @property
    def size(self) -> int:
        """The number of bytes that are not durable yet."""
        return sum(written - segment.synced for segment, written in self.segments)

    def run(self) -> None:
        self._log.run_sync([segment for segment, _ in self.segments])


class Log:
    """The segments of one directory, open for appending and reading."""

    def __init__(self, disk: Disk, directory: str, segment_size: int, *, zero_ahead: int = 0) -> None:
        """``zero_ahead``: bytes that are zeroed ahead of small writes, for logs with callers that wait for syncs.

        Syncing an allocated block that was never written also writes a journal entry, which takes twice the time.
        """
        self._disk = disk
        self._zero_ahead = zero_ahead
        self.directory = directory
        self.segment_size = segment_size
        #: Reserved space in the active segment that only the broker's own frames may use (``MARGIN``).
        self.margin = min(MARGIN, segment_size // 64)
        #: Space reserved for a new segment: only a part of it, also for small segments.
        self._first_size = min(ALLOCATE_MIN, max(segment_size // 8, 1))
        #: Free space on the disk that frames of producers must leave for checkpoints and other logs.
        self.leave_free = 0
        #: After a reservation was refused because of ``leave_free``: the free space that it needs. Otherwise 0.
        self.lacking = 0
        self.segments: list[Segment] = []
        self._bases: list[int] = []
        #: The buffers of frames that are appended and not written.
        self.pending: list[Buffer] = []
        self._pending_at = 0
        self._spare: tuple[int, File] | None = None
        #: The size of the last segment header.
        self._header_size = 0
        # A thread may be making the next segment while the loop needs it.
        self._making = threading.Lock()
        self._syncing = threading.Lock()
        self._sync_error: OSError | None = None
        self._closed = False
        self._never_allocated: list[str] = []
        #: The durable mark on the disk; None: it was never written, or is damaged.
        self.mark = read_mark(disk, directory)
        #: Everything from this offset on was appended since the log was opened.
        self.resumed_at = 0
        #: The first offset of the first segment; ``end`` if there is none.
        self.start = 0
        self.end = 0
        self.written = 0
        self.durable = 0
        #: Called before a new segment is made, with the end of the last one. Returns the frames of the segment header,
        #: which make the segment self-contained. Their ``previous`` field is that end.
        self.on_segment: Callable[[int], list[FrameParts]] | None = None
        disk.make_directory(directory)
        for name in disk.list(directory):
            if name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit():
                file = disk.open(f"{directory}/{name}")
                if file.size == 0:
                    # Created and never allocated: a crash came before the first frame.
                    file.close()
                    self._never_allocated.append(f"{directory}/{name}")
                    continue
                self._add(Segment(int(name[: -len(SUFFIX)]), file))

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._bases.append(segment.base)
        self.start = self._bases[0]

    @property
    def size(self) -> int:
        """The bytes from ``start`` to ``end``."""
        return self.end - self.start

    def segment_at(self, offset: int) -> Segment:
        """The segment that contains an offset; ``DamageError`` if there is none."""
        segment = self._find(offset)
        if segment is None:
            raise DamageError(f"{self.directory}: no segment contains offset {offset}")
        return segment

    def _find(self, offset: int) -> Segment | None:
        index = bisect_right(self._bases, offset) - 1
        return self.segments[index] if index >= 0 and offset < self.segments[index].end else None

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes [offset, offset + size) of one segment, without copying."""
        segment = self.segments[-1] if self.segments else None
        if segment is None or not segment.base <= offset < segment.end:
            segment = self.segment_at(offset)
        start = offset - segment.base
        if start + size > segment.size:
            raise DamageError(f"{self.directory}: {size} bytes at offset {offset} exceed the end of their segment")
        return (segment.mapped or segment.view)[start : start + size]

    def forget(self, start: int, end: int) -> None:
        """Drop the durable bytes of [start, end), in one segment, from the page cache: they will not be read soon.

        Does nothing if the segment was removed.
        """
        if (segment := self._find(start)) is not None:
            segment.file.forget(start - segment.base, end - segment.base)

    # --- appending ------------------------------------------------------------------------------

    def resume_at(self, end: int, proven: int = 0) -> None:
        """Continue after recovery: everything before ``end`` is valid, everything after it is unused.

        ``proven``: a successful sync made everything before this offset durable. The rest was read back, perhaps from
        page cache that a killed process left dirty, or from pages that a failed sync left marked as clean: readers see
        them, but no later sync writes them to disk. So the rest is written again and synced before any caller gets it
        as stored.
        """
        # A segment that starts at ``end`` is empty too: it gets its header when it is made again.
        while self.segments and self.segments[-1].base >= end:
            self._bases.pop()
            segment = self.segments.pop()
            segment.close()
            self._disk.remove(f"{self.directory}/{segment_name(segment.base)}")
        for path in self._never_allocated:
            self._disk.remove(path)
        self._never_allocated = []
        for segment in self.segments:
            segment.written = segment.synced = max(segment.base, min(end, segment.end))
            if segment.end > proven:
                self._write_again(segment, max(proven, segment.base))
                segment.file.sync()
            # Recovery may have read all of it: the pages must not stay in the memory of the process.
            segment.unmap()
        self._disk.sync_directory(self.directory)
        self.end = self.written = self.durable = self._pending_at = self.resumed_at = end
        self.start = self._bases[0] if self._bases else end
        self.note_durable()

    def _write_again(self, segment: Segment, start: int) -> None:
        """Write [start, ``segment.written``) again with the bytes that are read, which makes its pages dirty."""
        for at in range(start - segment.base, segment.written - segment.base, len(_ZEROS)):
            # A copy: a write must not read from the pages that it writes.
            piece = bytes(segment.view[at : min(at + len(_ZEROS), segment.written - segment.base)])
            segment.file.write([piece], at)

    def note_durable(self) -> None:
        """Write the durable mark, so that damage before it is not taken for a torn tail."""
        # Only retention moves the start: if the first files are lost, the mark keeps their offset.
        start = self.start if self.mark is None else self.mark.start
        new = self.mark is None
        self._write_mark(DurableMark(start, self.durable), sync=new)
        if new:
            self._disk.sync_directory("")

    def _write_mark(self, mark: DurableMark, *, sync: bool) -> None:
        if mark != self.mark:
            write_mark(self._disk, self.directory, mark, sync=sync)
            self.mark = mark

    def place_for(self, size: int, *, own: bool = False) -> int:
        """The offset of the next frame of ``size`` bytes. Makes the next segment or reserves space if necessary.

        ``own``: the frame is the broker's, and may use the space that frames of producers leave (``margin``): the
        deletion that frees space on a full disk has to be written first.
        """
        end = self.end + size if own else self.end + size + self.margin
        if self.segments:
            active = self.segments[-1]
            if active.base <= self.end and end <= active.end:
                if end > active.allocated:
                    self._reserve(active, end, 0 if own else self.leave_free)
                return self.end
        self._roll(end - self.end, 0 if own else self.leave_free)
        return self.end

    def _reserve(self, segment: Segment, end: int, leave_free: int) -> None:
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
                raise OSError(errno.ENOSPC, "No space left for messages", self.directory)
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

    def roll(self) -> None:
        """Start the next segment, so that the active one can be removed."""
        self._roll(self.margin, 0)

    def _roll(self, size: int, leave_free: int) -> None:
        if self._closed:
            # A closed log has no list of segments: the new one would overlap an existing one.
            raise ValueError(f"{self.directory}: the log is closed; open it again")
        self.write()
        # Recovery may have set the end behind the last segment, past durable bytes that are lost.
        base = max(self.segments[-1].end, self.end) if self.segments else self.end
        header = self.on_segment(self.end) if self.on_segment is not None else []
        self._header_size = sum(frame.size for frame in header)
        # At least half of a segment is left for data, or the log would consist of headers.
        size = self._header_size + max(size, self._header_size)
        with self._making:
            spare, self._spare = self._spare, None
            if spare is not None and spare[0] == base and spare[1].size >= size:
                file = spare[1]
            else:
                if spare is not None:
                    spare[1].close()
                file = self._create(base, max(self.segment_size, size))
        segment = Segment(base, file)
        segment.allocated = base + min(self._first_size, file.size)
        if size > segment.allocated - base:
            try:
                self._reserve(segment, base + size, leave_free)
            except OSError:
                file.close()
                self._disk.remove(f"{self.directory}/{segment_name(base)}")
                raise
        self._add(segment)
        self.end = self.written = self._pending_at = base
        for frame in header:
            self.pending.extend(frame.parts)
            self.end += frame.size
        segment.header_end = self.end

    def _create(self, base: int, size: int) -> File:
        path = f"{self.directory}/{segment_name(base)}"
        file = self._disk.open(path, create=True)
        try:
            if size > self._first_size:
                # The file has its full length from the beginning; space is reserved as needed (``_reserve``).
                file.truncate(size)
            file.allocate(min(self._first_size, size))
            file.sync()
            self._disk.sync_directory(self.directory)
        except OSError:
            file.close()
            self._disk.remove(path)
            raise
        return file

    @property
    def half_full(self) -> bool:
        """The active segment is more than half full: the next one will be needed soon."""
        return bool(self.segments) and self.end - self.segments[-1].base > self.segments[-1].size // 2

    def prepare_next(self) -> None:
        """Make the next segment in advance, once the active one is more than half full. May block."""
        with self._making:
            if not self.segments or self._spare is not None:
                return
            active = self.segments[-1]
            if self.half_full:
                # The next header is about as large as the last one.
                size = max(self.segment_size, 3 * self._header_size)
                self._spare = (active.end, self._create(active.end, size))

    def append(self, parts: Sequence[Buffer], size: int) -> int:
        """Append the buffers of a frame. Returns its offset. Nothing reaches the disk before ``write``."""
        offset = self.end
        if not self.segments or self.segments[-1].base > offset or offset + size > self.segments[-1].allocated:
            offset = self.place_for(size, own=True)
        self.pending.extend(parts)
        self.end = offset + size
        return offset

    def write(self) -> None:
        """Write everything appended: it survives the process from now on. After an OSError the log must not be used."""
        if not self.pending:
            return
        segment = self.segments[-1]
        ahead = self._zeros_ahead(segment) if self._zero_ahead else 0
        if ahead:
            self.pending += [_ZEROS[: ahead - done] for done in range(0, ahead, len(_ZEROS))]
            segment.zeroed = self.end + ahead
        segment.file.write(self.pending, self._pending_at - segment.base)
        segment.written = self.end
        self.pending = []
        self._pending_at = self.written = self.end

    def _zeros_ahead(self, segment: Segment) -> int:
        """The number of zeros to write after the pending frames, in the same call, so that it is one operation."""
        # The journal entry is negligible for a large write.
        if segment.zeroed >= self.end or self.end - self._pending_at >= self._zero_ahead // 8:
            return 0
        return max(min(self._zero_ahead, segment.allocated - self.end), 0)

    def begin_sync(self) -> SyncJob:
        """A job that makes everything written so far durable."""
        dirty = [(segment, segment.written) for segment in self.segments if segment.written > segment.synced]
        return SyncJob(self, dirty, self.written)

    def run_sync(self, segments: list[Segment]) -> None:
        """Sync the segments; one thread at a time. After a failure all syncs fail: the system reports it only once."""
        with self._syncing:
            if self._sync_error is not None:
                raise self._sync_error
            try:
                for segment in segments:
                    segment.file.sync()
            except OSError as error:
                self._sync_error = error
                raise

    def end_sync(self, job: SyncJob) -> None:
        """Record that the job succeeded. Two jobs may overlap: each covers what was written before it began."""
        for segment, written in job.segments:
            segment.synced = max(segment.synced, written)
        self.durable = max(self.durable, job.end)

    def sync(self) -> None:
        """Write and sync; blocks."""
        self.write()
        job = self.begin_sync()
        job.run()
        self.end_sync(job)

    # --- space ----------------------------------------------------------------------------------

    def removable(self, offset: int) -> bool:
        """True if a segment other than the active one ends at or before ``offset``."""
        return len(self.segments) > 1 and self.segments[0].end <= offset

    def remove_before(self, offset: int) -> list[int]:
        """Delete the segments that end at or before ``offset``, except the active one. Returns their bases."""
        count = 0
        while count < len(self.segments) - 1 and self.segments[count].end <= offset:
            count += 1
        if not count:
            return []
        mark = DurableMark(self.segments[count].base, self.durable)
        # A copy-on-write file system may have no space for the mark until the files are gone.
        with contextlib.suppress(OSError):
            self._write_mark(mark, sync=True)
        removed = [segment.base for segment in self.segments[:count]]
        for base in removed:
            self._bases.pop(0)
            self.start = self._bases[0]
            self.segments.pop(0).close()
            self._disk.remove(f"{self.directory}/{segment_name(base)}")
        self._disk.sync_directory(self.directory)
        self._write_mark(mark, sync=True)
        return removed

    def zero_from(self, offset: int) -> None:
        """Zero everything after ``offset``, in its segment and in all later ones, durably.

        The order is from the end to the front: if the cut is interrupted, the bad frame that is the reason for it is
        still there, and the next recovery repeats the cut. That frame may be the first one, so everything behind it is
        zeroed before any part of it. In the sector where the cut begins, the zeros are written in pieces smaller than
        any frame.
        """
        for segment in reversed(self.segments):
            start = max(offset, segment.base) - segment.base
            dirty = used_size(segment.view, start) if start < segment.size else 0
            front = min(dirty, SECTOR_SIZE - start % SECTOR_SIZE)
            behind = min(dirty, max(front, claimed_size(segment.view, start)))
            for begin, end in ((behind, dirty), (front, behind)):
                for done in range(begin, end, len(_ZEROS)):
                    segment.file.write([_ZEROS[: end - done]], start + done)
                if begin < end:
                    segment.file.sync()
            for done in reversed(range(0, front, _PIECE_SIZE)):
                segment.file.write([_ZEROS[: min(_PIECE_SIZE, front - done)]], start + done)
            if dirty:
                segment.file.sync()

    def close(self) -> None:
        """Close the files. Nothing can be appended afterwards."""
        self._closed = True
        for segment in self.segments:
            segment.close()
        if self._spare is not None:
            self._spare[1].close()
        self._spare = None
        self.segments = []
        self._bases = []


_ZEROS = bytes(1 << 18)
_PIECE_SIZE = 64
assert _PIECE_SIZE < HEADER_SIZE


def claimed_size(view: memoryview, start: int) -> int:
    """The frame size in an unverified header; 0 if there is no header."""
    if view[start : start + len(PREFIX)] != PREFIX:
        return 0
    return int.from_bytes(view[start + SIZE_OFFSET : start + SIZE_OFFSET + 4], "little")


def used_size(view: memoryview, start: int) -> int:
    """The number of bytes in use after ``start``: up to the last byte that is not zero, rounded up to 8."""
    end = len(view)
    while end > start:
        begin = max(start, end - len(_ZEROS))
        piece = bytes(view[begin:end])
        # Most pieces are zeros: comparing is many times faster than stripping.
        if piece != _ZEROS[: len(piece)]:
            used = begin + len(piece.rstrip(b"\0")) - start
            return min(used + (-used & 7), len(view) - start)
        end = begin
    return 0
