"""Delayed messages: how late they are when many are due, and the cost of ten million waiting ones.

Frames are built here and sent as raw packets, so that only the broker is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import uvloop

from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result
from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.view import frames_in
from plait.limits import MIB
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, HEADER_SIZE, pack

SUBJECT = "later"
BODY_SIZE = 100
PRODUCER = 7
#: Sends without an answer yet, at most.
IN_FLIGHT = 16
HOUR = 3600.0

Times = npt.NDArray[np.int64]


class Wire:
    """One connection that sends requests without a client."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("plait://").rpartition(":")
        self._place = host, int(port)
        self._correlation = 0
        self._sent = 1
        self._waiting: deque[int] = deque()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._place, limit=64 * MIB)
        await self.ask(m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, "bench"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def _write(self, message: m.PacketHead, payload: bytes = b"") -> None:
        self._correlation += 1
        self._writer.write(pack(message.KIND, self._correlation, codec.encode(message), len(payload)) + payload)

    async def _answer(self) -> tuple[Any, memoryview]:
        size, kind, _, _, head_size = HEADER.unpack(await self._reader.readexactly(HEADER_SIZE))
        body = memoryview(await self._reader.readexactly(size - HEADER_SIZE))
        message = codec.decode(kind, body[:head_size])
        if isinstance(message, m.ErrorReply):
            raise codec.error_of(message)
        return message, body[head_size + (-head_size & 7) :]

    async def ask(self, message: m.PacketHead) -> Any:
        self._write(message)
        return (await self._answer())[0]

    async def read(self, position: int | str) -> tuple[int, memoryview]:
        """(the next position, frames) from a position on; waits until there are rows."""
        start = position if isinstance(position, str) else ("sequence", position)
        self._write(m.ReadRequest(SUBJECT, start, 1_000_000, 8 * MIB, 1.0))
        head, payload = await self._answer()
        return head.next, payload

    async def schedule(self, due: Times, rows: int) -> None:
        """Delay messages until these times, in frames of ``rows``."""
        # The meta server creates the subject.
        await self.ask(m.RouteRequest(SUBJECT))
        partition = (await self.ask(m.PartitionNumberRequest(SUBJECT, delayed=True))).partition
        body = np.random.default_rng(1).bytes(BODY_SIZE * rows)
        offsets = np.arange(0, BODY_SIZE * rows + 1, BODY_SIZE, dtype=np.int32)
        for start in range(0, len(due), rows):
            times = due[start : start + rows]
            bodies = pa.Array.from_buffers(pa.binary(), len(times), [None, pa.py_buffer(offsets), pa.py_buffer(body)])
            previous = self._sent - 1
            frame = build_frame(
                bodies,
                producer=PRODUCER,
                first=self._sent,
                previous=previous,
                send_time=time.time_ns() // 1000,
                deliver_at=times,
            )
            self._sent += len(times)
            self._write(m.SendRequest(partition), frame.tobytes())
            self._waiting.append(0)
            await self._writer.drain()
            if len(self._waiting) >= IN_FLIGHT:
                self._waiting.popleft()
                await self._answer()
        while self._waiting:
            self._waiting.popleft()
            await self._answer()

    async def scheduled(self) -> int:
        """The number of delayed messages that are not due yet."""
        answer = await self.ask(m.AdminRequest("server.describe", {}))
        return int(msgspec.msgpack.decode(answer.result)["scheduled"])


# --- lateness -----------------------------------------------------------------------------------


def lateness(smoke: bool) -> Iterator[Result]:
    """10,000 messages due every second at random times: in the log only, then in buckets."""
    rate, seconds = (1_000, 1) if smoke else (10_000, 15)
    for bucketed in (False, True):
        with PlaitServer() as server:
            late, stored, count = uvloop.run(_lateness(server, rate, seconds, bucketed))
        where = "in buckets" if bucketed else "in the log"
        details = {"messages": count, "early": int((late < 0).sum()), "p50_ms": float(np.median(late)) / 1000}
        details["worst_ms"] = float(late.max()) / 1000
        # When the broker stored them in their partition; the rest is the delivery to the reader.
        details["stored_p99_ms"] = float(np.quantile(stored, 0.99)) / 1000
        p99 = float(np.quantile(late, 0.99)) / 1000
        yield Result(f"lateness p99 at 10,000 due/s, {where}", p99, 50, "ms", at_most=True, details=details)
        if details["early"] or count != rate * seconds:
            raise AssertionError(f"{count} of {rate * seconds} messages arrived, {details['early']} of them early")


async def _lateness(server: PlaitServer, rate: int, seconds: int, bucketed: bool) -> tuple[Times, Times, int]:
    rng = np.random.default_rng(2)
    begin = time.time_ns() // 1000 + (3 + 3 * bucketed) * 1_000_000
    due = begin + rng.integers(0, seconds * 1_000_000, rate * seconds)
    async with Wire(server.address) as wire:
        await wire.schedule(due, 500)
    if bucketed:
        # At its start the broker puts the delayed rows of the log into buckets.
        server.kill()
        server.start()
    late: list[Times] = []
    stored: list[Times] = []
    count = 0
    async with Wire(server.address) as wire:
        position: int | str = "earliest"
        while count < len(due):
            position, payload = await wire.read(position)
            now = time.time_ns() // 1000
            for frame in frames_in(payload):
                late.append(now - frame.fixed(Column.DELIVER_AT))
                stored.append(frame.store_time - frame.fixed(Column.DELIVER_AT))
                count += frame.count
    return np.concatenate(late), np.concatenate(stored), count


# --- many ---------------------------------------------------------------------------------------


def ten_million(smoke: bool) -> Iterator[Result]:
    """10 M delayed messages, due in an hour to a day: resident memory, and the time to ``ready`` after SIGKILL."""
    count = 20_000 if smoke else 10_000_000
    with PlaitServer() as server:
        seconds, peak = uvloop.run(_schedule(server, count))
        after_sending = server.resident_bytes()
        server.kill()
        server.start()
        first = server.ready_seconds
        server.kill()
        server.start()
        restarts = [first, server.ready_seconds]
        resident = server.resident_bytes()
        assert uvloop.run(_count(server)) == count
    details = {"messages": count, "sending_seconds": seconds, "peak_mib": peak / MIB, "sent_mib": after_sending / MIB}
    yield Result("resident with 10 M scheduled", max(peak, resident) / MIB, 500, "MiB", at_most=True, details=details)
    yield Result("restart with 10 M scheduled", max(restarts), 10, "s", at_most=True, details={"seconds": restarts})


async def _schedule(server: PlaitServer, count: int) -> tuple[float, int]:
    rng = np.random.default_rng(3)
    started = time.monotonic()
    peak = 0
    async with Wire(server.address) as wire:
        for start in range(0, count, 100_000):
            size = min(100_000, count - start)
            now = time.time_ns() // 1000
            await wire.schedule(now + rng.integers(int(HOUR * 1e6), int(24 * HOUR * 1e6), size), 5_000)
            peak = max(peak, server.resident_bytes())
    return time.monotonic() - started, peak


async def _count(server: PlaitServer) -> int:
    async with Wire(server.address) as wire:
        return await wire.scheduled()
