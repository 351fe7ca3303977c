"""RabbitMQ's classic queue, durable, persistent messages, publisher confirms, through aio-pika."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Roles
from benchmarks.peers.clients import client_module
from benchmarks.peers.rabbitmq_server import PASSWORD, USER, RabbitNode, rabbitmq_version
from benchmarks.peers.roles import Job, Stopwatch, run_async
from benchmarks.peers.server import LOOPBACK


async def _connect(job: Job) -> Any:
    return await client_module("aio_pika").connect(host=job.host, port=job.port, login=USER, password=PASSWORD)


def _message(body: bytes) -> Any:
    aio_pika = client_module("aio_pika")
    return aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)


def _produce_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection = await _connect(job)
        channel = await connection.channel(publisher_confirms=True)
        exchange = channel.default_exchange
        message = _message(job.body)
        with stopwatch:
            for numbers in job.pipelines():
                await asyncio.gather(*(exchange.publish(message, job.channel) for _ in numbers))
        await connection.close()

    run_async(main())


def _consume_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection = await _connect(job)
        channel = await connection.channel()
        # Two batches: the next one is under way while the last waits for its ack.
        await channel.set_qos(prefetch_count=2 * job.pipeline_count)
        queue = await channel.declare_queue(job.channel, durable=True)
        finished = asyncio.Event()
        arrived = 0

        async def handle(message: Any) -> None:
            nonlocal arrived
            arrived += 1
            if arrived % job.pipeline_count == 0 or arrived == job.count:
                await message.ack(multiple=True)
            if arrived == job.count:
                finished.set()

        await queue.consume(handle)
        with stopwatch:
            await finished.wait()
        await connection.close()

    run_async(main())


def _send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection = await _connect(job)
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(job.channel, durable=True)
        exchange = channel.default_exchange
        message = _message(job.body)

        async def send() -> None:
            for _ in range(job.count // job.tasks):
                await exchange.publish(message, job.channel)

        with stopwatch:
            await asyncio.gather(*(send() for _ in range(job.tasks)))
        await channel.queue_delete(job.channel)
        await connection.close()

    run_async(main())


def _send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection = await _connect(job)
        channel = await connection.channel(publisher_confirms=True)
        with stopwatch:
            for body in stopwatch.stamped_bodies(job):
                await channel.default_exchange.publish(_message(body), job.channel)
        await connection.close()

    run_async(main())


def _handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        connection = await _connect(job)
        channel = await connection.channel()
        queue = await channel.declare_queue(job.channel, durable=True)
        finished = asyncio.Event()

        async def handle(message: Any) -> None:
            more = stopwatch.arrived(message.body)
            await message.ack()
            if more:
                stopwatch.acked()
            else:
                finished.set()

        await queue.consume(handle)
        with stopwatch:
            await finished.wait()
        await connection.close()

    run_async(main())


class RabbitClassic(Peer):
    """A private RabbitMQ node with one classic queue for each measurement."""

    name = "rabbitmq-classic"
    executables = ("rabbitmq-server", "epmd")
    package = "rabbitmq-server"
    clients: ClassVar = {"aio_pika": "aio-pika"}
    settings: ClassVar = {
        "server": "durable classic queue, persistent messages, publisher confirms",
        "pipelined": "1,000 publishes at a time, confirms awaited; acks with multiple=True each 1,000",
        "awaiting_64": "exchange.publish with confirms on one channel",
        "key": "none: a queue has no key",
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
        return f"{LOOPBACK}:{self._node.amqp_port}"

    def start(self) -> None:
        self._node.start()

    def server_version(self) -> str:
        return rabbitmq_version()
