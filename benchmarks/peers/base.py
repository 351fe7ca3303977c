"""The base of every peer: a private server, three measurements, and comparable results.

A peer starts and stops its server and has five roles (functions that run in their own process, see
roles.py). The measurements are the same code for all peers, so that a difference between two figures is a
difference between two queues and not between two ways of measuring.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from benchmarks.peers.clients import is_installed
from benchmarks.peers.errors import PeerError, PeerUnavailable
from benchmarks.peers.roles import Job, Role, RunReport, run_roles
from benchmarks.peers.server import ServerProcess

PIPELINE_COUNT = 1_000
"""Messages that a producer sends, and a consumer acknowledges, at a time in the pipelined measurement."""

AWAITING_TASKS = 64
"""Tasks that each wait for their own single send in the awaiting measurement."""

LATENCY_COUNT = 2_000
"""Messages timed one by one; enough for a p99 of 20 samples."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Messages per second, and the CPU time of each message; None where it cannot be measured."""

    peer: str
    measurement: str
    body_size: int
    count: int
    seconds: float
    messages_per_second: float
    bytes_per_second: float
    server_cpu_seconds_per_message: float | None
    producer_cpu_seconds_per_message: float
    consumer_cpu_seconds_per_message: float | None
    other_cpu_share: float | None
    """The share of the machine's CPU that other processes used; above 0.1 the figure is disturbed."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Time from before the send to inside the handler of another process, one message in flight."""

    peer: str
    measurement: str
    body_size: int
    count: int
    p50_milliseconds: float
    p99_milliseconds: float
    other_cpu_share: float | None


@dataclass(frozen=True, slots=True)
class Roles:
    """The functions that a peer runs in processes of their own."""

    produce_pipelined: Role
    consume_pipelined: Role
    send_awaiting: Role
    send_one_by_one: Role
    handle_one_by_one: Role


