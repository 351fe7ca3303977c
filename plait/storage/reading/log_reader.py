"""Reading a message log that another process may be writing: a data directory, or segment files copied from one.

Nothing is changed, locked or repaired, and read permission is enough. A walk follows the frame headers from segment to
segment without reading columns, so it is cheap; the code that reads the rows of a frame verifies the frame. Where a
header does not lead to the next one, and in the tail that no header proves durable, the walk uses ``LogScan``, which
decides as recovery would: which frames are valid, what is damage, and what is a torn tail.

Promise: a complete walk yields the frames that a server started on these files would keep.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

import msgspec

from plait.errors import DamageError, DataDirError, Expired, FrameError
from plait.frame.header import HEADER_SIZE, MAGIC, PREFIX, VERSION
from plait.frame.view import FrameView
from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX, MIB
from plait.storage.catalog import CATALOG, PartitionRow, read_rows
from plait.storage.checkpoint import DIRECTORY as CHECKPOINT_DIRECTORY
from plait.storage.checkpoint import Checkpoints, LoadedCheckpoint
from plait.storage.disk import Disk, RealDisk, RealFile
from plait.storage.logs.log import SUFFIX, used_size
from plait.storage.logs.recovery import Damage, LogScan

MESSAGE_DIRECTORY: Final = "message"
#: The approximate size of the pieces that a walk yields. It can go back to the start of any piece.
PIECE_SIZE: Final = MIB
#: Attempts to read files that a live server is replacing.
LOOKS_MAX: Final = 5

#: The option that skips damaged frames, for error texts.
LEAVE_OUT: Final = "the option failOnDamage=false"

#: magic and version, size, count, producer, previous, partition, base, store time, durable, epoch.
_HEADER: Final = Struct("<3sxII4xQ8xQ4xIQqQI")
_PREFIX: Final = Struct("<3s")


#: The fields of an unverified frame header: the frame's position in the segment, its size, count and partition, the
#: sequence of its first row, its store time and its epoch. A plain tuple, because there may be millions.
FrameHeader: TypeAlias = tuple[int, int, int, int, int, int, int]


class LogPiece(NamedTuple):
    """Consecutive frames. A piece replaces everything that the walk yielded before from ``offset`` on."""

    segment: str
    #: Log offset of the segment's first byte.
    segment_base: int
    #: Log offset of the piece.
    offset: int
    frames: list[FrameHeader]


class MappedSegment:
    """One mapped segment file. ``size`` excludes allocated space that was never written, which is not read."""

    __slots__ = ("_whole", "base", "end", "path", "size", "view")

    def __init__(self, path: str, base: int, view: memoryview, size: int) -> None:
        self.path = path
        self.base = base
        self._whole = view
        self._resize(size)

    def _resize(self, size: int) -> None:
        self.size = size
        self.end = self.base + size
        self.view = self._whole[:size]

    def reaches(self, end: int) -> bool:
        """True if the file extends to ``end``. Grows ``size``: a file system may report written zeros as a hole."""
        if self.size < end <= len(self._whole):
            self._resize(end)
        return end <= self.size

    @property
    def blank(self) -> bool:
        """True if the segment was made in advance and has no frames yet."""
        return self.view[: len(PREFIX)] != PREFIX and used_size(self.view, 0) == 0


class MappedLog(NamedTuple):
    """Some segments of a log (``ReadableLog``)."""

    directory: str
    segments: list[MappedSegment]


class _Resume(NamedTuple):
    """The position at which a walk continues."""

    file: int
    position: int


class LogReader:
    """The message-log segments of a directory, as of opening it."""

    def __init__(self, disk: Disk, directory: str, place: str = "") -> None:
        self.disk = disk
        self.directory = directory
        #: The path of the directory, for error texts.
        self.place = place or directory
        inside = f"{directory}/" if directory else ""
        #: (log offset of the first byte, path) of each segment, ascending.
        self.files = [(int(name[: -len(SUFFIX)]), inside + name) for name in disk.list(directory) if _is_segment(name)]
        # Before any segment is read, so that the files have everything that the checkpoint proves durable.
        self.checkpoint = _load_checkpoint(disk)

    def map(self, index: int) -> MappedSegment | None:
        """A segment; None if retention has removed it."""
        base, path = self.files[index]
        try:
            file = self.disk.open(path)
        except FileNotFoundError:
            return None
        try:
            data_size = file.data_size() if isinstance(file, RealFile) else file.size
            return MappedSegment(path, base, file.view(), data_size)
        finally:
            file.close()

    def skip_before(self, offset: int) -> None:
        """Skip the segments that end before a log offset: the header of a later one has all definitions."""
        bases = [base for base, _ in self.files]
        del self.files[: max(bisect_right(bases, offset) - 1, 0)]

    def is_clean_end(self, offset: int) -> bool:
        """True if a server stopped in order with its log ending here, and none has started since."""
        checkpoint = self.checkpoint
        return checkpoint is not None and checkpoint.manifest.clean and checkpoint.manifest.message_offset == offset

    def walk(self, *, fail_on_damage: bool = True) -> LogWalk:
        """A walk over all frames."""
        return LogWalk(self, fail_on_damage=fail_on_damage)


def open_log(path: str) -> LogReader:
    """The message log of a data directory, or of a directory of segment files; ``DataDirError`` if it is neither."""
    disk = RealDisk(path, read_only=True)
    if not disk.exists(""):
        raise DataDirError(f"there is no directory {path!r}; name a Plait data directory")
    try:
        if disk.exists(MESSAGE_DIRECTORY):
            return LogReader(disk, MESSAGE_DIRECTORY, path)
        if any(map(_is_segment, disk.list(""))):
            return LogReader(disk, "", path)
    except (NotADirectoryError, PermissionError) as error:
        raise DataDirError(f"{path!r} cannot be read: {error.strerror}") from error
    raise DataDirError(
        f"{path!r} is not a Plait data directory: it has neither a {MESSAGE_DIRECTORY!r} directory nor segment files "
        f"(20 digits and {SUFFIX!r})"
    )


def _is_segment(name: str) -> bool:
    return name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit()


def _load_checkpoint(disk: Disk) -> LoadedCheckpoint | None:
    """The newest checkpoint; None if there is none, or a server keeps removing it before it is read."""
    for _ in range(LOOKS_MAX):
        if not disk.list(CHECKPOINT_DIRECTORY):
            return None
        try:
            return Checkpoints(disk).load()
        except FileNotFoundError:
            continue
    return None


class LogWalk:
    """One pass over a log. At its end ``partitions`` and ``damages`` are complete."""

    def __init__(self, reader: LogReader, *, fail_on_damage: bool) -> None:
        self._reader = reader
        self._fail_on_damage = fail_on_damage
        checkpoint = reader.checkpoint
        self._durable = checkpoint.manifest.message_end if checkpoint else 0
        self._bases = [base for base, _ in reader.files]
        #: The log offsets of pieces: a frame starts there, and the walk can go back there.
        self._marks: list[int] = []
        self._rows: dict[int, PartitionRow] = {}
        #: (log offset, rows) of catalog frames that may turn out to be in the torn tail.
        self._recent_rows: list[tuple[int, list[PartitionRow]]] = []
        self._distrusted: int | None = None
        #: Segment base → the position up to which headers were followed.
        self._reach: dict[int, int] = {}
        #: Frames before this log offset need no further verification.
        self.verified = 0
        self.damages: list[Damage] = []
        #: Grows when ``partitions`` may have changed.
        self.catalog_version = 0

    @property
    def partitions(self) -> dict[int, PartitionRow]:
        """Every partition defined so far, including deleted ones."""
        rows = dict(self._rows)
        for _, recent in self._recent_rows:
            rows.update((row.id, row) for row in recent)
        return rows

    def distrust(self, offset: int) -> None:
        """Frames seem to be missing after ``offset``: verify the log from there, and yield it again."""
        self._distrusted = offset

    def __iter__(self) -> Iterator[LogPiece]:
        resume: _Resume | None = _Resume(0, 0)
        looked_again = -1
        while resume is not None and resume.file < len(self._reader.files):
            index, position = resume
            segment = self._reader.map(index)
            if segment is None:
                resume = _Resume(index + 1, 0)
                continue
            position = yield from self._follow(segment, position)
            end = segment.base + position
            self._reach[segment.base] = position
            if self._distrusted is not None:
                resume = yield from self._settle(index, min(self._distrusted, end), end)
                continue
            if self._reader.is_clean_end(end):
                return
            following = self._next_in_use(index)
            if following is None:
                yield from self._settle(index, end, None)
                return
            if self._ends_here(segment, position, following):
                resume = _Resume(index + 1, 0)
            elif looked_again < end:
                # A live server may have filled this segment and started the next one since it was read.
                looked_again = end
                resume = _Resume(index, position)
            else:
                resume = yield from self._settle(index, end, end)

    # --- following headers ----------------------------------------------------------------------

    def _follow(self, segment: MappedSegment, position: int) -> Generator[LogPiece, None, int]:
        """Yield the frames from ``position`` while headers lead to the next one. Returns the position reached."""
        view, base, limit = segment.view, segment.base, segment.size
        unpack = _HEADER.unpack_from
        frames: list[FrameHeader] = []
        start = position
        while position + HEADER_SIZE <= limit:
            prefix, size, count, _, _, partition, sequence, time, durable, epoch = unpack(view, position)
            if (
                prefix != PREFIX
                or not HEADER_SIZE < size <= FRAME_SIZE_MAX
                or size & 7
                or not 0 < count <= FRAME_COUNT_MAX
            ):
                break
            if position + size > limit:
                if not segment.reaches(position + size):
                    break
                view, limit = segment.view, segment.size
            if partition == CATALOG and not self._define(base + position, view, position):
                break
            if self._durable < durable <= base + position:
                self._durable = durable
            frames.append((position, size, count, partition, sequence, time, epoch))
            position += size
            if position - start >= PIECE_SIZE:
                yield self._piece(segment, start, frames)
                frames, start = [], position
                if self._distrusted is not None:
                    return position
        if frames:
            yield self._piece(segment, start, frames)
        return position

    def _piece(self, segment: MappedSegment, start: int, frames: list[FrameHeader]) -> LogPiece:
        offset = segment.base + start
        if not self._marks or offset > self._marks[-1]:
            self._marks.append(offset)
        certain = self._mark_before(0, self._durable)
        while self._recent_rows and self._recent_rows[0][0] < certain:
            self._rows.update((row.id, row) for row in self._recent_rows.pop(0)[1])
        return LogPiece(segment.path, segment.base, offset, frames)

    def _define(self, offset: int, view: memoryview, position: int) -> bool:
        """Record the rows of a catalog frame; False if it is damaged."""
        try:
            frame = FrameView(view, position).verify()
        except FrameError:
            return False
        self._take_rows(offset, frame)
        return True

    def _take_rows(self, offset: int, frame: FrameView) -> None:
        try:
            self._recent_rows.append((offset, read_rows(frame)))
        except msgspec.MsgspecError as error:
            raise DataDirError(
                f"{self._reader.place!r} holds no message log: its catalog cannot be read ({error})"
            ) from error
        self.catalog_version += 1

    def _next_in_use(self, index: int) -> MappedSegment | None:
        """The next segment that has frames."""
        for later in range(index + 1, len(self._reader.files)):
            segment = self._reader.map(later)
            if segment is not None and not segment.blank:
                return segment
        return None

    def _ends_here(self, segment: MappedSegment, position: int, following: MappedSegment) -> bool:
        """True if the next segment, or unused space, confirms that this segment has no more frames."""
        if following.size >= HEADER_SIZE:
            prefix, _, _, producer, previous, partition, *_ = _HEADER.unpack_from(following.view, 0)
            if prefix == PREFIX and partition == CATALOG and producer == 0 and previous:
                return bool(previous == segment.base + position)
        return used_size(segment.view, position) == 0

    # --- where headers are not enough -----------------------------------------------------------

    def _mark_before(self, index: int, offset: int) -> int:
        """The last mark at or before ``offset``; if there is none, the first mark."""
        if not self._marks:
            return self._bases[index]
        return self._marks[max(bisect_right(self._marks, offset) - 1, 0)]

    def _settle(self, index: int, doubtful: int, until: int | None) -> Generator[LogPiece, None, _Resume | None]:
        """Verify the log from a mark before ``doubtful``, and yield it again. Returns where the walk continues.

        It continues with the first frame at or after ``until``; None: the log has ended.
        """
        start = self._mark_before(index, min(doubtful - 1, self._durable))
        for _ in range(LOOKS_MAX):
            segments = self._segments_from(start, index if until is None else len(self._reader.files) - 1)
            self._recent_rows = [entry for entry in self._recent_rows if entry[0] < start]
            self.catalog_version += 1
            scan = LogScan(MappedLog(self._reader.place, segments), start, self._durable, self._plausible)
            found, resume = self._scan(scan, until)
            damages = [damage for damage in scan.damages if damage.kind == "damaged"]
            being_written = [damage.offset for damage in damages if self._readable(segments, damage)]
            if not being_written:
                break
        else:
            # The server writes faster than this reads: the walk ends at the frame that is being written.
            damages = [damage for damage in damages if damage.offset < min(being_written)]
            found, resume = [entry for entry in found if entry[0] < min(being_written)], None
        if resume is None:
            self._refuse_newer(segments, max((offset + header[1] for offset, header in found), default=start))
        self._distrusted = None
        self.verified = max(self.verified, scan.end if resume is None else resume)
        # With an intact header only the rows are damaged: the frame is yielded, and a caller that reads it reports it.
        headers = {damage: self._intact_header(segments, damage) for damage in damages}
        found += [(damage.offset, header) for damage, header in headers.items() if header is not None]
        # Like frames, damage from ``start`` on is reported again.
        self.damages = [damage for damage in self.damages if damage.offset < start]
        self._report([damage for damage, header in headers.items() if header is None], segments)
        del self._marks[bisect_right(self._marks, start - 1) :]
        if segments:
            yield self._piece(segments[0], start - segments[0].base, [])
        yield from self._pieces_of(sorted(found), segments)
        return None if resume is None else self._place_of(resume)

    def _place_of(self, offset: int) -> _Resume:
        index = bisect_right(self._bases, offset) - 1
        return _Resume(index, offset - self._bases[index])

    def _segments_from(self, start: int, last: int) -> list[MappedSegment]:
        first = max(bisect_right(self._bases, start) - 1, 0)
        mapped = [self._reader.map(number) for number in range(first, last + 1)]
        segments = [segment for segment in mapped if segment is not None]
        for segment in segments:
            segment.reaches(self._reach.get(segment.base, 0))
        return segments

    def _scan(self, scan: LogScan, until: int | None) -> tuple[list[tuple[int, FrameHeader]], int | None]:
        """The valid frames, and the offset of the first one that need not be verified."""
        found: list[tuple[int, FrameHeader]] = []
        for offset, frame in scan:
            if until is not None and offset >= until:
                return found, offset
            if frame.partition == CATALOG:
                self._take_rows(offset, frame)
            found.append((offset, _header(frame)))
            if frame.durable <= offset:
                self._durable = max(self._durable, frame.durable)
        return found, None

    def _plausible(self, offset: int, frame: FrameView) -> bool:
        """As in recovery: the durable offset in the stamp precedes the frame, and the partition is in the catalog."""
        if frame.durable > offset or frame.epoch < 1:
            return False
        return frame.producer == 0 if frame.partition == CATALOG else frame.partition in self.partitions

    def _pieces_of(self, found: list[tuple[int, FrameHeader]], segments: list[MappedSegment]) -> Iterator[LogPiece]:
        for segment in segments:
            frames: list[FrameHeader] = []
            start = -1
            for offset, header in found:
                if not segment.base <= offset < segment.end:
                    continue
                position = offset - segment.base
                follows = frames and frames[-1][0] + frames[-1][1] == position
                if frames and (not follows or position - start >= PIECE_SIZE):
                    yield self._piece(segment, start, frames)
                    frames = []
                if not frames:
                    start = position
                frames.append((position, *header[1:]))
            if frames:
                yield self._piece(segment, start, frames)

    def _readable(self, segments: list[MappedSegment], damage: Damage) -> bool:
        """True if the frame is readable now: the server was writing it during the scan, so it is not damaged."""
        try:
            frame = _frame_at(segments, damage.offset)
            return frame is not None and frame.verify() is frame
        except FrameError:
            return False

    def _intact_header(self, segments: list[MappedSegment], damage: Damage) -> FrameHeader | None:
        """The header of a damaged frame; None if it is damaged too."""
        try:
            frame = _frame_at(segments, damage.offset)
            if frame is None or frame.partition == CATALOG or frame.size != damage.size:
                return None
            return _header(frame.verify_stamp())
        except FrameError:
            return None

    def _report(self, damages: list[Damage], segments: list[MappedSegment]) -> None:
        self.damages += damages
        if damages and self._fail_on_damage:
            damage = damages[0]
            holder = next((s for s in segments if s.base <= damage.offset < s.end), segments[-1])
            raise damage_error(self._reader.place, holder.path, damage.offset - holder.base, damage.size, damage.reason)

    def _refuse_newer(self, segments: list[MappedSegment], offset: int) -> None:
        """``DataDirError`` if a frame of a later format follows the last readable frame."""
        for segment in segments:
            position = offset - segment.base
            if 0 <= position <= segment.size - HEADER_SIZE:
                (prefix,) = _PREFIX.unpack_from(segment.view, position)
                if prefix[:2] == MAGIC and prefix[2] > VERSION:
                    raise DataDirError(
                        f"{self._reader.place}/{segment.path} has frames of format version {prefix[2]}, this Plait "
                        f"reads {VERSION}; use the newer Plait that wrote it (nothing was changed)"
                    )


def _header(frame: FrameView) -> FrameHeader:
    return 0, frame.size, frame.count, frame.partition, frame.base, frame.store_time, frame.epoch


def _frame_at(segments: list[MappedSegment], offset: int) -> FrameView | None:
    for segment in segments:
        if segment.base <= offset < segment.end:
            return FrameView(segment.view, offset - segment.base)
    return None


def damage_error(place: str, path: str, position: int, size: int, reason: str) -> DamageError:
    """The error for a damaged frame: names the file, the offset and the remedy."""
    return DamageError(
        f"{place}/{path} is damaged: {size} bytes at offset {position} hold no readable frame ({reason}). "
        f"Run 'plait doctor {place}' to see all damage and restore the file from a copy, "
        f"or leave the damaged frames out with {LEAVE_OUT}",
        file=f"{place}/{path}",
        offset=position,
        size=size,
    )


def expired_error(place: str, path: str) -> Expired:
    """The error for a segment that was removed between planning and reading."""
    return Expired(f"{place}/{path} was removed by retention while the log was being read; read again")
