"""NATS JetStream with file storage, through nats-py.

A subject takes the place of a key in NATS, so the pipelined producer spreads its messages over 16 subjects
of one stream. The server syncs its files by its own default (every two minutes).
"""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Roles
from benchmarks.peers.clients import client_module
from benchmarks.peers.roles import Job, Stopwatch, run_async
from benchmarks.peers.server import LOOPBACK, ServerProcess, accepts, free_port

KEYS = 16
FETCH_SECONDS_MAX = 30.0
ACK_PENDING_COUNT_MAX = 10_000
DURABLE = "group"


async def _connect(job: Job) -> tuple[Any, Any]:
    connection = await client_module("nats").connect(f"nats://{job.address}")
    return connection, connection.jetstream(publish_async_max_pending=2 * job.pipeline_count)


def _produce_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection, jetstream = await _connect(job)
        body = job.body
        subjects = [f"{job.channel}.{key}" for key in range(KEYS)]
        with stopwatch:
            for numbers in job.pipelines():
                acks = [await jetstream.publish_async(subjects[number % KEYS], body) for number in numbers]
                await asyncio.gather(*acks)
        await connection.close()

    run_async(main())


def _consume_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection, jetstream = await _connect(job)
        config = client_module("nats.js.api").ConsumerConfig(max_ack_pending=ACK_PENDING_COUNT_MAX)
        subscription = await jetstream.pull_subscribe(
            f"{job.channel}.*", durable=DURABLE, stream=job.channel, config=config
        )
        remaining = job.count
        with stopwatch:
            while remaining:
                messages = await subscription.fetch(min(job.pipeline_count, remaining), timeout=FETCH_SECONDS_MAX)
                for message in messages:
                    await message.ack()
                remaining -= len(messages)
            await connection.flush()
        await connection.close()

    run_async(main())


def _send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection, jetstream = await _connect(job)
        body = job.body

        async def send(subject: str) -> None:
            for _ in range(job.count // job.tasks):
                await jetstream.publish(subject, body)

        with stopwatch:
            await asyncio.gather(*(send(f"{job.channel}.{task % KEYS}") for task in range(job.tasks)))
        await connection.close()

    run_async(main())


def _send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection, jetstream = await _connect(job)
        with stopwatch:
            for body in stopwatch.stamped_bodies(job):
                await jetstream.publish(f"{job.channel}.0", body)
        await connection.close()

    run_async(main())


def _handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection, jetstream = await _connect(job)
        finished = asyncio.Event()

        async def handle(message: Any) -> None:
            more = stopwatch.arrived(message.data)
            await message.ack()
            if more:
                stopwatch.acked()
            else:
                finished.set()

        await jetstream.subscribe(f"{job.channel}.*", durable=DURABLE, stream=job.channel, cb=handle, manual_ack=True)
        with stopwatch:
            await finished.wait()
        await connection.close()

    run_async(main())


class NatsJetStream(Peer):
    """A private nats-server with JetStream and one file-backed stream for each measurement."""

    name = "nats"
    executables = ("nats-server",)
    package = "nats-server"
    clients: ClassVar = {"nats": "nats-py"}
    settings: ClassVar = {
        "server": "JetStream, file storage, one replica, default sync interval",
        "pipelined": "publish_async in rounds of 1,000, acks awaited; pull fetch(1000), explicit acks",
        "awaiting_64": "jetstream.publish on one connection",
        "key": "16 subjects of one stream",
    }
    roles = Roles(
        produce_pipelined=_produce_pipelined,
        consume_pipelined=_consume_pipelined,
        send_awaiting=_send_awaiting,
        send_one_by_one=_send_one_by_one,
        handle_one_by_one=_handle_one_by_one,
    )

    def __init__(self) -> None:
        super().__init__()
        self._port = 0

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._port}"

    def start(self) -> None:
        self._port = free_port()
        server = ServerProcess(self.name)
        self.servers.append(server)
        server.start(
            ["nats-server", "-js", "-sd", str(server.directory), "-a", LOOPBACK, "-p", str(self._port)],
            ready=lambda: accepts(self._port),
        )

    def server_version(self) -> str:
        answer = subprocess.run(["nats-server", "--version"], capture_output=True, text=True, check=True)
        return answer.stdout.strip().removeprefix("nats-server: v")

    def prepare(self, channel: str) -> None:
        async def create() -> None:
            connection = await client_module("nats").connect(f"nats://{self.address}")
            file_storage = client_module("nats.js.api").StorageType.FILE
            await connection.jetstream().add_stream(name=channel, subjects=[f"{channel}.*"], storage=file_storage)
            await connection.close()

        asyncio.run(create())

    def discard(self, channel: str) -> None:
        async def delete() -> None:
            connection = await client_module("nats").connect(f"nats://{self.address}")
            await connection.jetstream().delete_stream(channel)
            await connection.close()

        asyncio.run(delete())
