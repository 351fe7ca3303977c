"""All disk access of Plait, behind one small interface.

Storage code opens, writes, syncs, maps, renames and lists through a ``Disk`` and nothing else, so that a
simulated disk with faults plugs in (``plait.testing.simulated_disk``). Both pass the same contract tests.

The fault model the rest of storage is written against: what was written and not synced may survive a crash
in any subset, torn at 512 bytes; a created, renamed or removed name is certain only after its directory was
synced; a failed sync means the data may be gone, and it is never tried again.

Paths are POSIX strings relative to the disk's root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from plait.errors import DataDirError
from plait.limits import KIB

#: pwritev takes at most this many buffers a call (Linux IOV_MAX).
IOV_MAX = 1024
#: Bytes that one call writes. For larger ones Linux takes its cache in blocks of megabytes. In a virtual machine that
#: gives free memory back these are what the host has to find first: 5 to 9 ms a MiB, against 0.2 (docs/adr/0017).
WRITE_SIZE = 128 * KIB
#: Asking a file system for more pieces of a file than this takes longer than reading it.
DATA_PIECES_MAX = 1000

#: A memoryview is one of single bytes, so that its length is its size.
Buffer = bytes | bytearray | memoryview


#: The file whose lock says that a server uses the directory.
LOCK = "LOCK"


class File(Protocol):
    """One open file. Writing beyond the end extends it; ``view`` maps what there is.

    After ``close`` every call but ``close`` raises OSError; views live on.
    """

    @property
    def size(self) -> int:
        """Bytes of the file, as far as this handle knows: it does not see another one's growth."""
        ...

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all buffers one after another at ``offset``; the number of bytes written.

        After an OSError a part of them may be in the file.
        """
        ...

    def allocate(self, size: int) -> None:
        """Reserve and zero-fill up to ``size``, so that later writes there cannot lack space."""
        ...

    def truncate(self, size: int) -> None:
        """Cut or extend to ``size``."""
        ...

    def sync(self) -> None:
        """Everything written so far is durable when this returns. Never retried after a failure."""
        ...

    def view(self) -> memoryview:
        """A read-only window on the whole file that also shows later writes inside its present size.

        What a later ``truncate`` cuts off must not be read through it any more.
        """
        ...

    def unmap(self) -> None:
        """Let the window go: pages that were read through it are no memory of this process any more. Views live on."""
        ...

    def forget(self, start: int, end: int) -> None:
        """Nobody will look at these bytes soon: the system may use the memory that they are cached in for others."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A directory tree and its faults."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; FileNotFoundError unless it exists or ``create`` is set."""
        ...

    def read(self, path: str) -> bytes: ...

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; empty when there is no such directory."""
        ...

    def exists(self, path: str) -> bool: ...

    def make_directory(self, path: str) -> None:
        """Create it with its parents where they are missing; it is durable when this returns."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, atomically replacing ``target``; certain after ``sync_directory``."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; nothing when there is none."""
        ...

    def sync_directory(self, path: str) -> None: ...

    def space(self) -> tuple[int, int]:
        """(free, total) bytes of the file system."""
        ...


def _pieces(buffers: Sequence[Buffer], offset: int) -> Iterator[tuple[list[Buffer], int]]:
    """What each system call is to write, and its size: of much, up to the file's next multiple of a piece."""
    size = sum(map(len, buffers))
    if size <= WRITE_SIZE and len(buffers) <= IOV_MAX:
        yield list(buffers), size
        return
    ends = list(accumulate(map(len, buffers)))
    start = first = 0
    while start < size:
        end = min(start + WRITE_SIZE - (offset + start) % WRITE_SIZE, size)
        last = min(bisect_left(ends, end, first), first + IOV_MAX - 1)
        end = min(end, ends[last])
        piece: list[Buffer] = list(buffers[first : last + 1])
        if end < ends[last]:
            piece[-1] = memoryview(piece[-1])[: end - ends[last]]
        if done := start - ends[first] + len(buffers[first]):
            piece[0] = memoryview(piece[0])[done:]
        yield piece, end - start
        start, first = end, last + (ends[last] == end)