class Peer(ABC):
    """One message queue. A context manager: the server runs inside it, and is removed afterwards."""

    name: ClassVar[str]
    variant: str = ""
    """An option for the roles, beside the job."""
    executables: ClassVar[Sequence[str]] = ()
    package: ClassVar[str] = ""
    clients: ClassVar[Mapping[str, str]] = {}
    """Module to import → the distribution that provides it."""
    roles: ClassVar[Roles]
    settings: ClassVar[Mapping[str, str]] = {}
    """How the server and the client are configured, for readers of the figures."""

    latency_pause_seconds: ClassVar[float] = 0.001
    """Time between an arrival and the next send, so that the consumer is waiting again, as on an idle queue."""

    def __init__(self) -> None:
        self.servers: list[ServerProcess] = []

    def __enter__(self) -> Self:
        self.check_available()
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the server, as `host:port`."""

    @abstractmethod
    def start(self) -> None:
        """Start the private server and return once it serves."""

    @abstractmethod
    def server_version(self) -> str:
        """The version of the running server, where it is known."""

    def prepare(self, channel: str) -> None:  # noqa: B027  most peers create the channel in their roles
        """Create the stream, queue or topic `channel`, where the roles do not create it."""

    def discard(self, channel: str) -> None:  # noqa: B027  a private server is thrown away as a whole
        """Remove what a measurement stored, so that the next one starts with an empty queue."""

    def stop(self) -> None:
        """End the started servers and remove their data. Idempotent."""
        for server in reversed(self.servers):
            server.stop()
        self.servers.clear()

    def check_available(self) -> None:
        """Raise PeerUnavailable when a program or a Python client is missing."""
        missing = [name for name in self.executables if shutil.which(name) is None]
        if missing:
            hint = f"; tools/debian-install {self.package}" if self.package else ""
            raise PeerUnavailable(f"{self.name}: {', '.join(missing)} not found on the PATH{hint}")
        for module, distribution in {**self.clients, "psutil": "psutil"}.items():
            if not is_installed(module):
                raise PeerUnavailable(f"{self.name}: no Python client; pip install {distribution}")

    def client_versions(self) -> dict[str, str]:
        """The versions of the Python distributions the roles use."""
        return {name: importlib.metadata.version(name) for name in self.clients.values()}

    def server_cpu_seconds(self) -> float | None:
        """CPU time of the server's processes so far; None if this program did not start the server."""
        return sum(server.cpu_seconds() for server in self.servers) if self.servers else None

    def resident_size(self) -> int | None:
        """Resident bytes of the server's processes; None if this program did not start the server."""
        return sum(server.resident_size() for server in self.servers) if self.servers else None

    def pipelined(self, body_size: int, count: int) -> Throughput:
        """Produce in pipelines of 1,000 and consume with acks, in two processes: first send to last ack."""
        job = self._job(body_size, count)
        run = self._run(job, self.roles.produce_pipelined, self.roles.consume_pipelined)
        return self._throughput("pipelined", job, run)

    def awaiting_64(self, body_size: int, count: int) -> Throughput:
        """64 tasks in one process, each awaiting its own single send before the next."""
        job = self._job(body_size, count - count % AWAITING_TASKS or AWAITING_TASKS)
        run = self._run(job, self.roles.send_awaiting, None)
        return self._throughput("awaiting_64", job, run)

    def latency(self, body_size: int, count: int = LATENCY_COUNT) -> Latency:
        """One message at a time between two processes; p50 and p99 of send to handler."""
        job = self._job(body_size, count)
        run = self._run(job, self.roles.send_one_by_one, self.roles.handle_one_by_one)
        samples = sorted(run.consumer.latencies_ns) if run.consumer is not None else []
        if not samples:
            raise PeerError(f"{self.name}: no message arrived in the latency measurement")
        return Latency(
            peer=self.name,
            measurement="latency",
            body_size=body_size,
            count=len(samples),
            p50_milliseconds=samples[len(samples) // 2] / 1e6,
            p99_milliseconds=samples[min(len(samples) - 1, len(samples) * 99 // 100)] / 1e6,
            other_cpu_share=_other_cpu_share(run),
        )

    def _job(self, body_size: int, count: int) -> Job:
        return Job(
            address=self.address,
            channel=f"plait-bench-{uuid.uuid4().hex[:12]}",
            body_size=body_size,
            count=count,
            pipeline_count=PIPELINE_COUNT,
            tasks=AWAITING_TASKS,
            pause_seconds=self.latency_pause_seconds,
            variant=self.variant,
        )

    def _run(self, job: Job, produce: Role, consume: Role | None) -> RunReport:
        self.prepare(job.channel)
        try:
            return run_roles(job, produce, consume, self.server_cpu_seconds)
        finally:
            self.discard(job.channel)

    def _throughput(self, measurement: str, job: Job, run: RunReport) -> Throughput:
        last = run.consumer if run.consumer is not None else run.producer
        seconds = (last.ended_ns - run.producer.started_ns) / 1e9
        return Throughput(
            peer=self.name,
            measurement=measurement,
            body_size=job.body_size,
            count=job.count,
            seconds=seconds,
            messages_per_second=job.count / seconds,
            bytes_per_second=job.count * job.body_size / seconds,
            server_cpu_seconds_per_message=(
                None if run.server_cpu_seconds is None else run.server_cpu_seconds / job.count
            ),
            producer_cpu_seconds_per_message=run.producer.cpu_seconds / job.count,
            consumer_cpu_seconds_per_message=(None if run.consumer is None else run.consumer.cpu_seconds / job.count),
            other_cpu_share=_other_cpu_share(run),
        )


def _other_cpu_share(run: RunReport) -> float | None:
    if run.server_cpu_seconds is None:
        return None
    ours = run.server_cpu_seconds + run.producer.cpu_seconds
    ours += run.consumer.cpu_seconds if run.consumer is not None else 0.0
    capacity = run.seconds * (os.cpu_count() or 1)
    return round(max(0.0, run.busy_seconds - ours) / capacity, 3)
