"""A disk in memory that fails in the ways real disks fail, with random choices from a seed.

``SimulatedDisk`` passes the same contract tests as ``plait.storage.disk.RealDisk``. Its faults:

- **Crash (power loss).** A chosen operation raises ``SimulatedCrash`` before it takes effect; a write first stores some
  of its bytes in the page cache. Every later call raises too. ``after_crash`` returns the disk that the next start
  finds. Each call of it chooses again what survives:

  - Any subset of the unsynced sectors (512 bytes) survives. A sector that was written several times has any of its
    states since the last sync. A file may have grown only in part, or be longer than its surviving data; the rest is
    zeros. A truncation to a smaller size survives or not. If it does not, later writes above that size and all later
    changes of the file's size are lost too.
  - A created, renamed or removed name is durable once its directory was synced (for a rename: both directories). Before
    that, each change survives or not, but changes of one name survive in order. After a rename the file has either its
    old name or its new name. Syncing a file does not make its name durable.
  - Directories are durable when ``make_directory`` returns.

- **Kill (the process dies, the machine does not).** ``copy`` of a crashed disk has the whole page cache, with its
  unsynced changes.
- **No space.** Each file takes space up to the end of its written or allocated bytes; all files together have
  ``capacity`` bytes; bytes that ``truncate`` adds take none, as on Linux. A write without enough space stores what fits
  and raises ENOSPC. ``allocate`` without enough space raises and changes nothing. Creating a file needs a free byte.
- **I/O errors.** ``fail`` makes chosen operations raise. A failed write may have stored a part. After a failed sync,
  some unsynced sectors are on the medium. Later syncs succeed but never write the others, although reads show them
  until a crash, as on Linux. Other failed operations change nothing.
- **Slow I/O.** The disk calls ``on_operation`` before each operation takes effect, without holding a lock. The callback
  may advance a clock, block, or raise ``SimulatedCrash`` or ``OSError``. A sync makes only the changes durable that
  were made before the sync was called.
- **Bit rot.** ``flip_bit`` flips a bit.

An *operation* is a call that changes the disk: create, write, sync, truncate, allocate, rename, remove, make_directory
(one operation for each new directory) and sync_directory.
"""

from __future__ import annotations

import builtins
import errno
import os
import posixpath
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from plait.storage.disk import Buffer
from plait.testing.cached_file import CachedFile, Keep
from plait.testing.cached_names import CachedNames

FileOperation = Literal["create", "write", "sync", "truncate", "allocate"]
Operation = FileOperation | Literal["rename", "remove", "make_directory", "sync_directory"]
Failing = Operation | Literal["read"]
#: Called with the operation, its path (the new one of a rename) and its size in bytes.
Watcher = Callable[[Operation, str, int], None]

#: Enough for several small segments. All files are in memory.
CAPACITY_DEFAULT = 256 * 1024 * 1024


class SimulatedCrash(BaseException):
    """The machine stopped here. Not an ``Exception``, so that no handler continues after it."""

    def __init__(self, message: str = "simulated crash", *, byte: int = 0) -> None:
        super().__init__(message)
        #: The number of bytes of the interrupted write that are in the page cache.
        self.byte = byte


