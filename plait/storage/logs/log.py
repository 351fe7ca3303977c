"""An append-only log: frames in segment files of a fixed length, named by the offset of their first byte.

Offsets are logical byte positions that only grow. A frame that does not fit into the rest of a segment starts the
next one, so every frame lies in one file and one mapping. Appends collect until ``write``, which is one system
call a segment; ``begin_sync`` hands the durability work to whoever may block.

Promise: ``end`` is what was appended, ``written`` survives the process, ``durable`` survives the machine.
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
#: What a disk writes whole or not at all.
SECTOR_SIZE = 512
#: The smallest segment that can hold any frame.
SEGMENT_SIZE_MIN = FRAME_SIZE_MAX
#: Space that is reserved for a new segment, which is all that a server needs before its first message...
ALLOCATE_MIN = 1 * MIB
#: ...and that is reserved at a time for one that has more: twice what it holds, at most so much.
ALLOCATE_MAX = 64 * MIB
#: Space of the active segment that frames of producers leave for the broker's own (deletions, settings): a full disk is
#: emptied by these, and a deletion takes 4.5 KiB.
MARGIN = 512 * KIB


def segment_name(base: int) -> str:
    """The file name of the segment that starts at ``base``."""
    return f"{base:020d}{SUFFIX}"


class Segment:
    """One file of the log: [base, end) in log offsets; ``size`` is its length, used or not."""

    __slots__ = ("_view", "allocated", "base", "end", "file", "head_end", "size", "synced", "written", "zeroed")

    def __init__(self, base: int, file: File) -> None:
        self.base = base
        self.file = file
        self.size = file.size
        self.end = base + self.size
        #: Log offsets up to which bytes were written here, and are durable.
        self.written = self.synced = base
        #: Log offset up to which every block has been written, if only with zeros.
        self.zeroed = base
        #: Log offset up to which the disk has reserved space, as far as this process has asked for it.
        self.allocated = base
        #: Log offset at which the frames end that every segment starts with.
        self.head_end = base
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The whole file, read-only, showing later writes."""
        if self._view is None:
            self._view = self.file.view()
        return self._view

    def unmap(self) -> None:
        """Let the mapping go; the next look makes it again."""
        self._view = None
        self.file.unmap()

    def close(self) -> None:
        self._view = None
        self.file.close()


class SyncJob:
    """What one sync makes durable; ``run`` blocks and may be called in another thread."""

    __slots__ = ("_log", "end", "segments")

    def __init__(self, log: Log, segments: list[tuple[Segment, int]], end: int) -> None:
        self._log = log
        self.segments = segments
        self.end = end

    @property
    def size(self) -> int:
        """Bytes that are not durable yet."""
        return sum(written - segment.synced for segment, written in self.segments)

    def run(self) -> None:
        self._log.run_sync([segment for segment, _ in self.segments])


