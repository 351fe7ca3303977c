"""The segment files of a log that another process may be writing: of a data directory, or copied from one.

Nothing is changed, locked or repaired, and read permission is enough.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from plait.errors import DamageError, DataDirError, Expired, FrameError
from plait.frame.header import PREFIX
from plait.frame.view import FrameView
from plait.storage.checkpoint import DIRECTORY as CHECKPOINT_DIRECTORY
from plait.storage.checkpoint import Checkpoints, LoadedCheckpoint
from plait.storage.disk import Disk, RealDisk, RealFile
from plait.storage.logs.recovery import Damage, LogScan
from plait.storage.logs.segment import SUFFIX, used_size

MESSAGE_DIRECTORY: Final = "message"
#: Attempts to read files that a live server is replacing.
LOOKS_MAX: Final = 5

#: The option that skips damaged frames, for error texts.
LEAVE_OUT: Final = "the option failOnDamage=false"


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

    def frame(self, offset: int) -> FrameView | None:
        """The frame at a log offset, not verified; None if no segment has the offset. Raises ``FrameError``."""
        for segment in self.segments:
            if segment.base <= offset < segment.end:
                return FrameView(segment.view, offset - segment.base)
        return None

    def damages(self, scan: LogScan) -> tuple[list[Damage], list[int]]:
        """The damages that a scan of this log found, and the offsets of the damages that are readable frames now,
        because the server was writing these frames during the scan."""
        found = [damage for damage in scan.damages if damage.kind == "damaged"]
        return found, [damage.offset for damage in found if self._is_readable(damage.offset)]

    def _is_readable(self, offset: int) -> bool:
        try:
            frame = self.frame(offset)
            return frame is not None and frame.verify() is frame
        except FrameError:
            return False

    def error(self, damage: Damage) -> DamageError:
        before = [each for each in self.segments if each.base <= damage.offset]
        holder = before[-1] if before else self.segments[0]
        return damage_error(self.directory, holder.path, damage.offset - holder.base, damage.size, damage.reason)


class LogReader:
    """The segments of a log's directory, as of opening it."""

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

    def index_of(self, offset: int) -> int:
        """The index of the file that contains a log offset; of the first file if none does."""
        return max(bisect_right([base for base, _ in self.files], offset) - 1, 0)

    def mapped(self, start: int = 0) -> MappedLog:
        """The segments with frames, from the one that contains ``start`` on."""
        segments = [self.map(index) for index in range(self.index_of(start), len(self.files))]
        return MappedLog(self.place, [each for each in segments if each is not None and not each.blank])

    def skip_before(self, offset: int) -> None:
        """Skip the segments that end before a log offset: the header of a later one has all definitions."""
        del self.files[: self.index_of(offset)]


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


def map_segment(disk: Disk, place: str, path: str) -> memoryview:
    """A planned segment file; ``Expired`` if it was removed between planning and reading."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        raise expired_error(place, path) from None
    try:
        return file.view()
    finally:
        file.close()


def expired_error(place: str, path: str) -> Expired:
    """The error for a segment that was removed between planning and reading."""
    return Expired(f"{place}/{path} was removed by retention while the log was being read; read again")


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