class SimulatedFile:
    """One open handle of a file. Like a real handle, it notices only size changes that its own calls make."""

    def __init__(self, disk: SimulatedDisk, path: str, cached: CachedFile) -> None:
        self._disk = disk
        self._path = path
        self._cached = cached
        self._size = cached.size
        self._open = True

    @property
    def size(self) -> int:
        return self._size

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._check_open()
        if any(isinstance(buffer, memoryview) and buffer.itemsize != 1 for buffer in buffers):
            raise TypeError("a file is written from bytes: cast the memoryview to 'B'")
        data = b"".join(buffers)
        if offset < 0:
            raise OSError(errno.EINVAL, f"cannot write at offset {offset}")
        if data:
            try:
                self._write(data, offset)
            finally:
                self._size = max(self._size, min(self._cached.size, offset + len(data)))
        return len(data)

    def _write(self, data: bytes, offset: int) -> None:
        disk = self._disk
        try:
            disk._begin("write", self._path, len(data))
        except SimulatedCrash as crash:
            disk._store(self._cached, data[: crash.byte], offset)
            raise
        except OSError:
            disk._store(self._cached, data[: disk._rng.randrange(len(data))], offset)
            raise
        if disk._store(self._cached, data, offset) < len(data):
            raise _error(errno.ENOSPC, self._path)

    def allocate(self, size: int) -> None:
        self._check_open()
        if size < 0:
            raise OSError(errno.EINVAL, f"cannot allocate {size} bytes")
        if size > 0:
            self._disk._begin("allocate", self._path, size)
            with self._disk._lock:
                if size - self._cached.reserved > self._disk._free():
                    raise _error(errno.ENOSPC, self._path)
                if size > self._cached.size:
                    self._cached.resize(size)
                self._cached.reserved = max(self._cached.reserved, size)
        self._size = max(self._size, size)

    def truncate(self, size: int) -> None:
        self._check_open()
        if size < 0:
            raise OSError(errno.EINVAL, f"cannot truncate to {size} bytes")
        self._disk._begin("truncate", self._path, size)
        with self._disk._lock:
            self._cached.resize(size)
        self._size = size

    def sync(self) -> None:
        self._check_open()
        until = self._cached.changes
        try:
            self._disk._begin("sync", self._path)
        except OSError:
            with self._disk._lock:
                self._cached.fail_sync(until, self._disk._rng)
            raise
        with self._disk._lock:
            self._cached.sync(until)

    def view(self) -> memoryview:
        self._check_open()
        self._disk._check_alive()
        with self._disk._lock:
            return self._cached.view(self._size)

    def unmap(self) -> None:
        self._check_open()

    def forget(self, start: int, end: int) -> None:
        self._check_open()

    def close(self) -> None:
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise _error(errno.EBADF, self._path)


@dataclass
class _Fault:
    operation: Failing
    pattern: str
    after: int
    times: int | None
    error: int


