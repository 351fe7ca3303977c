"""An audit of a large log: messages of one strict subject, consumed by a shared group and by an ordered one.

``python -m benchmarks audit``, or this module alone. The logs are written through the storage classes, with the content
of a run without faults: frames of 200 messages of 100 bytes with 100,000 keys. The shared group pulls 200 messages at a
time and acks 100; the ordered group has four owners, and each acks its rows of a frame. The bar is the time from the
call to the report, in a session that already runs; the memory is that of the largest worker.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

import plait.spark
from benchmarks.result import Result
from plait.broker.appender import ActionBuffer
from plait.client.send.open_rows import hash_keys
from plait.frame.builder import FrameParts, build_frame, pack_stamp
from plait.frame.view import wrap_binary
from plait.limits import GIB, MIB
from plait.model.settings import SubjectSettings
from plait.storage.catalog import PartitionRow, catalog_frame
from plait.storage.disk import RealDisk
from plait.storage.logs.action_events import Acked, Moved, Pulled
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.logs.log import Log

SUBJECT = "order.book"
COUNT = 10_000_000
BODY_SIZE = 100
KEYS = 100_000
FRAME_COUNT = 200
OWNERS = 4
BAR_SECONDS = 180.0
START = 1_700_000_000_000_000
#: Time between two frames, and from a frame to its acks.
STEP_MICROS = 1_000
LOOK_SECONDS = 0.2

SHARED, ORDERED = 1, 2
PARTITION = PartitionRow(1, SUBJECT, SUBJECT, START, SubjectSettings(order="strict"))


class LogWriter:
    """Writes the message log and the action log of a run."""

    def __init__(self, data: Path) -> None:
        disk = RealDisk(data)
        self.messages = Log(disk, "message", GIB)
        self.actions = Log(disk, "action", 128 * MIB)
        self.messages.on_segment = self._head
        self._index = 0
        self._chance = np.random.default_rng(1)
        names = [f"order-{number:06d}" for number in range(KEYS)]
        self._keys = pa.array(names, pa.string()).cast(pa.binary())
        self._hashes = hash_keys(names, KEYS)
        self._bodies = wrap_binary(
            np.arange(0, (FRAME_COUNT + 1) * BODY_SIZE, BODY_SIZE, dtype=np.int32),
            memoryview(self._chance.bytes(FRAME_COUNT * BODY_SIZE)),
        )
        buffer = ActionBuffer()
        buffer.define(GroupDefinition(SHARED, 1, "billing", 0, False, "at_least_once", START))
        buffer.define(GroupDefinition(ORDERED, 1, "mail", 0, False, "at_least_once", START, ordered=True))
        for owner in range(1, OWNERS):
            first, end = owner * 1024 // OWNERS, (owner + 1) * 1024 // OWNERS
            buffer.event(Moved(1, first, end, to=owner + 1), ORDERED, 1)
        self._act(buffer, START)

    @staticmethod
    def _head(previous_end: int) -> list[FrameParts]:
        return [catalog_frame([PARTITION], time=START, durable=0, epoch=1, previous_end=previous_end)]

    def write(self, count: int) -> None:
        """Write ``count`` messages, and the pulls and acks of both groups."""
        for start in range(0, count, FRAME_COUNT):
            self._frame(start, START + start // FRAME_COUNT * STEP_MICROS)
            if start // FRAME_COUNT % 256 == 0:
                self.messages.write()
                self.actions.write()
        for log in (self.messages, self.actions):
            log.write()
            log.close()

    def _frame(self, start: int, now: int) -> None:
        chosen = self._chance.integers(0, KEYS, FRAME_COUNT)
        keys = self._keys.take(pa.array(chosen))
        hashes = self._hashes[chosen]
        frame = build_frame(self._bodies, producer=7, first=start + 1, send_time=now, keys=keys, key_hashes=hashes)
        frame.stamp_with(pack_stamp(1, start, now + 100, self.messages.written, 1))
        self.messages.append(frame.parts, frame.size)
        buffer = ActionBuffer()
        end, half = start + FRAME_COUNT, start + FRAME_COUNT // 2
        buffer.event(Pulled(1, False, 1, start, end), SHARED, 1)
        buffer.event(Acked(0, False, 1, start, half), SHARED, 1)
        buffer.event(Acked(0, False, 1, half, end), SHARED, 1)
        for owner in range(OWNERS):
            buffer.event(Acked(0, False, owner + 1, start, end), ORDERED, 1)
        self._act(buffer, now + 1_000)

    def _act(self, buffer: ActionBuffer, now: int) -> None:
        self._index = buffer.build_frames(self._index, (0, 0), 1, now)
        for frame in buffer.frames:
            self.actions.append(frame.parts, frame.size)


class PeakMemory:
    """The largest resident memory of any Python worker while this is open."""

    def __init__(self) -> None:
        self.size = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name().startswith("python"):
                        self.size = max(self.size, process.memory_info().rss)
                except psutil.Error:
                    continue


def run(count: int = COUNT) -> dict[str, Any]:
    """Write the logs and audit them."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as root:
        LogWriter(Path(root)).write(count)
        spark = plait.spark.session("plait-bench", master="local[2]")
        try:
            with PeakMemory() as memory:
                started = time.perf_counter()
                report = plait.spark.audit(root, spark=spark)
                seconds = time.perf_counter() - started
        finally:
            spark.stop()
        groups = report.groups()
        if not report.held or [group.acked for group in groups] != [count, count]:
            raise RuntimeError(f"the audit of a run without faults reports {groups}")
        return {
            "count": count,
            "seconds": seconds,
            "messages_per_second": count / seconds,
            "log_bytes": sum(path.stat().st_blocks * 512 for path in Path(root).rglob("*.log")),
            "worker_bytes": memory.size,
            "driver_bytes": psutil.Process().memory_info().rss,
        }


def results(smoke: bool) -> Iterator[Result]:
    """The bar: ten million messages and two groups."""
    figures = run(20_000) if smoke else run()
    name = f"Spark audit of {figures['count']:,} messages, two groups"
    yield Result(name, figures["seconds"], BAR_SECONDS, "s", at_most=True, details=figures)


if __name__ == "__main__":
    import sys

    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT), indent=1))
