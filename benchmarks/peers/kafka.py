"""Kafka, one node in KRaft mode, one partition, through confluent-kafka.

Measured at the address in PLAIT_BENCH_KAFKA (`host:port`) when that is set, otherwise on a private node
started from Maven Central's artefacts. Like every Kafka by default, it leaves syncing its files to the
operating system.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Roles
from benchmarks.peers.clients import client_module
from benchmarks.peers.errors import PeerError
from benchmarks.peers.maven import copy_jars
from benchmarks.peers.roles import Job, Stopwatch, run_async
from benchmarks.peers.server import LOOPBACK, ServerProcess, accepts, free_port

KAFKA_VERSION = "4.1.0"
ADDRESS_VARIABLE = "PLAIT_BENCH_KAFKA"
KEYS = 1_000
POLL_SECONDS_MAX = 30.0
START_SECONDS_MAX = 120.0
HEAP = ("-Xms1g", "-Xmx1g")
"""Kafka's own default."""

GROUP = "group"
LOG_WARNINGS = 4


def _producer(job: Job, **options: Any) -> Any:
    return client_module("confluent_kafka").Producer({"bootstrap.servers": job.address, "acks": "all", **options})


def _consumer(job: Job, **options: Any) -> Any:
    """A consumer of the topic's only partition from its beginning, without waiting for a rebalance."""
    kafka = client_module("confluent_kafka")
    consumer = kafka.Consumer(
        {
            "bootstrap.servers": job.address,
            "group.id": f"{job.channel}-{GROUP}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            **options,
        }
    )
    consumer.assign([kafka.TopicPartition(job.channel, 0, 0)])
    # The first poll opens the connection, which must not be measured.
    consumer.poll(1.0)
    return consumer


def _raise_failed(error: Any) -> None:
    if error is not None:
        raise PeerError(f"Kafka refused a message: {error}")


def _produce_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    producer = _producer(job, **{"batch.num.messages": job.pipeline_count})
    producer.list_topics(job.channel)
    body = job.body
    keys = [b"key-%d" % number for number in range(KEYS)]

    def delivered(error: Any, _: Any) -> None:
        _raise_failed(error)

    with stopwatch:
        for numbers in job.pipelines():
            for number in numbers:
                while True:
                    try:
                        producer.produce(job.channel, body, keys[number % KEYS], on_delivery=delivered)
                        break
                    except BufferError:
                        producer.poll(0.1)
            producer.poll(0)
        producer.flush()


def _consume_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    consumer = _consumer(job)
    remaining = job.count
    with stopwatch:
        while remaining:
            messages = consumer.consume(job.pipeline_count, timeout=1.0)
            for message in messages:
                _raise_failed(message.error())
                message.value()
            remaining -= len(messages)
            if messages and remaining:
                consumer.commit(message=messages[-1], asynchronous=True)
        consumer.commit(message=messages[-1], asynchronous=False)
    consumer.close()


def _send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        producer = _producer(job, **{"linger.ms": 0})
        producer.list_topics(job.channel)
        body = job.body
        stopped = threading.Event()

        def resolve(future: asyncio.Future[None], error: Any) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(PeerError(f"Kafka refused a message: {error}"))

        def poll() -> None:
            while not stopped.is_set():
                producer.poll(0.1)

        async def send() -> None:
            for _ in range(job.count // job.tasks):
                future: asyncio.Future[None] = loop.create_future()
                producer.produce(
                    job.channel,
                    body,
                    on_delivery=lambda error, _, future=future: loop.call_soon_threadsafe(resolve, future, error),
                )
                await future

        poller = threading.Thread(target=poll)
        poller.start()
        try:
            with stopwatch:
                await asyncio.gather(*(send() for _ in range(job.tasks)))
        finally:
            stopped.set()
            poller.join()

    run_async(main())


def _send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    producer = _producer(job, **{"linger.ms": 0})
    producer.list_topics(job.channel)
    with stopwatch:
        for body in stopwatch.stamped_bodies(job):
            producer.produce(job.channel, body)
            producer.flush()


def _handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    consumer = _consumer(job)
    more = True
    with stopwatch:
        while more:
            message = consumer.poll(POLL_SECONDS_MAX)
            if message is None:
                raise PeerError(f"no message within {POLL_SECONDS_MAX:.0f} s")
            _raise_failed(message.error())
            more = stopwatch.arrived(message.value())
            consumer.commit(message=message, asynchronous=True)
            if more:
                stopwatch.acked()
    consumer.close()


class Kafka(Peer):
    """A given Kafka, or a private one-node Kafka."""

    name = "kafka"
    clients: ClassVar = {"confluent_kafka": "confluent-kafka"}
    settings: ClassVar = {
        "server": "one node in KRaft mode, one partition, 1 GiB heap, no forced flush",
        "pipelined": "keyed, acks=all, batches of 1,000, delivery callbacks; consume(1000), then commit",
        "awaiting_64": "produce with a future for each message, a thread polling, linger.ms=0",
        "key": "1,000 keys",
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
        self._address = os.environ.get(ADDRESS_VARIABLE, "")
        self._given = bool(self._address)
        self._admin_client: Any = None

    @property
    def address(self) -> str:
        return self._address

    def start(self) -> None:
        if self._given:
            return
        port, controller_port = free_port(), free_port()
        server = ServerProcess(self.name)
        self.servers.append(server)
        jars = copy_jars([f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}"], server.directory)
        config = server.directory / "server.properties"
        config.write_text(_properties(server.directory, port, controller_port))
        java = ["java", *HEAP, "-cp", f"{jars}/*"]
        _format_storage(java, config)
        server.start([*java, "kafka.Kafka", str(config)], ready=lambda: accepts(port), seconds_max=START_SECONDS_MAX)
        self._address = f"{LOOPBACK}:{port}"

    def stop(self) -> None:
        # The client first: it logs errors about a server that ends before it.
        self._admin_client = None
        super().stop()

    def server_version(self) -> str:
        return "unknown: a given address" if self._given else KAFKA_VERSION

    def prepare(self, channel: str) -> None:
        topic = client_module("confluent_kafka.admin").NewTopic(channel, num_partitions=1, replication_factor=1)
        for created in self._admin().create_topics([topic]).values():
            created.result(POLL_SECONDS_MAX)

    def discard(self, channel: str) -> None:
        for deleted in self._admin().delete_topics([channel]).values():
            deleted.result(POLL_SECONDS_MAX)

    def _admin(self) -> Any:
        # Kept, because the futures it returns fail once the client is garbage-collected.
        if self._admin_client is None:
            self._admin_client = client_module("confluent_kafka.admin").AdminClient(
                {"bootstrap.servers": self._address, "log_level": LOG_WARNINGS}
            )
        return self._admin_client


def _format_storage(java: list[str], config: Path) -> None:
    storage_tool = [*java, "kafka.tools.StorageTool"]
    identity = subprocess.run([*storage_tool, "random-uuid"], capture_output=True, text=True)
    cluster = identity.stdout.strip().splitlines()[-1:] or [""]
    formatted = subprocess.run(
        [*storage_tool, "format", "-t", cluster[0], "-c", str(config)], capture_output=True, text=True
    )
    if formatted.returncode != 0:
        raise PeerError(f"Kafka could not format its storage: {formatted.stdout}{formatted.stderr}")


def _properties(directory: Path, port: int, controller_port: int) -> str:
    values = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{LOOPBACK}:{controller_port}",
        "listeners": f"PLAINTEXT://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": str(directory / "data"),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())
