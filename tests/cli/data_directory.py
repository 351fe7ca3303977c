"""A data directory with every kind of file, created once and copied for each test that damages it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from crc32c import crc32c

import plait
from plait.broker import BrokerConfig
from plait.doctor import CheckReport, examine
from plait.frame.view import FrameView
from plait.server import Server
from plait.storage.disk import RealDisk

SUBJECTS = ("orders", "payments")
#: Messages per subject and per frame.
COUNT = 400
BATCH = 20
SEGMENT_SIZE = 8 * 1024


async def make(path: Path) -> None:
    """Create two subjects over several segments, two groups and several checkpoints, and stop cleanly."""
    config = BrokerConfig(message_segment_size=SEGMENT_SIZE, action_segment_size=SEGMENT_SIZE)
    server = Server(RealDisk(path), config, port=0)
    await server.start()
    async with plait.connect(server.address) as client:
        for start in range(0, COUNT, BATCH):
            for subject in SUBJECTS:
                await client.send_many(subject, [f"{subject}-{n:04d}".encode() for n in range(start, start + BATCH)])
            if start == COUNT // 2:
                server.broker.snapshots.make()
        for subject in SUBJECTS:
            async with client.consumer(subject, "readers") as consumer:
                batch = await consumer.fetch(COUNT // 2, wait=5.0)
                await batch.ack()
    await server.stop()


def frames(path: Path) -> list[tuple[int, FrameView]]:
    """(position, frame) of every frame of one log file."""
    data = path.read_bytes()
    found = []
    position = 0
    while position < len(data) and data[position : position + 2] == b"PL":
        frame = FrameView(data, position)
        found.append((position, frame))
        position += frame.size
    return found


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def fingerprint(path: Path) -> dict[str, tuple[str, int, int]]:
    """(content, size, modification time) of every file and directory under a path."""
    return {
        entry.relative_to(path).as_posix(): (
            hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else "",
            entry.stat().st_size,
            entry.stat().st_mtime_ns,
        )
        for entry in sorted(path.rglob("*"))
    }


def check(data: Path) -> CheckReport:
    """Check a data directory and assert that nothing in it changed."""
    before = fingerprint(data)
    report = examine(data, lambda name, done, total: None)
    assert fingerprint(data) == before
    return report


def make_newer(data: Path) -> None:
    """Give the newest checkpoint a format version that this version of Plait does not know."""
    manifest = max((data / "checkpoints").glob("manifest-*"))
    body = msgspec.msgpack.encode(msgspec.msgpack.decode(manifest.read_bytes()[8:]) | {"version": 99})
    manifest.write_bytes(b"PLCK" + crc32c(body).to_bytes(4, "little") + body)
