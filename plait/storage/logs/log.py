"""An append-only log: frames in segment files of a fixed length, named by the offset of their first byte.

Offsets are logical byte positions that only grow. A frame that does not fit into the rest of a segment starts the next
one, so every frame lies in one file and one map. Appends are buffered until ``write``, which is one system call per
segment. ``begin_sync`` returns the sync as a job, for a thread that may block.

Promise: everything before ``end`` is appended, everything before ``written`` survives the process, and everything
before ``durable`` survives the machine.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

from plait.errors import DamageError
from plait.frame.builder import FrameParts
from plait.limits import FRAME_SIZE_MAX, KIB
from plait.storage.disk import Buffer, Disk
from plait.storage.logs.segment import SUFFIX, ZEROS, Segment, SegmentFiles
from plait.storage.marks import DurableMark, read_mark, write_mark

#: The smallest segment that can hold any frame.
SEGMENT_SIZE_MIN = FRAME_SIZE_MAX
#: Space in the active segment that only the broker's own frames (deletions, settings) may use, because a deletion frees
#: space on a full disk and is itself a frame of 4.5 KiB.
MARGIN = 512 * KIB


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
        self.files = SegmentFiles(disk, directory, segment_size)
        #: Free space on the disk that frames of producers must leave for checkpoints and other logs.
        self.leave_free = 0
        self.segments: list[Segment] = []
        self._bases: list[int] = []
        #: Frames that end at or before this offset need no ``place_for``: the space is reserved.
        self.room_end = 0
        #: The end of the reserved space of the active segment: ``room_end`` and ``margin``.
        self._reserved_end = 0
        #: The buffers of frames that are appended and not written.
        self.pending: list[Buffer] = []
        self._pending_at = 0
        #: The size of the last segment header.
        self._header_size = 0
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
        page cache that a killed process left dirty. After a failed sync, pages may even be marked as clean: readers see
        them, but no later sync writes them to disk. So the rest is written again and synced before it is reported as
        stored.
        """
        # A segment that starts at ``end`` is empty too: it gets its header when it is made again.
        while self.segments and self.segments[-1].base >= end:
            self._bases.pop()
            segment = self.segments.pop()
            segment.close()
            self._disk.remove(self.files.path(segment.base))
        for path in self._never_allocated:
            self._disk.remove(path)
        self._never_allocated = []
        for segment in self.segments:
            segment.written = segment.synced = max(segment.base, min(end, segment.end))
            if segment.end > proven:
                segment.write_again(max(proven, segment.base))
            # Recovery may have read all of it: the pages must not stay in the memory of the process.
            segment.unmap()
        self._disk.sync_directory(self.directory)
        self.end = self.written = self.durable = self._pending_at = self.resumed_at = end
        self.start = self._bases[0] if self._bases else end
        self._set_room(0)
        self.note_durable()

    def note_durable(self) -> None:
        """Write the durable mark, so that recovery does not mistake damage before it for a torn tail."""
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

    def place_for(self, size: int, *, own: bool = False) -> None:
        """Reserve space for frames of ``size`` bytes in one segment, which is a new one if necessary.

        ``own``: the frame is the broker's and may use the space that frames of producers leave (``margin``), because
        the deletion that frees space on a full disk has to be written first.
        """
        end = self.end + size if own else self.end + size + self.margin
        leave_free = 0 if own else self.leave_free
        if not self.segments or end > self.segments[-1].end:
            self._roll(end - self.end, leave_free)
        elif end > self.segments[-1].allocated:
            self.files.reserve(self.segments[-1], end, leave_free)
            self._set_room(self.segments[-1].allocated)

    def _set_room(self, reserved_end: int) -> None:
        self._reserved_end, self.room_end = reserved_end, reserved_end - self.margin

    def roll(self) -> None:
        """Start the next segment, so that the active one can be removed."""
        self._roll(self.margin, 0)

    def _roll(self, size: int, leave_free: int) -> None:
        if self._closed:
            # A closed log has no list of segments: the new one would overlap an existing one.
            raise ValueError(f"{self.directory}: the log is closed; open it again")
        self.write()
        # Recovery may have set the end after the last segment, because durable bytes that are lost were there.
        base = max(self.segments[-1].end, self.end) if self.segments else self.end
        header = self.on_segment(self.end) if self.on_segment is not None else []
        self._header_size = sum(frame.size for frame in header)
        # At least half of a segment is left for data, or the log would consist of headers.
        size = self._header_size + max(size, self._header_size)
        file = self.files.take(base, self.segment_size, size)
        segment = self.files.open(base, file, size, leave_free)
        self._add(segment)
        self.end = self.written = self._pending_at = base
        for frame in header:
            self.pending.extend(frame.parts)
            self.end += frame.size
        segment.header_end = self.end
        self._set_room(segment.allocated)

    @property
    def half_full(self) -> bool:
        """True if the active segment is more than half full, so that the next one will be needed soon."""
        return bool(self.segments) and self.end - self.segments[-1].base > self.segments[-1].size // 2

    def prepare_next(self) -> None:
        """Make the next segment in advance, once the active one is more than half full. May block."""
        if self.half_full:
            # The next header is about as large as the last one.
            self.files.prepare(self.segments[-1].end, max(self.segment_size, 3 * self._header_size))

    def append(self, parts: Sequence[Buffer], size: int) -> int:
        """Append the buffers of a frame. Returns its offset. Nothing reaches the disk before ``write``."""
        if self.end + size > self._reserved_end:
            self.place_for(size, own=True)
        offset = self.end
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
            self.pending += [ZEROS[: ahead - done] for done in range(0, ahead, len(ZEROS))]
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
        """Sync the segments; one thread at a time.

        After a failure all later syncs fail too, because the operating system reports a failure only once.
        """
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
            self._disk.remove(self.files.path(base))
        self._disk.sync_directory(self.directory)
        self._write_mark(mark, sync=True)
        return removed

    def zero_from(self, offset: int) -> None:
        """Zero everything after ``offset``, in its segment and in all later ones, durably.

        The zeros are written from the end to the front. So if the cut is interrupted, the bad frame that is the reason
        for the cut is still there, and the next recovery repeats the cut.
        """
        for segment in reversed(self.segments):
            segment.zero_from(offset)

    def close(self) -> None:
        """Close the files. Nothing can be appended afterwards."""
        self._closed = True
        for segment in self.segments:
            segment.close()
        self.files.close()
        self.segments = []
        self._bases = []
        self._set_room(0)
