"""RocketMQ, one name server, one broker with its proxy, through rocketmq-python-client 5 (gRPC).

Measured at the proxy in PLAIT_BENCH_ROCKETMQ (`host:port`, with its name server in
PLAIT_BENCH_ROCKETMQ_NAMESERVER) when that is set, otherwise on a private broker started from Maven
Central's artefacts. The name server and the broker listen on loopback; for the proxy RocketMQ has no such
setting, so its random port is open while this runs.

The figures are those of the Python client, which sends one message for each gRPC call and receives at most
32 at a time; RocketMQ's Java client uses another protocol and is not measured.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Roles
from benchmarks.peers.clients import client_module
from benchmarks.peers.errors import PeerError, PeerUnavailable
from benchmarks.peers.maven import copy_jars
from benchmarks.peers.roles import ROLE_SECONDS_MAX, Job, Stopwatch, run_async
from benchmarks.peers.server import LOOPBACK, ServerProcess, accepts, free_port

ROCKETMQ_VERSION = "5.5.0"
ADDRESS_VARIABLE = "PLAIT_BENCH_ROCKETMQ"
NAMESERVER_VARIABLE = "PLAIT_BENCH_ROCKETMQ_NAMESERVER"
CLUSTER = "DefaultCluster"
GROUP = "group"
QUEUES = 4
RECEIVE_COUNT_MAX = 32
"""The broker returns no more than this for one receive."""

RECEIVES_IN_FLIGHT = 8
INVISIBLE_SECONDS = 120
LONG_POLL_SECONDS = 10
START_SECONDS_MAX = 120.0
ADMIN_SECONDS_MAX = 60.0
JAVA_EXPORTS = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)


def _client(job: Job) -> Any:
    # The client writes a log under the home directory as soon as it is imported.
    os.environ["HOME"] = job.variant
    # Receives and acks in progress at shutdown end in tracebacks from its callbacks.
    logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL + 1)
    return client_module("rocketmq")


def _configuration(rocketmq: Any, job: Job) -> Any:
    return rocketmq.ClientConfiguration(job.address, rocketmq.Credentials(), request_timeout=30)


def _producer(rocketmq: Any, job: Job) -> Any:
    producer = rocketmq.Producer(_configuration(rocketmq, job), (job.channel,))
    producer.startup()
    return producer


def _message(rocketmq: Any, job: Job, body: bytes) -> Any:
    message = rocketmq.Message()
    message.topic = job.channel
    message.body = body
    return message


def _produce_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    rocketmq = _client(job)
    producer = _producer(rocketmq, job)
    body = job.body
    with stopwatch:
        for numbers in job.pipelines():
            receipts = [producer.send_async(_message(rocketmq, job, body)) for _ in numbers]
            for receipt in receipts:
                receipt.result()
    producer.shutdown()


def _consume_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    rocketmq = _client(job)
    consumer = rocketmq.SimpleConsumer(
        _configuration(rocketmq, job),
        GROUP,
        {job.channel: rocketmq.FilterExpression()},
        await_duration=LONG_POLL_SECONDS,
    )
    consumer.startup()
    remaining = job.count

    def receive() -> Any:
        return consumer.receive_async(RECEIVE_COUNT_MAX, INVISIBLE_SECONDS)

    with stopwatch:
        receives = {receive() for _ in range(RECEIVES_IN_FLIGHT)}
        while remaining > 0:
            done, receives = concurrent.futures.wait(receives, return_when=concurrent.futures.FIRST_COMPLETED)
            messages = [message for received in done for message in received.result()]
            receives |= {receive() for _ in done}
            remaining -= len(messages)
            for message in messages:
                consumer.ack_async(message)
        # The client gives no future for these acks; a second ack of the last message is awaited instead.
        consumer.ack(messages[-1])
    consumer.shutdown()


def _send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    async def main() -> None:
        rocketmq = _client(job)
        producer = _producer(rocketmq, job)
        body = job.body

        async def send() -> None:
            for _ in range(job.count // job.tasks):
                await asyncio.wrap_future(producer.send_async(_message(rocketmq, job, body)))

        with stopwatch:
            await asyncio.gather(*(send() for _ in range(job.tasks)))
        producer.shutdown()

    run_async(main())


def _send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    rocketmq = _client(job)
    producer = _producer(rocketmq, job)
    with stopwatch:
        for body in stopwatch.stamped_bodies(job):
            producer.send(_message(rocketmq, job, body))
    producer.shutdown()


def _handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    rocketmq = _client(job)
    finished = threading.Event()

    def consume(_: Any, message: Any) -> Any:
        if stopwatch.arrived(message.body):
            stopwatch.acked()
        else:
            finished.set()
        return rocketmq.ConsumeResult.SUCCESS

    listener = type("Listener", (rocketmq.MessageListener,), {"consume": consume})()
    consumer = rocketmq.PushConsumer(
        _configuration(rocketmq, job), GROUP, listener, {job.channel: rocketmq.FilterExpression()}
    )
    consumer.startup()
    with stopwatch:
        if not finished.wait(ROLE_SECONDS_MAX):
            raise PeerError("the last message did not arrive")
    consumer.shutdown()


class RocketMQ(Peer):
    """A given RocketMQ proxy, or a private name server and broker with a proxy inside."""

    name = "rocketmq"
    clients: ClassVar = {"rocketmq": "rocketmq-python-client"}
    settings: ClassVar = {
        "server": "one broker with its proxy in one process, ASYNC_FLUSH, 4 queues, 2 GiB heap",
        "pipelined": "send_async in rounds of 1,000; SimpleConsumer, 8 receives of 32 in flight",
        "awaiting_64": "send_async, its future awaited",
        "latency": "PushConsumer with a listener, 20 ms between messages",
        "key": "none: a message group asks for another kind of topic",
    }
    roles = Roles(
        produce_pipelined=_produce_pipelined,
        consume_pipelined=_consume_pipelined,
        send_awaiting=_send_awaiting,
        send_one_by_one=_send_one_by_one,
        handle_one_by_one=_handle_one_by_one,
    )

    # A message that arrives between two polls of the consumer may wait until the next poll ends.
    latency_pause_seconds = 0.02

    def __init__(self) -> None:
        super().__init__()
        self._address = os.environ.get(ADDRESS_VARIABLE, "")
        self._nameserver = os.environ.get(NAMESERVER_VARIABLE, "")
        self._given = bool(self._address)
        self._files: ServerProcess | None = None
        self._java: list[str] = []

    @property
    def address(self) -> str:
        return self._address

    def start(self) -> None:
        if self._given and not self._nameserver:
            raise PeerUnavailable(f"{ADDRESS_VARIABLE} needs {NAMESERVER_VARIABLE} to create topics")
        self._files = ServerProcess(f"{self.name}-files")
        directory = self._files.directory
        self.variant = str(directory)
        artefacts = [
            f"org.apache.rocketmq:rocketmq-{part}:{ROCKETMQ_VERSION}" for part in ("namesrv", "proxy", "tools")
        ]
        jars = copy_jars(artefacts, directory)
        home = [f"-Drocketmq.home.dir={directory}", f"-Duser.home={directory}"]
        self._java = ["java", *home, *JAVA_EXPORTS, "-cp", f"{jars}/*"]
        if not self._given:
            self._start_nameserver()
            self._start_broker()
        self._admin("updateSubGroup", "-g", GROUP)

    def stop(self) -> None:
        super().stop()
        if self._files is not None:
            self._files.stop()
            self._files = None

    def server_version(self) -> str:
        return "unknown: a given address" if self._given else ROCKETMQ_VERSION

    def prepare(self, channel: str) -> None:
        self._admin("updateTopic", "-t", channel, "-r", str(QUEUES), "-w", str(QUEUES), "-a", "+message.type=NORMAL")

    def discard(self, channel: str) -> None:
        self._admin("deleteTopic", "-t", channel)

    def _start_nameserver(self) -> None:
        port = free_port()
        server = ServerProcess("rocketmq-nameserver")
        self.servers.append(server)
        config = _written(server.directory / "namesrv.conf", f"listenPort={port}\nbindAddress={LOOPBACK}\n")
        server.start(
            [*self._java, "-Xmx512m", "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", str(config)],
            ready=lambda: accepts(port),
            seconds_max=START_SECONDS_MAX,
        )
        self._nameserver = f"{LOOPBACK}:{port}"

    def _start_broker(self) -> None:
        # The broker also takes the ports two below and one above its own.
        port = free_port(neighbours=(-2, 1))
        proxy_port, remoting_port = free_port(), free_port()
        server = ServerProcess("rocketmq-broker")
        self.servers.append(server)
        broker = {
            "brokerClusterName": CLUSTER,
            "brokerName": "broker",
            "brokerId": "0",
            "brokerIP1": LOOPBACK,
            "bindAddress": LOOPBACK,
            "listenPort": str(port),
            "namesrvAddr": self._nameserver,
            "storePathRootDir": str(server.directory / "store"),
            "flushDiskType": "ASYNC_FLUSH",
        }
        proxy = {
            "proxyMode": "LOCAL",
            "rocketMQClusterName": CLUSTER,
            "namesrvAddr": self._nameserver,
            "localServeAddr": LOOPBACK,
            "grpcServerPort": proxy_port,
            "remotingListenPort": remoting_port,
        }
        broker_config = _written(
            server.directory / "broker.conf", "".join(f"{name}={value}\n" for name, value in broker.items())
        )
        proxy_config = _written(server.directory / "proxy.json", json.dumps(proxy))
        server.start(
            [
                *self._java,
                "-Xms1g",
                "-Xmx2g",
                "org.apache.rocketmq.proxy.ProxyStartup",
                *(
                    "-pm",
                    "local",
                    "-pc",
                    str(proxy_config),
                    "-bc",
                    str(broker_config),
                    "-n",
                    self._nameserver,
                ),
            ],
            ready=lambda: accepts(proxy_port),
            seconds_max=START_SECONDS_MAX,
        )
        self._address = f"{LOOPBACK}:{proxy_port}"

    def _admin(self, command: str, *arguments: str) -> None:
        answer = subprocess.run(
            [
                *self._java,
                "org.apache.rocketmq.tools.command.MQAdminStartup",
                command,
                *("-n", self._nameserver, "-c", CLUSTER, *arguments),
            ],
            capture_output=True,
            text=True,
            timeout=ADMIN_SECONDS_MAX,
        )
        if "success" not in answer.stdout:
            raise PeerError(f"RocketMQ's {command} failed: {answer.stdout}{answer.stderr}")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
