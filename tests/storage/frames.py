"""Helpers for log tests: stamped frames, logs that are written, and logs that are read back."""

from __future__ import annotations

import random
from collections.abc import Sequence

from plait.frame.builder import FrameParts, build_frame, pack_stamp
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogScan, settle
from plait.testing.simulated_disk import SimulatedDisk

DIRECTORY = "message"
SEGMENT_SIZE = 4096


def frame(
    body: bytes, *, base: int = 0, durable: int = 0, epoch: int = 1, partition: int = 1, previous_end: int | None = None
) -> FrameParts:
    """A frame with one row; a segment header if ``previous_end`` is given."""
    producer = 7 if previous_end is None else 0
    built = build_frame([body], producer=producer, first=base + 1, previous=previous_end or 0)
    built.stamp_with(pack_stamp(partition, base, 1_700_000_000_000_000, durable, epoch))
    return built


def body_of(found: FrameView) -> bytes:
    (body,) = found.binary(Column.BODY).to_pylist()
    return bytes(body)


def open_log(disk: SimulatedDisk, segment_size: int = SEGMENT_SIZE) -> Log:
    return Log(disk, DIRECTORY, segment_size)


def append(log: Log, *bodies: bytes, durable: int | None = None) -> list[int]:
    """Append a frame for each body, stamped with the durable offset of the log. Returns their offsets."""
    offsets = []
    for body in bodies:
        built = frame(body, durable=log.durable if durable is None else durable)
        offsets.append(log.append(built.parts, built.size))
    return offsets


def written(bodies: Sequence[bytes], segment_size: int = SEGMENT_SIZE) -> tuple[SimulatedDisk, Log, list[int]]:
    """A log with a frame for each body, written and synced. No frame names a durable offset."""
    disk = SimulatedDisk()
    log = open_log(disk, segment_size)
    offsets = append(log, *bodies, durable=0)
    log.sync()
    return disk, log, offsets


def scan(disk: SimulatedDisk, durable: int = 0, start: int = 0) -> tuple[Log, LogScan, list[bytes]]:
    """Read a log back and settle it. Returns the log, the scan and the bodies of the valid frames."""
    log = open_log(disk)
    found = LogScan(log, max(start, log.start), durable)
    bodies = [body_of(view) for _, view in found]
    settle(disk, log, found)
    return log, found, bodies


def overwrite(disk: SimulatedDisk, offset: int, data: bytes, segment_size: int = SEGMENT_SIZE) -> None:
    """Change bytes of the log, durably."""
    base = offset - offset % segment_size
    file = disk.open(f"{DIRECTORY}/{base:020d}.log")
    file.write([data], offset - base)
    file.sync()


def some_bodies(count: int, size: int = 100, seed: int = 1) -> list[bytes]:
    """Different bodies without zero bytes."""
    rng = random.Random(seed)
    return [f"{n:04d}".encode() + bytes(rng.choices(range(1, 256), k=size - 4)) for n in range(count)]
