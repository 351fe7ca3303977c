"""Crashes a running broker at every disk operation and inside every write.

The trace runs once. At each crash point the explorer copies the disk, crashes the copy, starts a broker on it and
checks the broker. Then the trace continues on the original disk.

At some points a bit flips in a frame of the catalog. At some points syncs fail and the process ends. The next process
then starts with the same page cache, serves senders and consumers, and loses power.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable

from plait.broker.turn import MESSAGE_DIRECTORY
from plait.errors import StorageFailed
from plait.storage.catalog import CATALOG
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from plait.storage.logs.action_log import DIRECTORY as ACTION_DIRECTORY
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogScan
from plait.storage.logs.retained_log import DIRECTORY as KEPT_DIRECTORY
from plait.storage.logs.segment import segment_name
from plait.testing.cached_file import SECTOR_SIZE, CachedFile
from plait.testing.simulated_disk import Operation, SimulatedCrash, SimulatedDisk
from tests.support.broker_checker import check, served
from tests.support.broker_node import Node
from tests.support.broker_trace import Trace

LOGS = (MESSAGE_DIRECTORY, KEPT_DIRECTORY, ACTION_DIRECTORY)

#: Makes the disk that the next start finds from the disk at a crash point.
Survive = Callable[[SimulatedDisk, random.Random], SimulatedDisk]


def kill(disk: SimulatedDisk, rng: random.Random) -> SimulatedDisk:
    """The disk after the process died. The page cache survives."""
    return disk.copy()


def power_loss(disk: SimulatedDisk, rng: random.Random) -> SimulatedDisk:
    """The disk after a power loss. A random part of the unsynced changes survives."""
    return disk.after_crash(rng)


def either(disk: SimulatedDisk, rng: random.Random) -> SimulatedDisk:
    """The disk after a power loss or, in one of four cases, after the process died."""
    return kill(disk, rng) if rng.random() < 0.25 else power_loss(disk, rng)


def every_byte(offset: int, size: int) -> list[int]:
    """Crash points at every byte of a write."""
    return list(range(1, size))


class ExploredDisk(SimulatedDisk):
    """Calls ``on_point`` before every operation and inside every write, with a function that copies the disk."""

    def __init__(self, bytes_of: Callable[[int, int], list[int]]) -> None:
        super().__init__(on_operation=self._before)
        #: (offset, size) of a write → how many of its bytes are written at each crash point.
        self._bytes_of = bytes_of
        self.on_point: Callable[[Callable[[], SimulatedDisk], str], None] | None = None

    def _before(self, operation: Operation, path: str, size: int) -> None:
        if self.on_point is not None:
            self.on_point(self.copy, f"{operation} {path}")

    def _write(self, cached: CachedFile, path: str, data: bytes, offset: int) -> None:
        if self.on_point is not None:
            # Crash points inside trailing zeros are all equal.
            for size in self._bytes_of(offset, len(data.rstrip(b"\0")) + 1):
                self.on_point(
                    functools.partial(self._written_in_part, path, data[:size], offset),
                    f"byte {size} of {len(data)}, write {path}",
                )
        super()._write(cached, path, data, offset)

    def _written_in_part(self, path: str, data: bytes, offset: int) -> SimulatedDisk:
        part = self.copy()
        part.open(path).write([data], offset)
        return part


class Explorer:
    """Runs a trace and crashes it at all its points."""

    def __init__(
        self,
        seed: int,
        flush: str,
        survive: Survive,
        *,
        bytes_of: Callable[[int, int], list[int]] | None = None,
        all_written: bool = True,
        operations: int = 200,
        every: int = 1,
        first: int = 0,
    ) -> None:
        self._rng = random.Random(seed)
        self._survive = survive
        self._all_written = all_written
        self._every = every
        self._first = first
        self._disk = ExploredDisk(bytes_of or self._some_bytes)
        self.trace = Trace(seed, flush, self._disk, operations=operations)
        #: The number of crash points so far, and the number of points at which a copy crashed.
        self.points = 0
        self.crashes = 0
        self.double_crashes = 0
        #: The number of points at which syncs failed and the next start used the same page cache.
        self.failed_syncs = 0

    def run(self) -> None:
        self._disk.on_point = self._point
        self.trace.run()

    def _some_bytes(self, offset: int, size: int) -> list[int]:
        """The sector boundaries inside a write, and some offsets between."""
        chosen = set(range(-offset % SECTOR_SIZE, size, SECTOR_SIZE))
        chosen.update(self._rng.sample(range(size), min(size, 3)))
        return sorted(chosen - {0})

    def _point(self, moment: Callable[[], SimulatedDisk], where: str) -> None:
        number = self.points
        self.points += 1
        if number % self._every != self._first:
            return
        self.crashes += 1
        try:
            if number % 11 == 2:
                self._fail_syncs(moment(), number)
                return
            if number % 13 == 4:
                found = moment()
                flipped = self._flip_catalog_bit(found)
                check(found, self.trace, drained=number, all_written=True, flipped=flipped)
                return
            found = self._survive(moment(), self._rng)
            if number % 7 == 0:
                found = self._crash_recovery(found)
            if number % 9 == 0:
                self._spoil_checkpoint(found)
            check(found, self.trace, drained=number, all_written=self._all_written)
        except Exception as error:
            error.add_note(f"crash point {number}: {where}")
            raise

    def _fail_syncs(self, disk: SimulatedDisk, number: int) -> None:
        """Let syncs of logs fail and the process end. The next one serves on the same page cache and loses power."""
        self.failed_syncs += 1
        rng = self._rng
        for log in rng.sample(LOGS, rng.randint(1, 3)):
            for name in disk.list(log):
                disk.fail("sync", path=f"{log}/{name}")
                with contextlib.suppress(OSError):
                    disk.open(f"{log}/{name}").sync()
        if rng.random() < 0.3:
            disk = self._fail_recovery(disk.copy())
        with served(disk.copy(), self.trace, number, crash=lambda disk: disk.after_crash(rng)) as found:
            if rng.random() < 0.5:
                self._spoil_checkpoint(found)
            # The page cache had everything that was written, so nothing acknowledged is lost in any mode.
            check(found, self.trace, drained=number, all_written=True)

    def _fail_recovery(self, disk: SimulatedDisk) -> SimulatedDisk:
        """A sync during a start fails, too."""
        disk.fail("sync", path=f"{self._rng.choice(LOGS)}/*", after=self._rng.randrange(2))
        with contextlib.suppress(StorageFailed, OSError):
            Node(disk, self.trace.clock, self.trace.config)
        return disk

    def _flip_catalog_bit(self, disk: SimulatedDisk) -> bool:
        """Flip one bit of a frame that defines partitions, most often after the newest checkpoint.

        The last frame is not flipped, because recovery would remove it as a frame that the crash interrupted.
        """
        log = Log(disk.copy(), MESSAGE_DIRECTORY, 8192)
        scanned = list(LogScan(log, log.start))[:-1]
        frames = [(offset, frame.size) for offset, frame in scanned if frame.partition == CATALOG]
        if not frames:
            return False
        offset, size = frames[-min(len(frames), self._rng.randint(1, 6))]
        base = log.segment_at(offset).base
        at = offset - base + self._rng.randrange(size)
        disk.flip_bit(f"{MESSAGE_DIRECTORY}/{segment_name(base)}", at, self._rng.randrange(8))
        return True

    @staticmethod
    def _spoil_checkpoint(disk: SimulatedDisk) -> None:
        """Damage the newest checkpoint, so that a start uses the one before."""
        manifests = [name for name in disk.list(CHECKPOINTS) if name.startswith("manifest") and "." not in name]
        if len(manifests) > 1 and len(disk.read(f"{CHECKPOINTS}/{manifests[-1]}")) > 20:
            disk.flip_bit(f"{CHECKPOINTS}/{manifests[-1]}", 20, 2)

    def _crash_recovery(self, disk: SimulatedDisk) -> SimulatedDisk:
        """Crash recovery itself, up to three times."""
        for _ in range(3):
            disk.crash_at(disk.operations + self._rng.randrange(30), self._rng.randrange(600))
            try:
                Node(disk, self.trace.clock, self.trace.config)
            except SimulatedCrash:
                self.double_crashes += 1
            disk = self._survive(disk, self._rng)
        return disk