class RealFile:
    """A file of the machine; every call is one or two system calls, but for large writes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    @property
    def size(self) -> int:
        return self._size

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        if offset < 0:
            # pwritev takes -1 for "wherever the file position is" and would write there.
            raise OSError(errno.EINVAL, f"cannot write at offset {offset}")
        start = offset
        for piece, wanted in _pieces(buffers, offset):
            while wanted:
                written = os.pwritev(self._fd, piece, offset)
                offset += written
                if written:
                    # At once: the next call may fail, and the file has grown all the same.
                    self._size = max(self._size, offset)
                wanted -= written
                if not wanted:
                    break
                if not written:
                    raise OSError(errno.EIO, "the disk accepted no bytes")
                while written >= len(piece[0]):
                    written -= len(piece.pop(0))
                piece[0] = memoryview(piece[0])[written:]
        return offset - start

    def allocate(self, size: int) -> None:
        if size == 0:
            return
        try:
            os.posix_fallocate(self._fd, 0, size)
        finally:
            # A disk that filled up half way may have made the file longer.
            self._size = os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        self._release()
        os.ftruncate(self._fd, size)
        self._size = size

    def sync(self) -> None:
        self._check_open()
        os.fdatasync(self._fd)
        if not os.fstat(self._fd).st_nlink:
            # Its bytes are on the disk, and no path leads to them: after a restart they are gone.
            raise OSError(errno.ENOENT, "a log file was deleted while the server ran")

    def data_size(self) -> int:
        """Up to the end of what was ever written; allocated space behind it reads as zeros.

        Where the file system does not tell, or in too many pieces, it is the whole file.
        """
        end = 0
        try:
            for _ in range(DATA_PIECES_MAX):
                end = os.lseek(self._fd, os.lseek(self._fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return end
        return self._size

    def view(self) -> memoryview:
        self._check_open()
        if self._view is None or len(self._view) != self._size:
            self._release()
            if self._size == 0:
                return memoryview(b"")
            self._map = mmap.mmap(self._fd, self._size, prot=mmap.PROT_READ)
            self._view = memoryview(self._map)
        return self._view

    def _check_open(self) -> None:
        # Where the system does not say so itself: fdatasync(-1) is a ValueError, and mmap takes -1 for a wish
        # for anonymous memory, which would read as zeros.
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _release(self) -> None:
        # Readers may still hold slices of the map: it then lives on until the last of them goes.
        self._map = self._view = None

    def unmap(self) -> None:
        self._release()

    def forget(self, start: int, end: int) -> None:
        self._check_open()
        page = mmap.PAGESIZE
        first = -(-start // page) * page
        size = end // page * page - first
        if size <= 0:
            return
        # It is advice: a file system that does not take it is no failure.
        with contextlib.suppress(OSError):
            if self._map is not None and first < len(self._map):
                # What is mapped would stay.
                self._map.madvise(mmap.MADV_DONTNEED, first, size)
            os.posix_fadvise(self._fd, first, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealDisk:
    """A directory of the machine. A read-only one changes nothing, and needs no right to: every other call fails."""

    def __init__(self, root: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.root = Path(root)
        self.read_only = read_only
        self._locks: list[tuple[str, int]] = []
        self._durable_directories: set[Path] = set()

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if create:
            self._check_writable()
        access = os.O_RDONLY if self.read_only else os.O_RDWR
        flags = access | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return RealFile(os.open(self._at(path), flags, 0o640))

    def _check_writable(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, f"{self.root} was opened read-only")

    def read(self, path: str) -> bytes:
        with open(self._at(path), "rb") as file:
            return file.read()

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))

    def make_directory(self, path: str) -> None:
        target = self.root / path
        if self.read_only and target.is_dir():
            return
        self._check_writable()
        for directory in reversed([target, *target.parents]):
            existed = directory.is_dir()
            if existed and (directory in self._durable_directories or self.root not in directory.parents):
                continue
            if not existed:
                _make_directory(directory)
            # Also when it existed: the process that made it may have been killed before it could sync.
            _sync_directory(directory.parent)
            self._durable_directories.add(directory)

    def rename(self, source: str, target: str) -> None:
        self._check_writable()
        os.replace(self._at(source), self._at(target))

    def remove(self, path: str) -> None:
        self._check_writable()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(path))

    def sync_directory(self, path: str) -> None:
        self._check_writable()
        _sync_directory(self.root / path)

    def space(self) -> tuple[int, int]:
        facts = os.statvfs(self.root)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize

    def lock(self) -> None:
        """One server per data directory: hold an exclusive lock until ``unlock`` or the process ends.

        The directory itself is locked too, so that a removed LOCK file lets no second server in.
        """
        self._check_writable()
        self.make_directory("")
        self._locks = []
        for path, flags in (("", os.O_RDONLY | os.O_DIRECTORY), (LOCK, os.O_RDWR | os.O_CREAT)):
            fd = os.open(self._at(path), flags | os.O_CLOEXEC, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                self.unlock()
                raise DataDirError(
                    f"data directory {self.root} is in use by another plait process; stop it first"
                ) from None
            except OSError as error:
                os.close(fd)
                if not path:
                    # Network file systems lock no directories.
                    continue
                self.unlock()
                raise DataDirError(f"data directory {self.root} cannot be locked: {error}") from error
            self._locks.append((path, fd))

    def check_lock(self) -> None:
        """Raise OSError when the locked directory is not the one at its path any more: removed, moved or replaced."""
        for path, fd in self._locks[:1]:
            held = os.fstat(fd)
            try:
                there = os.stat(self._at(path))
            except FileNotFoundError:
                there = None
            if there is None or (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
                what = f"data directory {self.root}" if not path else f"{self.root / path}"
                raise OSError(errno.ENOENT, f"{what} was removed or replaced while the server ran")

    def unlock(self) -> None:
        for _, fd in self._locks:
            os.close(fd)
        self._locks = []


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o750)
    except FileExistsError:
        if not path.is_dir():
            raise


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
