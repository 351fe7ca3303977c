"""RabbitMQ's stream, through rstream. The consumer's ack is the offset that it stores at the server once
per batch."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Roles
from benchmarks.peers.clients import client_module
from benchmarks.peers.rabbitmq_server import PASSWORD, USER, RabbitNode, rabbitmq_version
from benchmarks.peers.roles import Job, Stopwatch, run_async
from benchmarks.peers.server import LOOPBACK

PIPELINES_IN_FLIGHT = 4
"""Batches without confirms at a time, so that the producer is not idle for a round trip after each."""

GROUP = "group"


def _producer(job: Job) -> Any:
    return client_module("rstream").Producer(job.host, job.port, username=USER, password=PASSWORD)


def _consumer(job: Job) -> Any:
    return client_module("rstream").Consumer(job.host, job.port, username=USER, password=PASSWORD)


def _produce_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        producer = _producer(job)
        await producer.start()
        body = job.body
        confirmed = 0
        sent = 0
        progress = asyncio.Event()

        def on_confirm(status: Any) -> None:
            nonlocal confirmed
            if not status.is_confirmed:
                raise RuntimeError(f"message {status.message_id} was refused: {status.response_code}")
            confirmed += 1
            progress.set()

        async def until_at_most(in_flight: int) -> None:
            while sent - confirmed > in_flight:
                progress.clear()
                await progress.wait()

        with stopwatch:
            for numbers in job.pipelines():
                await until_at_most((PIPELINES_IN_FLIGHT - 1) * job.pipeline_count)
                sent += len(numbers)
                await producer.send_batch(job.channel, [body] * len(numbers), on_publish_confirm=on_confirm)
            await until_at_most(0)
        await producer.close()

    run_async(main())


def _consume_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        consumer = _consumer(job)
        await consumer.start()
        finished = asyncio.Event()
        arrived = 0

        async def store(offset: int) -> None:
            await consumer.store_offset(job.channel, GROUP, offset)
            if arrived == job.count:
                finished.set()

        def handle(_: bytes, context: Any) -> Any:
            nonlocal arrived
            arrived += 1
            if arrived % job.pipeline_count == 0 or arrived == job.count:
                return store(context.offset)
            return None

        await consumer.subscribe(job.channel, handle, decoder=bytes, subscriber_name=GROUP)
        with stopwatch:
            await finished.wait()
        await consumer.close()

    run_async(main())


def _send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        producer = _producer(job)
        await producer.start()
        body = job.body

        async def send() -> None:
            for _ in range(job.count // job.tasks):
                await producer.send_wait(job.channel, body)

        with stopwatch:
            await asyncio.gather(*(send() for _ in range(job.tasks)))
        await producer.close()

    run_async(main())


def _send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        producer = _producer(job)
        await producer.start()
        with stopwatch:
            for body in stopwatch.stamped_bodies(job):
                await producer.send_wait(job.channel, body)
        await producer.close()

    run_async(main())


def _handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        consumer = _consumer(job)
        await consumer.start()
        finished = asyncio.Event()

        async def handle(body: bytes, context: Any) -> None:
            more = stopwatch.arrived(body)
            await consumer.store_offset(job.channel, GROUP, context.offset)
            if more:
                stopwatch.acked()
            else:
                finished.set()

        await consumer.subscribe(job.channel, handle, decoder=bytes, subscriber_name=GROUP)
        with stopwatch:
            await finished.wait()
        await consumer.close()

    run_async(main())


class RabbitStream(Peer):
    """A private RabbitMQ node with one stream for each measurement."""

    name = "rabbitmq-stream"
    executables = ("rabbitmq-server", "epmd")
    package = "rabbitmq-server"
    clients: ClassVar = {"rstream": "rstream"}
    settings: ClassVar = {
        "server": "one stream, default retention",
        "pipelined": "send_batch of 1,000 raw bodies, 4 in flight; offset stored each 1,000",
        "awaiting_64": "send_wait on one connection",
        "key": "none: a plain stream has no key",
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
        self._node = RabbitNode(self.servers)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._node.stream_port}"

    def start(self) -> None:
        self._node.start()

    def server_version(self) -> str:
        return rabbitmq_version()

    def prepare(self, channel: str) -> None:
        async def create() -> None:
            async with self._admin() as producer:
                await producer.create_stream(channel)

        asyncio.run(create())

    def discard(self, channel: str) -> None:
        async def delete() -> None:
            async with self._admin() as producer:
                await producer.delete_stream(channel)

        asyncio.run(delete())

    def _admin(self) -> Any:
        return client_module("rstream").Producer(LOOPBACK, self._node.stream_port, username=USER, password=PASSWORD)
