"""The walk over a message log: frame headers from segment to segment, and the frames that a server would keep.

A walk follows the frame headers without reading columns, so it is cheap; the code that reads the rows of a frame
verifies the frame. Where a header does not lead to the next one, and in the tail that no header proves durable, the
walk uses ``LogScan``, which decides as recovery would: which frames are valid, what is damage, what is a torn tail.

Promise: a complete walk yields the frames that a server started on these files would keep.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from struct import Struct
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from plait.errors import DataDirError, FrameError
from plait.frame.header import HEADER_SIZE, MAGIC, PREFIX, VERSION
from plait.frame.view import FrameView
from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX, MIB
from plait.storage.catalog import CATALOG, PartitionRow, read_rows
from plait.storage.logs.recovery import Damage, LogScan
from plait.storage.logs.segment import used_size
from plait.storage.reading.log_reader import LOOKS_MAX, LogReader, MappedLog, MappedSegment

#: The approximate size of the pieces that a walk yields. It can go back to the start of any piece.
PIECE_SIZE: Final = MIB

#: magic and version, size, count, producer, previous, partition, base, store time, durable, epoch.
_HEADER: Final = Struct("<3sxII4xQ8xQ4xIQqQI")


#: The fields of an unverified frame header: the frame's position in the segment, its size, count and partition, the
#: sequence of its first row, its store time and its epoch. A plain tuple, because there may be millions.
FrameHeader: TypeAlias = tuple[int, int, int, int, int, int, int]
Found = TypeVar("Found")


class LogPiece(NamedTuple):
    """Consecutive frames. A piece replaces all earlier pieces that start at or after its ``offset``."""

    segment: str
    #: Log offset of the segment's first byte.
    segment_base: int
    #: Log offset of the piece.
    offset: int
    frames: list[FrameHeader]

    @property
    def end(self) -> int:
        """The log offset of the end of the last frame."""
        if not self.frames:
            return self.offset
        position, size, *_ = self.frames[-1]
        return self.segment_base + position + size


class _Resume(NamedTuple):
    """The position at which a walk continues."""

    file: int
    position: int


class LogWalk:
    """One pass over a log. At its end ``partitions`` and ``damages`` are complete."""

    def __init__(self, reader: LogReader, *, fail_on_damage: bool = True) -> None:
        self._reader = reader
        self._fail_on_damage = fail_on_damage
        checkpoint = reader.checkpoint
        self._durable = checkpoint.manifest.message_end if checkpoint else 0
        #: The end of the log if a server stopped in order there, and no server has started since.
        self._clean_end = checkpoint.manifest.message_offset if checkpoint and checkpoint.manifest.clean else -1
        #: The log offsets of pieces: a frame starts there, and the walk can go back there.
        self._marks: list[int] = []
        self._rows: dict[int, PartitionRow] = {}
        #: (log offset, rows) of catalog frames that may turn out to be in the torn tail.
        self._recent_rows: list[tuple[int, list[PartitionRow]]] = []
        #: The code that iterates sets this when frames after this offset seem to be missing. The walk then verifies the
        #: log from there, and yields it again.
        self.distrusted: int | None = None
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
            if self.distrusted is not None:
                resume = yield from self._settle(index, min(self.distrusted, end), end)
                continue
            if self._clean_end == end:
                return
            later = map(self._reader.map, range(index + 1, len(self._reader.files)))
            following = next((each for each in later if each is not None and not each.blank), None)
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
                if self.distrusted is not None:
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
            return self._reader.files[index][0]
        return self._marks[max(bisect_right(self._marks, offset) - 1, 0)]

    def _settle(self, index: int, doubtful: int, until: int | None) -> Generator[LogPiece, None, _Resume | None]:
        """Verify the log from the mark before ``doubtful`` to ``until`` (None: to its end), and yield it again.

        Returns the position of the first frame at or after ``until``, or None if there is none.
        """
        start = self._mark_before(index, min(doubtful - 1, self._durable))
        for _ in range(LOOKS_MAX):
            log = self._log_from(start, index if until is None else len(self._reader.files) - 1)
            self._recent_rows = [entry for entry in self._recent_rows if entry[0] < start]
            self.catalog_version += 1
            scan = LogScan(log, start, self._durable, self._plausible)
            found, resume = self._scan(scan, until)
            damages, being_written = log.damages(scan)
            if not being_written:
                break
        else:
            # The server writes faster than this reads: the walk ends at the frame that is being written.
            damages = [damage for damage in damages if damage.offset < min(being_written)]
            found, resume = [entry for entry in found if entry[0] < min(being_written)], None
        if resume is None:
            self._refuse_newer(log, max((offset + header[1] for offset, header in found), default=start))
        self.distrusted = None
        self.verified = max(self.verified, scan.end if resume is None else resume)
        # Like frames, damage from ``start`` on is reported again.
        self.damages = [damage for damage in self.damages if damage.offset < start]
        for damage in damages:
            header = _intact_header(log, damage)
            if header is not None:
                # Only the rows are damaged: the walk yields the frame, and a caller that reads the rows reports the
                # damage.
                found.append((damage.offset, header))
            elif self._fail_on_damage:
                raise log.error(damage)
            else:
                self.damages.append(damage)
        del self._marks[bisect_right(self._marks, start - 1) :]
        if log.segments:
            yield self._piece(log.segments[0], start - log.segments[0].base, [])
        yield from self._pieces_of(sorted(found), log.segments)
        if resume is None:
            return None
        index = self._reader.index_of(resume)
        return _Resume(index, resume - self._reader.files[index][0])

    def _log_from(self, start: int, last: int) -> MappedLog:
        mapped = [self._reader.map(number) for number in range(self._reader.index_of(start), last + 1)]
        segments = [segment for segment in mapped if segment is not None]
        for segment in segments:
            segment.reaches(self._reach.get(segment.base, 0))
        return MappedLog(self._reader.place, segments)

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

    def _refuse_newer(self, log: MappedLog, offset: int) -> None:
        """``DataDirError`` if a frame of a later format follows the last readable frame."""
        for segment in log.segments:
            position = offset - segment.base
            if 0 <= position <= segment.size - HEADER_SIZE:
                prefix = bytes(segment.view[position : position + len(PREFIX)])
                if prefix[:2] == MAGIC and prefix[2] > VERSION:
                    raise DataDirError(
                        f"{self._reader.place}/{segment.path} has frames of format version {prefix[2]}, this Plait "
                        f"reads {VERSION}; use the newer Plait that wrote it (nothing was changed)"
                    )


def _intact_header(log: MappedLog, damage: Damage) -> FrameHeader | None:
    """The header of a damaged frame; None if it is damaged too."""
    try:
        frame = log.frame(damage.offset)
        if frame is None or frame.partition == CATALOG or frame.size != damage.size:
            return None
        return _header(frame.verify_stamp())
    except FrameError:
        return None


def _header(frame: FrameView) -> FrameHeader:
    return 0, frame.size, frame.count, frame.partition, frame.base, frame.store_time, frame.epoch


def survey(
    walk: LogWalk,
    covers: Callable[[PartitionRow], bool],
    reduce: Callable[[LogPiece, list[FrameHeader]], Found],
) -> list[Found]:
    """Run a walk to its end. ``reduce`` gets each piece, and its frames of the partitions for which ``covers`` is true.

    Where rows of such a partition seem to be missing, the walk verifies the log before it accepts the gap.
    """
    found: list[tuple[int, Found]] = []
    #: Partition → (the expected sequence of its next frame, the log offset of its last frame).
    expected: dict[int, tuple[int, int]] = {}
    version = -1
    ids: set[int] = set()
    for piece in walk:
        if version != walk.catalog_version:
            version = walk.catalog_version
            ids = {row.id for row in walk.partitions.values() if covers(row)}
        while found and found[-1][0] >= piece.offset:
            # The walk went back to verify: this piece replaces the earlier ones from its offset on.
            found.pop()
            expected.clear()
        frames = [frame for frame in piece.frames if frame[3] in ids]
        for position, _, count, partition, base, *_ in frames:
            offset = piece.segment_base + position
            following = expected.get(partition)
            if following is not None and following[0] != base and offset >= walk.verified:
                walk.distrusted = following[1]
            expected[partition] = (base + count, offset)
        found.append((piece.offset, reduce(piece, frames)))
    return [each for _, each in found]
