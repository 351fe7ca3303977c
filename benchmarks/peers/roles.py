"""Producer and consumer in their own processes, started together and timed on one clock.

Each role connects first, then waits inside `with stopwatch:` until the other is connected too, so that
neither starting Python nor opening connections is measured. Times are CLOCK_MONOTONIC, which all processes
of a machine share; CPU is the role's own process time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.context
import struct
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from benchmarks.peers.clients import client_module, is_installed
from benchmarks.peers.errors import PeerError
from benchmarks.peers.server import machine_busy_seconds

ROLE_SECONDS_MAX = 180.0
"""A role that takes longer than this is taken to hang, and is ended."""

ROLE_READY_SECONDS_MAX = 60.0
ROLE_CLOSE_SECONDS_MAX = 5.0

LATENCY_WARMUP_COUNT = 100
LATENCY_SECONDS_MAX = 8.0

_STAMP = struct.Struct("<Q")
_STOP_NS = 0


@dataclass(frozen=True, slots=True)
class Job:
    """The work of a role."""

    address: str
    channel: str
    body_size: int
    count: int
    pipeline_count: int
    tasks: int
    pause_seconds: float
    variant: str = ""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def body(self) -> bytes:
        """The body of every message of a throughput measurement."""
        return b"x" * self.body_size

    def pipelines(self) -> Iterator[range]:
        """The message numbers, divided into pipelines."""
        for start in range(0, self.count, self.pipeline_count):
            yield range(start, min(start + self.pipeline_count, self.count))


@dataclass(slots=True)
class RoleReport:
    """A role's measurement of itself."""

    started_ns: int = 0
    ended_ns: int = 0
    cpu_seconds: float = 0.0
    latencies_ns: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The measurements of the roles, and the CPU that the server and the whole machine used meanwhile."""

    producer: RoleReport
    consumer: RoleReport | None
    server_cpu_seconds: float | None
    seconds: float
    busy_seconds: float


class Stopwatch:
    """Measures the block `with stopwatch:`; entering waits until every role is ready."""

    def __init__(self, gate: Connection, peer: Connection, report: RoleReport) -> None:
        self._gate = gate
        self._peer = peer
        self._report = report
        self._cpu_start = 0.0

    def __enter__(self) -> Stopwatch:
        self._gate.send("ready")
        self._gate.recv_bytes()
        self._cpu_start = time.process_time()
        self._report.started_ns = time.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._report.ended_ns = time.monotonic_ns()
        self._report.cpu_seconds = time.process_time() - self._cpu_start
        if error is None:
            # Reported before the role closes its connections: closing is not part of the measurement.
            self._gate.send(self._report)

    def stamped_bodies(self, job: Job) -> Iterator[bytes]:
        """Bodies to send one by one; the next one waits until the last has arrived and is acked."""
        padding = b"x" * (job.body_size - _STAMP.size)
        deadline = 0.0
        for number in range(LATENCY_WARMUP_COUNT + job.count):
            if number == LATENCY_WARMUP_COUNT:
                deadline = time.monotonic() + LATENCY_SECONDS_MAX
            yield _STAMP.pack(time.monotonic_ns()) + padding
            if not self._peer.poll(ROLE_SECONDS_MAX):
                raise TimeoutError(f"a message did not arrive within {ROLE_SECONDS_MAX:.0f} s")
            self._peer.recv_bytes()
            if number >= LATENCY_WARMUP_COUNT and time.monotonic() > deadline:
                break
            time.sleep(job.pause_seconds)
        yield _STAMP.pack(_STOP_NS) + padding

    def arrived(self, body: bytes) -> bool:
        """Called first by the handler; False when this was the last message."""
        now_ns = time.monotonic_ns()
        (sent_ns,) = _STAMP.unpack_from(body)
        if sent_ns == _STOP_NS:
            del self._report.latencies_ns[:LATENCY_WARMUP_COUNT]
            return False
        self._report.latencies_ns.append(now_ns - sent_ns)
        return True

    def acked(self) -> None:
        """Called once the handler has sent its ack: the next message may be sent."""
        self._peer.send_bytes(b"1")


Role = Callable[[Job, Stopwatch], None]


def run_roles(job: Job, produce: Role, consume: Role | None, cpu_clock: Callable[[], float | None]) -> RunReport:
    """Run the roles in new processes and return their reports; on any failure end both and raise PeerError."""
    context = multiprocessing.get_context("spawn")
    to_producer, to_consumer = context.Pipe()
    running: list[tuple[BaseProcess, Connection]] = []
    try:
        # The consumer starts first: it must have subscribed before anything is sent.
        if consume is not None:
            running.append(_start(context, consume, job, to_producer))
        running.append(_start(context, produce, job, to_consumer))
        cpu_before, busy_before, started = cpu_clock(), machine_busy_seconds(), time.monotonic()
        for _, gate in running:
            gate.send_bytes(b"go")
        reports = _reports([gate for _, gate in running])
        cpu_after, busy_after, ended = cpu_clock(), machine_busy_seconds(), time.monotonic()
        for process, _ in running:
            process.join(timeout=ROLE_CLOSE_SECONDS_MAX)
    finally:
        to_producer.close()
        to_consumer.close()
        for process, gate in running:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            gate.close()
    return RunReport(
        producer=reports[-1],
        consumer=reports[0] if consume is not None else None,
        server_cpu_seconds=None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
        seconds=ended - started,
        busy_seconds=busy_after - busy_before,
    )


def run_async(main: Coroutine[Any, Any, None]) -> None:
    """Run a role's coroutine on uvloop where it is installed, as the documentation of the peers advises."""
    factory = client_module("uvloop").new_event_loop if is_installed("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def _start(
    context: multiprocessing.context.SpawnContext, role: Role, job: Job, peer: Connection
) -> tuple[BaseProcess, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_enter, args=(role, job, theirs, peer), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(ROLE_READY_SECONDS_MAX):
            raise PeerError(f"{role.__name__} was not ready within {ROLE_READY_SECONDS_MAX:.0f} s")
        message = _receive(ours, role.__name__)
        if isinstance(message, RoleReport):
            raise PeerError(f"{role.__name__} failed before it was ready:\n{message.error}")
    except BaseException:
        process.kill()
        process.join()
        ours.close()
        raise
    return process, ours


def _reports(gates: Sequence[Connection]) -> list[RoleReport]:
    reports: dict[int, RoleReport] = {}
    deadline = time.monotonic() + ROLE_SECONDS_MAX
    while len(reports) < len(gates):
        waiting = [gate for index, gate in enumerate(gates) if index not in reports]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise PeerError(f"a role did not finish within {ROLE_SECONDS_MAX:.0f} s")
        for index, gate in enumerate(gates):
            if gate in ready:
                report = _receive(gate, "a role")
                if not isinstance(report, RoleReport) or report.error:
                    raise PeerError(f"a role failed:\n{getattr(report, 'error', report)}")
                reports[index] = report
    return [reports[index] for index in range(len(gates))]


def _receive(gate: Connection, name: str) -> object:
    try:
        return gate.recv()
    except EOFError:
        raise PeerError(f"{name} ended without a report") from None


def _enter(role: Role, job: Job, gate: Connection, peer: Connection) -> None:
    report = RoleReport()
    try:
        role(job, Stopwatch(gate, peer, report))
    except BaseException:  # noqa: BLE001  the parent has to receive every failure of a role
        if not report.ended_ns:
            gate.send(RoleReport(error=traceback.format_exc()))
