"""The limits of the machine: bytes per second over loopback, and a bare asyncio round trip."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

PIECE_SIZE = 256 * 1024
_context = multiprocessing.get_context("spawn")


def _send_bytes(port: int, size: int) -> None:
    piece = bytes(PIECE_SIZE)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(size // PIECE_SIZE):
            connection.sendall(piece)


def loopback_bytes_per_second(size: int) -> float:
    """Two blocking Python sockets in two processes, in pieces of 256 KiB."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = _context.Process(target=_send_bytes, args=(listener.getsockname()[1], size))
        process.start()
        connection, _ = listener.accept()
        buffer = bytearray(PIECE_SIZE)
        received = 0
        with connection:
            received += connection.recv_into(buffer)
            started = time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            seconds = time.perf_counter() - started
        process.join()
    return received / seconds


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


def _run(main: Coroutine[Any, Any, T], *, quick: bool) -> T:
    return uvloop.run(main) if quick else asyncio.run(main)


def _echo_server(gate: multiprocessing.connection.Connection, quick: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Echo, "127.0.0.1", 0)
        gate.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    _run(main(), quick=quick)


class _Caller(asyncio.Protocol):
    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.answered.set_result(None)


def asyncio_round_trip_seconds(count: int, size: int, pause_seconds: float, *, quick: bool = False) -> float:
    """Median round trip of one message between two processes, on asyncio's own loop or (quick) on uvloop."""
    gate, far = _context.Pipe()
    process = _context.Process(target=_echo_server, args=(far, quick), daemon=True)
    process.start()
    port = gate.recv()

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        transport, caller = await loop.create_connection(_Caller, "127.0.0.1", port)
        body = bytes(size)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            transport.write(body)
            await caller.answered
            times.append(time.perf_counter() - started)
            caller.answered = loop.create_future()
            time.sleep(pause_seconds)  # noqa: ASYNC251  the same pause as in the measurement that this is compared with
        transport.close()
        return times

    try:
        return statistics.median(_run(main(), quick=quick)[count // 10 :])
    finally:
        process.terminate()
        process.join()


def fdatasync_seconds(directory: Path, count: int, size: int) -> float:
    """Median of one small write and fdatasync into a preallocated file."""
    path = directory / "fdatasync-probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, 64 << 20)
        os.fsync(fd)
        body = bytes(size)
        times = []
        for number in range(count):
            os.pwrite(fd, body, number * size)
            started = time.perf_counter()
            os.fdatasync(fd)
            times.append(time.perf_counter() - started)
    finally:
        os.close(fd)
        path.unlink()
    return statistics.median(times)