class SimulatedDisk:
    """A directory tree in memory, with the faults that the module docstring lists."""

    def __init__(self, *, capacity: int = CAPACITY_DEFAULT, seed: int = 0, on_operation: Watcher | None = None) -> None:
        self.capacity = capacity
        self.on_operation = on_operation
        #: The number of operations so far, which is also the number of the next operation.
        self.operations = 0
        self.crashed = False
        self._crash_operation = -1
        self._crash_byte = 0
        self._faults: list[_Fault] = []
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._directories = {""}
        self._names = CachedNames()

    # --- what a Disk does ------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        path = self._path_of_file(path)
        if path not in self._names.files:
            if not create:
                raise _error(errno.ENOENT, path)
            self._require_directory(posixpath.dirname(path))
            self._begin("create", path)
            with self._lock:
                if self._free() == 0:
                    raise _error(errno.ENOSPC, path)
                if path not in self._names.files:
                    self._names.change(None, path, CachedFile())
        return SimulatedFile(self, path, self._names.files[path])

    def read(self, path: str) -> bytes:
        path = self._path_of_file(path)
        if path not in self._names.files:
            raise _error(errno.ENOENT, path)
        self._fail_if_planned("read", path)
        with self._lock:
            return self._names.files[path].read()

    def list(self, path: str) -> builtins.list[str]:
        path = self._path(path)
        if path in self._names.files:
            raise _error(errno.ENOTDIR, path)
        below = f"{path}/" if path else ""
        skip = len(below)
        with self._lock:
            names = [*self._names.files, *self._directories]
        return sorted(name[skip:] for name in names if name.startswith(below) and name and "/" not in name[skip:])

    def exists(self, path: str) -> bool:
        path = self._path(path)
        return path in self._names.files or path in self._directories

    def make_directory(self, path: str) -> None:
        path = self._path(path)
        if path in self._names.files:
            raise _error(errno.EEXIST, path)
        if path in self._directories:
            return
        self.make_directory(posixpath.dirname(path))
        self._begin("make_directory", path)
        with self._lock:
            # If a file had this name, its removal or renaming becomes durable as well.
            self._names.sync_name(path)
            self._directories.add(path)

    def rename(self, source: str, target: str) -> None:
        source, target = self._path_of_file(source), self._path_of_file(target)
        if source not in self._names.files:
            raise _error(errno.ENOENT, source)
        self._require_directory(posixpath.dirname(target))
        self._begin("rename", target)
        with self._lock:
            self._names.change(source, target, self._names.files[source])

    def remove(self, path: str) -> None:
        path = self._path_of_file(path)
        if path not in self._names.files:
            return
        self._begin("remove", path)
        with self._lock:
            self._names.change(path, None, self._names.files[path])

    def sync_directory(self, path: str) -> None:
        path = self._path(path)
        self._require_directory(path)
        until = self._names.changes
        self._begin("sync_directory", path)
        with self._lock:
            self._names.sync(path, until)

    def space(self) -> tuple[int, int]:
        self._check_alive()
        with self._lock:
            return self._free(), self.capacity

    # --- what can happen to it -------------------------------------------------------------------

    def crash_at(self, operation: int, byte: int | None = None) -> None:
        """Crash when operation ``operation`` (counted from 0) begins; if it is a write, after ``byte`` of its bytes.

        After a run without a crash, ``range(disk.operations)`` has all operations at which the run can crash.
        """
        if operation < self.operations:
            raise ValueError(f"operation {operation} has passed: the next one is {self.operations}")
        self._crash_operation = operation
        self._crash_byte = byte or 0

    def fail(
        self, operation: Failing, *, path: str = "*", after: int = 0, times: int | None = 1, error: int = errno.EIO
    ) -> None:
        """Make operations of a kind raise ``OSError`` if their path matches the pattern ``path``.

        The first ``after`` such operations still succeed, and the next ``times`` fail (None: all later ones fail).
        """
        self._faults.append(_Fault(operation, path, after, times, error))

    def flip_bit(self, path: str, offset: int, bit: int) -> None:
        """Flip one bit of a stored file, without any operation."""
        cached = self._names.files[_normal(path)]
        if not (0 <= offset < cached.size and 0 <= bit < 8):
            raise ValueError(f"{path} has {cached.size} bytes of 8 bits: no bit {bit} at offset {offset}")
        with self._lock:
            cached.flip_bit(offset, bit)

    def after_crash(self, rng: random.Random | None = None, keep: Keep = "random") -> SimulatedDisk:
        """The disk as it would be after a power loss now. This disk does not change, so the call can be repeated.

        ``keep``: which unsynced changes survive: a random choice from ``rng``, "none" or "all".
        """
        rng = rng or self._rng
        with self._lock:
            return self._successor(rng, self._names.after_crash(rng, keep))

    def copy(self) -> SimulatedDisk:
        """A copy of the disk with its unsynced changes, without its faults, hook and planned crash.

        The copy of a crashed disk is what the next process finds if only the process died.
        """
        with self._lock:
            return self._successor(self._rng, self._names.copy())

    # --- inside ----------------------------------------------------------------------------------

    def _successor(self, rng: random.Random, names: CachedNames) -> SimulatedDisk:
        other = SimulatedDisk(capacity=self.capacity, seed=rng.getrandbits(32))
        other._directories = self._directories.copy()
        other._names = names
        return other

    def _check_alive(self) -> None:
        if self.crashed:
            raise SimulatedCrash("this disk has crashed; after_crash() or copy() returns the disk for the next start")

    def _begin(self, operation: Operation, path: str, size: int = 0) -> None:
        """Count the operation, and apply the faults that prevent it."""
        self._check_alive()
        with self._lock:
            number = self.operations
            self.operations += 1
        try:
            if self.on_operation is not None:
                self.on_operation(operation, path, size)
            self._check_alive()
            if number == self._crash_operation:
                raise SimulatedCrash(f"crash at operation {number}: {operation} {path}", byte=self._crash_byte)
        except SimulatedCrash:
            self.crashed = True
            raise
        self._fail_if_planned(operation, path)

    def _fail_if_planned(self, operation: Failing, path: str) -> None:
        with self._lock:
            for fault in self._faults:
                if fault.operation != operation or not fnmatchcase(path, fault.pattern) or fault.times == 0:
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                raise _error(fault.error, path)

    def _store(self, cached: CachedFile, data: bytes, offset: int) -> int:
        with self._lock:
            end = cached.reserved + self._free()
            stored = data[: max(0, end - offset)]
            cached.write(stored, offset)
            return len(stored)

    def _free(self) -> int:
        # A crash can bring back removed files next to new ones, so that they exceed the capacity.
        return max(0, self.capacity - sum([cached.reserved for cached in self._names.files.values()]))

    def _path(self, path: str) -> str:
        """The normal form of a path; raises if the disk has crashed."""
        self._check_alive()
        return _normal(path)

    def _path_of_file(self, path: str) -> str:
        """The normal form of a path; raises if the disk has crashed or if the path is a directory."""
        path = self._path(path)
        if path in self._directories:
            raise _error(errno.EISDIR, path)
        return path

    def _require_directory(self, path: str) -> None:
        if path not in self._directories:
            raise _error(errno.ENOTDIR if path in self._names.files else errno.ENOENT, path)


# Cached, because a run uses the same few paths very often.
@lru_cache(maxsize=4096)
def _normal(path: str) -> str:
    normal = posixpath.normpath(path)
    return "" if normal == "." else normal


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