class Log:
    """The segments of one directory, open for appending and reading."""

    def __init__(self, disk: Disk, directory: str, segment_size: int, *, zero_ahead: int = 0) -> None:
        """``zero_ahead``: bytes that are zeroed ahead of small writes, for logs that somebody waits to see synced.

        An allocated block that was never written costs a sync a journal entry beside the data: twice the time.
        """
        self._disk = disk
        self._zero_ahead = zero_ahead
        self.directory = directory
        self.segment_size = segment_size
        #: Space that frames of others leave in the active segment, reserved, for the broker's own.
        self.margin = min(MARGIN, segment_size // 64)
        #: Space that is reserved for a new segment; of a small one only a part too, as of a large one.
        self._first_size = min(ALLOCATE_MIN, max(segment_size // 8, 1))
        #: Space of the disk that frames of others leave for everything else: checkpoints, other logs.
        self.leave_free = 0
        #: Space that has to be free before the next reservation succeeds, where one was refused for ``leave_free``.
        self.lacking = 0
        self.segments: list[Segment] = []
        self._bases: list[int] = []
        self._pending: list[Buffer] = []
        self._pending_at = 0
        self._spare: tuple[int, File] | None = None
        #: Bytes of the frames that the last new segment began with.
        self._head_size = 0
        # The next segment may be made by a thread while the loop needs it.
        self._making = threading.Lock()
        self._syncing = threading.Lock()
        self._sync_error: OSError | None = None
        self._closed = False
        self._never_allocated: list[str] = []
        #: As it stands on the disk; None: it was never written, or does not read back.
        self.mark = read_mark(disk, directory)
        #: What stands from here on was appended since the log was opened.
        self.resumed_at = 0
        self.end = 0
        self.written = 0
        self.durable = 0
        #: Called before a new segment is made, with the offset where the last one ended: the frames it starts with,
        #: which make it self-contained. They name that offset as their ``previous``.
        self.on_segment: Callable[[int], list[FrameParts]] | None = None
        disk.make_directory(directory)
        for name in disk.list(directory):
            if name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit():
                file = disk.open(f"{directory}/{name}")
                if file.size == 0:
                    # Created and never allocated: the crash came before the first frame.
                    file.close()
                    self._never_allocated.append(f"{directory}/{name}")
                    continue
                self._add(Segment(int(name[: -len(SUFFIX)]), file))

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._bases.append(segment.base)

    @property
    def start(self) -> int:
        """The first offset that is still kept."""
        return self._bases[0] if self._bases else self.end

    @property
    def size(self) -> int:
        """Bytes of the files that hold data."""
        return self.end - self.start

    def segment_at(self, offset: int) -> Segment:
        """The segment that holds an offset; ``DamageError`` where there is none."""
        segment = self._find(offset)
        if segment is None:
            raise DamageError(f"{self.directory}: no segment holds offset {offset}")
        return segment

    def _find(self, offset: int) -> Segment | None:
        index = bisect_right(self._bases, offset) - 1
        return self.segments[index] if index >= 0 and offset < self.segments[index].end else None

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes [offset, offset + size) of one segment, not copied."""
        segment = self.segment_at(offset)
        start = offset - segment.base
        if start + size > segment.size:
            raise DamageError(f"{self.directory}: {size} bytes at {offset} pass the end of their segment")
        return segment.view[start : start + size]

    def forget(self, start: int, end: int) -> None:
        """Nobody will look at these bytes of one segment soon: what is durable of them need not stay in memory.

        Of a segment that is gone there is nothing to do.
        """
        if (segment := self._find(start)) is not None:
            segment.file.forget(start - segment.base, end - segment.base)

    # --- appending ------------------------------------------------------------------------------

    def resume_at(self, end: int, proven: int = 0) -> None:
        """Continue after recovery: everything before ``end`` stands, everything after is unused.

        ``proven``: a sync that succeeded made everything before this offset durable. The rest was read back, perhaps
        from a page cache that a killed process left dirty, or one in which a failed sync left pages that are marked
        clean: Linux shows them to readers, and no later sync writes them. So the rest is written again and synced,
        before any caller learns that it is stored.
        """
        # One that starts where the log ends is empty, too: when it is made again, it gets its head.
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
            # All of it may have been read: a start's memory is not what it looked at.
            segment.unmap()
        self._disk.sync_directory(self.directory)
        self.end = self.written = self.durable = self._pending_at = self.resumed_at = end
        self.note_durable()

    def _write_again(self, segment: Segment, start: int) -> None:
        """Write [start, ``segment.written``) as it is read, which makes its pages dirty."""
        for at in range(start - segment.base, segment.written - segment.base, len(_ZEROS)):
            # Copied: a write must not read from the pages that it writes to.
            piece = bytes(segment.view[at : min(at + len(_ZEROS), segment.written - segment.base)])
            segment.file.write([piece], at)

    def note_durable(self) -> None:
        """Write down up to where the log is durable, so that damage before it is not taken for a torn tail."""
        # What was lost before the first file stays lost: only retention moves the start.
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
        """The offset the next frame of ``size`` will get; makes the next segment, or reserves space, when it has to.

        ``own``: the frame is the broker's, and may use the space that frames of others leave (``margin``): what frees
        space on a full disk has to be written first.
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
        """Reserve space up to ``end`` and as much again as the segment has, so that disk use follows what is stored.

        ENOSPC where less than ``leave_free`` would be left on the disk.
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
            # There is less than that; it may be enough.
            target = end
            segment.file.allocate(target - segment.base)
        segment.allocated = target

    def roll(self) -> None:
        """Start the next segment, so that this one can be removed."""
        self._roll(self.margin, 0)

    def _roll(self, size: int, leave_free: int) -> None:
        if self._closed:
            # It knows its segments no more: the new one would lie inside one that is there.
            raise ValueError(f"{self.directory}: the log is closed")
        self.write()
        # Recovery may have set the end beyond the last segment, over bytes that were durable and are gone.
        base = max(self.segments[-1].end, self.end) if self.segments else self.end
        head = self.on_segment(self.end) if self.on_segment is not None else []
        self._head_size = sum(frame.size for frame in head)
        # At least half of a segment is left for what it is made for, or the log would consist of heads.
        size = self._head_size + max(size, self._head_size)
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
        for frame in head:
            self._pending.extend(frame.parts)
            self.end += frame.size
        segment.head_end = self.end

    def _create(self, base: int, size: int) -> File:
        path = f"{self.directory}/{segment_name(base)}"
        file = self._disk.open(path, create=True)
        try:
            if size > self._first_size:
                # The file has its length from the beginning; its space is reserved as it is needed (``_reserve``).
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
        """The next segment will be needed before long."""
        return bool(self.segments) and self.end - self.segments[-1].base > self.segments[-1].size // 2

    def prepare_next(self) -> None:
        """Make the next segment ahead of need, when the active one is more than half full. May block."""
        with self._making:
            if not self.segments or self._spare is not None:
                return
            active = self.segments[-1]
            if self.half_full:
                # The next head takes about as much as the last one.
                size = max(self.segment_size, 3 * self._head_size)
                self._spare = (active.end, self._create(active.end, size))

    def append(self, parts: Sequence[Buffer], size: int) -> int:
        """Take a frame's buffers; its offset. Nothing reaches the disk before ``write``."""
        offset = self.place_for(size, own=True)
        self._pending.extend(parts)
        self.end = offset + size
        return offset

    def write(self) -> None:
        """Everything appended survives the process from here on. Raises OSError; then nothing may be trusted."""
        if not self._pending:
            return
        segment = self.segments[-1]
        ahead = self._zeros_ahead(segment)
        zeros = [_ZEROS[: ahead - done] for done in range(0, ahead, len(_ZEROS))]
        segment.file.write([*self._pending, *zeros] if zeros else self._pending, self._pending_at - segment.base)
        if ahead:
            segment.zeroed = self.end + ahead
        segment.written = self.end
        self._pending = []
        self._pending_at = self.written = self.end

    def _zeros_ahead(self, segment: Segment) -> int:
        """How many zeros to write behind what is to be written, in the same call, so that nothing can come between."""
        # What brings much at a time is not held up by a journal.
        if segment.zeroed >= self.end or self.end - self._pending_at >= self._zero_ahead // 8:
            return 0
        return max(min(self._zero_ahead, segment.allocated - self.end), 0)

    def begin_sync(self) -> SyncJob:
        """The work that makes everything written so far durable."""
        dirty = [(segment, segment.written) for segment in self.segments if segment.written > segment.synced]
        return SyncJob(self, dirty, self.written)

    def run_sync(self, segments: list[Segment]) -> None:
        """Sync one after another, whoever asks. After a failure never again: the system reports it only once."""
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
        """The job succeeded. Two jobs may overlap: each counts for what was written before it began."""
        for segment, written in job.segments:
            segment.synced = max(segment.synced, written)
        self.durable = max(self.durable, job.end)

    def sync(self) -> None:
        """Write and sync here and now."""
        self.write()
        job = self.begin_sync()
        job.run()
        self.end_sync(job)

    # --- space ----------------------------------------------------------------------------------

    def removable(self, offset: int) -> bool:
        """Whether a segment ends at or before ``offset`` and is not the active one."""
        return len(self.segments) > 1 and self.segments[0].end <= offset

    def remove_before(self, offset: int) -> list[int]:
        """Delete the segments that end at or before ``offset``, never the active one; their bases."""
        count = 0
        while count < len(self.segments) - 1 and self.segments[count].end <= offset:
            count += 1
        if not count:
            return []
        mark = DurableMark(self.segments[count].base, self.durable)
        # A file system that copies on write may have no room for it until the files are gone.
        with contextlib.suppress(OSError):
            self._write_mark(mark, sync=True)
        removed = [segment.base for segment in self.segments[:count]]
        for base in removed:
            self._bases.pop(0)
            self.segments.pop(0).close()
            self._disk.remove(f"{self.directory}/{segment_name(base)}")
        self._disk.sync_directory(self.directory)
        self._write_mark(mark, sync=True)
        return removed

    def zero_from(self, offset: int) -> None:
        """Clear what stands after ``offset``, in its segment and in those after it, durably.

        The last comes first: until the end of it the reason for the cut is there to be found again. That may be the
        first frame itself, so what stands behind it goes before any part of it does. In the sector where the cut begins
        pieces smaller than any frame make sure of that.
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
        """Let the files go; nothing can be appended any more."""
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
    """What a header that is not to be trusted says of its frame's size; 0: there is none."""
    if view[start : start + len(PREFIX)] != PREFIX:
        return 0
    return int.from_bytes(view[start + SIZE_OFFSET : start + SIZE_OFFSET + 4], "little")


def used_size(view: memoryview, start: int) -> int:
    """How many bytes after ``start`` are in use: up to the last byte that is not zero, rounded up to 8."""
    end = len(view)
    while end > start:
        begin = max(start, end - len(_ZEROS))
        piece = bytes(view[begin:end])
        # Most of it is zeros: comparing is many times faster than stripping.
        if piece != _ZEROS[: len(piece)]:
            used = begin + len(piece.rstrip(b"\0")) - start
            return min(used + (-used & 7), len(view) - start)
        end = begin
    return 0
