"""Reading a message log that somebody else may be writing: a data directory, or segment files copied from one.

Nothing is ever changed, locked or repaired here, and the right to read is enough. A walk follows the frames' headers
from segment to segment without looking at their columns, so it costs next to nothing; whoever reads a frame's rows
verifies it. Where headers do not follow on each other, and over the tail that no header names as durable, the walk
hands over to ``LogScan``: which frames stand, what is damage and what is an unfinished tail is decided as recovery
would.

Promise: what a walk has yielded by its end is what a server started on these files would keep.
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
#: A walk tells of about this much log at a time, and can go back to where such a piece starts.
PIECE_SIZE: Final = MIB
#: Files vanish while a live server replaces them: looking again this often finds a moment of rest.
LOOKS_MAX: Final = 5

#: How a query goes on without damaged frames, for messages.
LEAVE_OUT: Final = "the option failOnDamage=false"

#: magic and version, size, count, producer, previous, partition, base, store time, durable, epoch.
_HEADER: Final = Struct("<3sxII4xQ8xQ4xIQqQI")
_PREFIX: Final = Struct("<3s")


#: A frame as its header tells of it, not verified: its position in the segment, size, count, partition, the sequence of
#: its first row, its store time and its epoch. A plain tuple, since there may be millions.
FrameHead: TypeAlias = tuple[int, int, int, int, int, int, int]


class LogPiece(NamedTuple):
    """Frames that follow on each other. A piece takes the place of all that was told from its ``offset`` on."""

    segment: str
    #: Log offset of the segment's first byte.
    segment_base: int
    #: Log offset of the piece.
    offset: int
    frames: list[FrameHead]


class MappedSegment:
    """One segment file, mapped; ``size`` leaves out allocated space that was never written, and is not read either."""

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
        """A frame that ends there is whole. A file system may call written zeros a hole: they belong to it."""
        if self.size < end <= len(self._whole):
            self._resize(end)
        return end <= self.size

    @property
    def blank(self) -> bool:
        """Made ahead of need: there is nothing in it yet."""
        return self.view[: len(PREFIX)] != PREFIX and used_size(self.view, 0) == 0


class MappedLog(NamedTuple):
    """Some segments of a log, as ``LogScan`` takes them."""

    directory: str
    segments: list[MappedSegment]


class _Resume(NamedTuple):
    """Where a walk goes on."""

    file: int
    position: int


class LogReader:
    """The message-log segments of a directory as they were when it was opened."""

    def __init__(self, disk: Disk, directory: str, place: str = "") -> None:
        self.disk = disk
        self.directory = directory
        #: For messages: where all this is.
        self.place = place or directory
        inside = f"{directory}/" if directory else ""
        #: (log offset of the first byte, path) of each segment, ascending.
        self.files = [(int(name[: -len(SUFFIX)]), inside + name) for name in disk.list(directory) if _is_segment(name)]
        # Before any segment is read: what it calls durable is then in the files.
        self.checkpoint = _load_checkpoint(disk)

    def map(self, index: int) -> MappedSegment | None:
        """A segment; None where retention has just taken it."""
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
        """Leave out segments that end before a log offset: each begins with what it takes to be read."""
        bases = [base for base, _ in self.files]
        del self.files[: max(bisect_right(bases, offset) - 1, 0)]

    def is_clean_end(self, offset: int) -> bool:
        """A server that stopped in good order wrote down that its log ends here, and none has started since."""
        checkpoint = self.checkpoint
        return checkpoint is not None and checkpoint.manifest.clean and checkpoint.manifest.message_offset == offset

    def walk(self, *, fail_on_damage: bool = True) -> LogWalk:
        """All frames, once."""
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
    """The newest checkpoint, where there is one and it stays long enough to be read."""
    for _ in range(LOOKS_MAX):
        if not disk.list(CHECKPOINT_DIRECTORY):
            return None
        try:
            return Checkpoints(disk).load()
        except FileNotFoundError:
            continue
    return None


class LogWalk:
    """One pass over a log. When it is done, ``partitions`` and ``damages`` are complete."""

    def __init__(self, reader: LogReader, *, fail_on_damage: bool) -> None:
        self._reader = reader
        self._fail_on_damage = fail_on_damage
        checkpoint = reader.checkpoint
        self._durable = checkpoint.manifest.message_end if checkpoint else 0
        self._bases = [base for base, _ in reader.files]
        #: Log offsets where pieces start: frames do, and the walk can go back there.
        self._marks: list[int] = []
        self._rows: dict[int, PartitionRow] = {}
        #: (log offset, rows) of catalog frames that a torn tail may still take back.
        self._recent_rows: list[tuple[int, list[PartitionRow]]] = []
        self._distrusted: int | None = None
        #: Segment base → how far in it headers led.
        self._reach: dict[int, int] = {}
        #: Frames before this log offset were verified wherever there was reason to.
        self.verified = 0
        self.damages: list[Damage] = []
        #: Grows whenever ``partitions`` may have changed.
        self.catalog_version = 0

    @property
    def partitions(self) -> dict[int, PartitionRow]:
        """Every partition defined so far, deleted ones included."""
        rows = dict(self._rows)
        for _, recent in self._recent_rows:
            rows.update((row.id, row) for row in recent)
        return rows

    def distrust(self, offset: int) -> None:
        """Frames seem to be missing after ``offset``: verify from there to here, and tell it again."""
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
                # A live server may have filled this segment and begun the next one since it was read.
                looked_again = end
                resume = _Resume(index, position)
            else:
                resume = yield from self._settle(index, end, end)

    # --- following headers ----------------------------------------------------------------------

    def _follow(self, segment: MappedSegment, position: int) -> Generator[LogPiece, None, int]:
        """Tell of the frames from ``position`` on, as far as headers lead; where that is."""
        view, base, limit = segment.view, segment.base, segment.size
        unpack = _HEADER.unpack_from
        frames: list[FrameHead] = []
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

    def _piece(self, segment: MappedSegment, start: int, frames: list[FrameHead]) -> LogPiece:
        offset = segment.base + start
        if not self._marks or offset > self._marks[-1]:
            self._marks.append(offset)
        certain = self._mark_before(0, self._durable)
        while self._recent_rows and self._recent_rows[0][0] < certain:
            self._rows.update((row.id, row) for row in self._recent_rows.pop(0)[1])
        return LogPiece(segment.path, segment.base, offset, frames)

    def _define(self, offset: int, view: memoryview, position: int) -> bool:
        """Take a catalog frame's rows; False where it is damaged."""
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
                f"{self._reader.place!r} holds no message log: its partitions cannot be read ({error})"
            ) from error
        self.catalog_version += 1

    def _next_in_use(self, index: int) -> MappedSegment | None:
        """The next segment that something was written to."""
        for later in range(index + 1, len(self._reader.files)):
            segment = self._reader.map(later)
            if segment is not None and not segment.blank:
                return segment
        return None

    def _ends_here(self, segment: MappedSegment, position: int, following: MappedSegment) -> bool:
        """The next segment confirms that this one has no more frames."""
        if following.size >= HEADER_SIZE:
            prefix, _, _, producer, previous, partition, *_ = _HEADER.unpack_from(following.view, 0)
            if prefix == PREFIX and partition == CATALOG and producer == 0 and previous:
                return bool(previous == segment.base + position)
        return used_size(segment.view, position) == 0

    # --- where headers are not enough -----------------------------------------------------------

    def _mark_before(self, index: int, offset: int) -> int:
        """The last mark up to ``offset``, or the first one there is."""
        if not self._marks:
            return self._bases[index]
        return self._marks[max(bisect_right(self._marks, offset) - 1, 0)]

    def _settle(self, index: int, doubtful: int, until: int | None) -> Generator[LogPiece, None, _Resume | None]:
        """Verify everything from before ``doubtful``, and tell it again; where the walk goes on.

        It goes on with the first frame at or after ``until``; None: the log has ended.
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
            # A server writes faster than this can look: the log ends where it was still writing.
            damages = [damage for damage in damages if damage.offset < min(being_written)]
            found, resume = [entry for entry in found if entry[0] < min(being_written)], None
        if resume is None:
            self._refuse_newer(segments, max((offset + head[1] for offset, head in found), default=start))
        self._distrusted = None
        self.verified = max(self.verified, scan.end if resume is None else resume)
        # Whose frame it is can be told where only its rows are damaged: that is for those to say who want them.
        heads = {damage: self._intact_head(segments, damage) for damage in damages}
        found += [(damage.offset, head) for damage, head in heads.items() if head is not None]
        # As with frames: what was told of from there on is told again.
        self.damages = [damage for damage in self.damages if damage.offset < start]
        self._report([damage for damage, head in heads.items() if head is None], segments)
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

    def _scan(self, scan: LogScan, until: int | None) -> tuple[list[tuple[int, FrameHead]], int | None]:
        """The valid frames, and the first one that need not be verified."""
        found: list[tuple[int, FrameHead]] = []
        for offset, frame in scan:
            if until is not None and offset >= until:
                return found, offset
            if frame.partition == CATALOG:
                self._take_rows(offset, frame)
            found.append((offset, _head(frame)))
            if frame.durable <= offset:
                self._durable = max(self._durable, frame.durable)
        return found, None

    def _plausible(self, offset: int, frame: FrameView) -> bool:
        """As recovery would believe it: stamped by a broker that had come so far, for a partition that exists."""
        if frame.durable > offset or frame.epoch < 1:
            return False
        return frame.producer == 0 if frame.partition == CATALOG else frame.partition in self.partitions

    def _pieces_of(self, found: list[tuple[int, FrameHead]], segments: list[MappedSegment]) -> Iterator[LogPiece]:
        for segment in segments:
            frames: list[FrameHead] = []
            start = -1
            for offset, head in found:
                if not segment.base <= offset < segment.end:
                    continue
                position = offset - segment.base
                follows = frames and frames[-1][0] + frames[-1][1] == position
                if frames and (not follows or position - start >= PIECE_SIZE):
                    yield self._piece(segment, start, frames)
                    frames = []
                if not frames:
                    start = position
                frames.append((position, *head[1:]))
            if frames:
                yield self._piece(segment, start, frames)

    def _readable(self, segments: list[MappedSegment], damage: Damage) -> bool:
        """What was being written when it was looked at is no damage."""
        try:
            frame = _frame_at(segments, damage.offset)
            return frame is not None and frame.verify() is frame
        except FrameError:
            return False

    def _intact_head(self, segments: list[MappedSegment], damage: Damage) -> FrameHead | None:
        """The header of a damaged frame, if it can be believed."""
        try:
            frame = _frame_at(segments, damage.offset)
            if frame is None or frame.partition == CATALOG or frame.size != damage.size:
                return None
            return _head(frame.verify_stamp())
        except FrameError:
            return None

    def _report(self, damages: list[Damage], segments: list[MappedSegment]) -> None:
        self.damages += damages
        if damages and self._fail_on_damage:
            damage = damages[0]
            holder = next((s for s in segments if s.base <= damage.offset < s.end), segments[-1])
            raise damage_error(self._reader.place, holder.path, damage.offset - holder.base, damage.size, damage.reason)

    def _refuse_newer(self, segments: list[MappedSegment], offset: int) -> None:
        """Where the log ends with a frame of a later format, it does not end there."""
        for segment in segments:
            position = offset - segment.base
            if 0 <= position <= segment.size - HEADER_SIZE:
                (prefix,) = _PREFIX.unpack_from(segment.view, position)
                if prefix[:2] == MAGIC and prefix[2] > VERSION:
                    raise DataDirError(
                        f"{self._reader.place}/{segment.path} has frames of format version {prefix[2]}, this Plait "
                        f"reads {VERSION}; use the newer Plait that wrote it (nothing was touched)"
                    )


def _head(frame: FrameView) -> FrameHead:
    return 0, frame.size, frame.count, frame.partition, frame.base, frame.store_time, frame.epoch


def _frame_at(segments: list[MappedSegment], offset: int) -> FrameView | None:
    for segment in segments:
        if segment.base <= offset < segment.end:
            return FrameView(segment.view, offset - segment.base)
    return None


def damage_error(place: str, path: str, position: int, size: int, reason: str) -> DamageError:
    """Names the file, the place in it and what to do."""
    return DamageError(
        f"{place}/{path} is damaged: {size} bytes at offset {position} hold no readable frame ({reason}). "
        f"Run 'plait doctor {place}' to see all damage and restore the file from a copy, "
        f"or leave the damaged frames out with {LEAVE_OUT}",
        file=f"{place}/{path}",
        offset=position,
        size=size,
    )


def expired_error(place: str, path: str) -> Expired:
    """A segment went away between planning and reading."""
    return Expired(f"{place}/{path} was removed by retention while the log was being read; read again")
