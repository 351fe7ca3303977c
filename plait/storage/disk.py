"""All disk access of Plait, through one small interface.

Storage code opens, writes, syncs, maps, renames and lists files only through a ``Disk``, so that a simulated disk with
faults can replace it (``plait.testing.simulated_disk``). Both pass the same contract tests.

The rest of storage assumes these faults:

- Of the writes that were not synced, any subset may survive a crash, torn at multiples of 512 bytes.
- A created, renamed or removed name is durable only after a sync of its directory.
- After a failed sync the data may be gone; storage never retries a sync.

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
#: Bytes that one call writes. For larger writes Linux allocates page cache in blocks of megabytes. In a virtual machine
#: that returns free memory to its host, the host has to provide those blocks first, which takes 5 to 9 ms per MiB
#: instead of 0.2 ms (docs/adr/0017).
WRITE_SIZE = 128 * KIB
#: The most data regions of a file to ask the file system for: more queries take longer than reading the file.
DATA_PIECES_MAX = 1000

#: A memoryview must have items of one byte, so that its length is its size.
Buffer = bytes | bytearray | memoryview


#: The lock file. The server that uses the directory holds its lock.
LOCK = "LOCK"
#: The directory, inside a node's data directory, that has the data directories of its additional broker groups.
GROUPS = "groups"


class File(Protocol):
    """One open file. Writing beyond the end extends it; ``view`` maps its present size.

    After ``close`` every call except ``close`` raises OSError; existing views stay valid.
    """

    @property
    def size(self) -> int:
        """The size of the file in bytes. A handle does not see growth through other handles."""
        ...

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all buffers one after another at ``offset``. Returns the number of bytes written.

        After an OSError a part of them may be in the file.
        """
        ...

    def allocate(self, size: int) -> None:
        """Reserve and zero-fill up to ``size``, so that later writes there cannot run out of space."""
        ...

    def truncate(self, size: int) -> None:
        """Cut or extend to ``size``."""
        ...

    def sync(self) -> None:
        """Make everything written so far durable. Never retried after a failure."""
        ...

    def view(self) -> memoryview:
        """A read-only map of the whole file that also shows later writes inside its present size.

        Bytes that a later ``truncate`` cuts off must not be read through it.
        """
        ...

    def unmap(self) -> None:
        """Drop the map, so that its pages no longer count as memory of this process. Existing views stay valid."""
        ...

    def forget(self, start: int, end: int) -> None:
        """Advise the system to drop these bytes from its page cache: they will not be read soon."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A directory tree."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing. FileNotFoundError unless the file exists or ``create`` is set."""
        ...

    def read(self, path: str) -> bytes: ...

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty if the directory does not exist."""
        ...

    def exists(self, path: str) -> bool: ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents, durably."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file, atomically replacing ``target``; durable after ``sync_directory``."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        ...

    def sync_directory(self, path: str) -> None: ...

    def space(self) -> tuple[int, int]:
        """(free, total) bytes of the file system."""
        ...


def _pieces(buffers: Sequence[Buffer], offset: int, size: int) -> Iterator[tuple[list[Buffer], int]]:
    """The buffers of each system call of a large write, and their size: it is cut at multiples of ``WRITE_SIZE``."""
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
    """A file of the operating system. Every call is one or two system calls, except large writes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        if offset < 0:
            # pwritev takes -1 for the current file position.
            raise OSError(errno.EINVAL, f"cannot write at offset {offset}")
        start = offset
        size = sum(map(len, buffers))
        whole = size <= WRITE_SIZE and len(buffers) <= IOV_MAX
        for piece, wanted in [(list(buffers), size)] if whole else _pieces(buffers, offset, size):
            while wanted:
                written = os.pwritev(self._fd, piece, offset)
                offset += written
                if written and offset > self.size:
                    # Updated now, because the next call may fail after the file has grown.
                    self.size = offset
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
            # The file may have grown even if the disk became full.
            self.size = os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        self.unmap()
        os.ftruncate(self._fd, size)
        self.size = size

    def sync(self) -> None:
        self._check_open()
        os.fdatasync(self._fd)
        if not os.fstat(self._fd).st_nlink:
            # The bytes are on the disk, but the file has no name: after a restart they are gone.
            raise OSError(errno.ENOENT, "a log file was deleted while the server ran")

    def data_size(self) -> int:
        """The end of the last written region; the space allocated after it reads as zeros.

        Returns the size of the file if the file system cannot tell, or has too many regions.
        """
        end = 0
        try:
            for _ in range(DATA_PIECES_MAX):
                end = os.lseek(self._fd, os.lseek(self._fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return end
        return self.size

    def view(self) -> memoryview:
        self._check_open()
        if self._view is None or len(self._view) != self.size:
            self.unmap()
            if self.size == 0:
                return memoryview(b"")
            self._map = mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ)
            self._view = memoryview(self._map)
        return self._view

    def _check_open(self) -> None:
        # For calls that do not fail with EBADF themselves: fdatasync(-1) is a ValueError, and mmap(-1) is anonymous
        # memory, which reads as zeros.
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def unmap(self) -> None:
        # Readers may still have slices of the map: it exists until the last of them is dropped.
        self._map = self._view = None

    def forget(self, start: int, end: int) -> None:
        self._check_open()
        page = mmap.PAGESIZE
        first = -(-start // page) * page
        size = end // page * page - first
        if size <= 0:
            return
        # Only advice: a file system that ignores it is no failure.
        with contextlib.suppress(OSError):
            if self._map is not None and first < len(self._map):
                # Mapped pages would stay in the cache.
                self._map.madvise(mmap.MADV_DONTNEED, first, size)
            os.posix_fadvise(self._fd, first, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self.unmap()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealDisk:
    """A directory of the operating system. With ``read_only`` it needs no write permission, and writing calls fail."""

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
                directory.mkdir(mode=0o750, exist_ok=True)
            # Also if it existed: the process that made it may have been killed before the sync.
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
        """Hold an exclusive lock until ``unlock`` or the end of the process: one server per data directory.

        The directory itself is locked too, so that removing the LOCK file does not admit a second server.
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
                    # Network file systems do not lock directories.
                    continue
                self.unlock()
                raise DataDirError(f"data directory {self.root} cannot be locked: {error}") from error
            self._locks.append((path, fd))

    def check_lock(self) -> None:
        """Raise OSError if the locked directory was removed, moved or replaced."""
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


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
