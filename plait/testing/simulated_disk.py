"""A disk in memory that fails the ways real disks do, from a seed.

``SimulatedDisk`` passes the same contract tests as ``plait.storage.disk.RealDisk``. Its faults:

- **Crash (power loss).** Operation number ``n`` raises ``SimulatedCrash`` before it takes effect, a write
  when some of its bytes have reached the page cache; from then on every call raises. ``after_crash`` gives
  the disk that the next start finds, as often as wanted, each time with another choice of survivors:

  - Unsynced writes survive in any subset, torn at sectors of 512 bytes; a sector written several times holds
    any of its states since the last sync. Growth (by writing, ``allocate`` or ``truncate``) survives in
    part, and a file may be longer than the data in it: the rest is zeros. A cut survives or not; what was
    written above a lost one is lost with it.
  - A created, renamed or removed name is certain once its directory was synced (a rename between
    directories: both). Before that each is kept or lost by itself, except that changes of one name keep
    their order; a rename is one change: the file has its old name or its new one. Syncing a file does not
    keep its name.
  - Directories are durable when ``make_directory`` returns.

- **Kill (the process dies, the machine does not).** ``copy`` of a crashed disk: the page cache is whole, and
  unsynced changes are still unsynced.
- **No space.** The space of named files counts against ``capacity``: up to the end of what was written or
  allocated; what ``truncate`` adds is a hole, as on Linux. A write that lacks space stores what fits and raises
  ENOSPC; ``allocate`` then changes nothing; a new file needs a free byte.
- **I/O errors.** ``fail`` makes chosen operations raise. A write that fails may have stored a part. A sync
  that fails leaves each unsynced sector on the medium or not, and clean: a later sync succeeds and writes
  none of it, while reads show it until the crash, as on Linux. Other operations that fail change nothing.
- **Slow I/O.** ``on_operation`` is called before each operation takes effect, outside any lock: it may
  advance a clock, block, or raise ``SimulatedCrash`` or ``OSError``. A sync covers what was there when it
  was called, not what came while it was blocked.
- **Bit rot.** ``flip_bit``.

Operations are what changes the disk: create, write, sync, truncate, allocate, rename, remove, make_directory
(one for each directory made) and sync_directory. Reading is none.
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

#: Enough for several small segments; files live whole in memory.
CAPACITY_DEFAULT = 256 * 1024 * 1024


class SimulatedCrash(BaseException):
    """The machine stopped here. Not an ``Exception``, so that no handler continues after it."""

    def __init__(self, message: str = "simulated crash", *, byte: int = 0) -> None:
        super().__init__(message)
        #: How much of the write it interrupted had reached the page cache.
        self.byte = byte


class SimulatedFile:
    """One handle; like a real one it learns a new size from its own calls only."""

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
        #: How many operations were begun; the next one has this number.
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
            # The name may have been a file's, whose removal or renaming is then certain as well.
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
        """Crash when operation ``operation`` (counted from 0) begins; a write after ``byte`` bytes of it.

        ``range(disk.operations)`` of a run that did not crash names all its crash points.
        """
        if operation < self.operations:
            raise ValueError(f"operation {operation} has passed: the next one is {self.operations}")
        self._crash_operation = operation
        self._crash_byte = byte or 0

    def fail(
        self, operation: Failing, *, path: str = "*", after: int = 0, times: int | None = 1, error: int = errno.EIO
    ) -> None:
        """Make such operations on paths matching a pattern raise ``OSError``.

        ``after`` of them still succeed, the next ``times`` fail (None: all from then on).
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
        """The disk after a power loss now. This disk does not change, so that the call can be repeated.

        ``keep``: which unsynced changes survive: a choice drawn from ``rng``, "none" or "all" of them.
        """
        rng = rng or self._rng
        with self._lock:
            return self._successor(rng, self._names.after_crash(rng, keep))

    def copy(self) -> SimulatedDisk:
        """A copy of the disk with its unsynced changes, without its faults, hook and planned crash.

        Of a crashed disk: what the next process finds when only the process died.
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
            raise SimulatedCrash("this disk has crashed; use after_crash() or copy() for the next one")

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
        # A crash can restore removed files beside new ones, beyond the capacity.
        return max(0, self.capacity - sum([cached.reserved for cached in self._names.files.values()]))

    def _path(self, path: str) -> str:
        """The normal form of a path; raises if the disk has crashed."""
        self._check_alive()
        return _normal(path)

    def _path_of_file(self, path: str) -> str:
        """The same, for a path that must not be a directory's."""
        path = self._path(path)
        if path in self._directories:
            raise _error(errno.EISDIR, path)
        return path

    def _require_directory(self, path: str) -> None:
        if path not in self._directories:
            raise _error(errno.ENOTDIR if path in self._names.files else errno.ENOENT, path)


# A run names the same few files again and again.
@lru_cache(maxsize=4096)
def _normal(path: str) -> str:
    normal = posixpath.normpath(path)
    return "" if normal == "." else normal


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
