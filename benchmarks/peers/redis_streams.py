"""Redis Streams with an append-only file synced every second, through redis-py.

The stream entry has one field, the body: Redis has no message key, and a second field would only slow it
down. The server neither rewrites its append-only file nor takes snapshots during the measurement, which
favours it over its defaults. `redis` is the client as `pip install redis` installs it, `redis-hiredis` the
same with the C parser.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Roles, Throughput
from benchmarks.peers.clients import client_module, is_installed
from benchmarks.peers.roles import Job, Stopwatch, run_async
from benchmarks.peers.server import LOOPBACK, ServerProcess, accepts, free_port

PIPELINED_COUNT = 200_000
AWAITING_COUNT = 32_000
BLOCK_MILLISECONDS = 5_000
GROUP = "group"
CONSUMER = "consumer"
FIELD = b"b"
HIREDIS = "hiredis"


def _produce_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    client = _client(job)
    entry = {FIELD: job.body}
    client.ping()
    with stopwatch:
        for numbers in job.pipelines():
            pipeline = client.pipeline(transaction=False)
            for _ in numbers:
                pipeline.xadd(job.channel, entry)
            pipeline.execute()
    client.close()


def _consume_pipelined(job: Job, stopwatch: Stopwatch) -> None:
    client = _client(job)
    client.xgroup_create(job.channel, GROUP, id="0", mkstream=True)
    remaining = job.count
    unacked: list[bytes] = []
    with stopwatch:
        while remaining:
            # The ack of the last batch travels with the read of the next: one round trip for both.
            pipeline = client.pipeline(transaction=False)
            if unacked:
                pipeline.xack(job.channel, GROUP, *unacked)
            pipeline.xreadgroup(GROUP, CONSUMER, {job.channel: ">"}, count=job.pipeline_count, block=BLOCK_MILLISECONDS)
            unacked = [entry_id for entry_id, _ in _entries(pipeline.execute()[-1])]
            remaining -= len(unacked)
        client.xack(job.channel, GROUP, *unacked)
    client.close()


def _send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    run_async(_send_awaiting_async(job, stopwatch))


async def _send_awaiting_async(job: Job, stopwatch: Stopwatch) -> None:
    client = _client(job, "redis.asyncio")
    entry = {FIELD: job.body}

    async def send(count: int) -> None:
        for _ in range(count):
            await client.xadd(job.channel, entry)

    # Opens one connection for each task before the measurement starts.
    pings: list[Awaitable[Any]] = [client.ping() for _ in range(job.tasks)]
    await asyncio.gather(*pings)
    with stopwatch:
        await asyncio.gather(*(send(job.count // job.tasks) for _ in range(job.tasks)))
    await client.aclose()


def _send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    client = _client(job)
    client.ping()
    with stopwatch:
        for body in stopwatch.stamped_bodies(job):
            client.xadd(job.channel, {FIELD: body})
    client.close()


def _handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    client = _client(job)
    client.xgroup_create(job.channel, GROUP, id="0", mkstream=True)
    more = True
    with stopwatch:
        while more:
            reply = client.xreadgroup(GROUP, CONSUMER, {job.channel: ">"}, count=1, block=BLOCK_MILLISECONDS)
            for entry_id, fields in _entries(reply):
                more = stopwatch.arrived(fields[FIELD])
                client.xack(job.channel, GROUP, entry_id)
                if more:
                    stopwatch.acked()
    client.close()


def _client(job: Job, module: str = "redis") -> Any:
    if job.variant != HIREDIS:
        # redis-py uses the C parser whenever it can be imported; hide it from the plain client.
        sys.modules["hiredis"] = None  # type: ignore[assignment]
    return client_module(module).Redis(host=job.host, port=job.port, protocol=2)


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREADGROUP reply of one stream; newer clients answer a mapping, older ones a list."""
    if not reply:
        return []
    return list(next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1])


class RedisStreams(Peer):
    """A private redis-server, measured through the plain client."""

    name = "redis"
    executables = ("redis-server",)
    package = "redis-server"
    clients: ClassVar = {"redis": "redis"}
    settings: ClassVar = {
        "server": "appendonly yes, appendfsync everysec, no snapshots, no rewriting of the append-only file",
        "pipelined": "XADD in pipelines of 1,000; XREADGROUP COUNT 1000 with the XACK of the batch before it",
        "awaiting_64": "redis.asyncio, one pooled connection for each task",
        "entry": "one field, no key",
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
        options = {
            "port": str(self._port),
            "bind": LOOPBACK,
            "dir": str(server.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-percentage": "0",
            "save": "",
        }
        command = ["redis-server"]
        for option, value in options.items():
            command += [f"--{option}", value]
        server.start(command, ready=self._answers)

    def server_version(self) -> str:
        with self._connected() as client:
            return str(client.info("server")["redis_version"])

    def discard(self, channel: str) -> None:
        with self._connected() as client:
            client.delete(channel)

    def _answers(self) -> bool:
        if not accepts(self._port):
            return False
        with self._connected() as client:
            return bool(client.ping())

    def _connected(self) -> Any:
        return client_module("redis").Redis(host=LOOPBACK, port=self._port)


class RedisStreamsHiredis(RedisStreams):
    """The same server, measured through the client with the C parser."""

    name = "redis-hiredis"
    variant = HIREDIS
    clients: ClassVar = {"redis": "redis", "hiredis": "hiredis"}


def fastest_redis() -> RedisStreams:
    """The faster of the two clients that are installed; comparisons use this one."""
    return RedisStreamsHiredis() if is_installed("hiredis") else RedisStreams()


def redis_pipelined_e2e(body_size: int, count: int = PIPELINED_COUNT, server: RedisStreams | None = None) -> Throughput:
    """Redis Streams end to end through pipelines of 1,000, for a run that pairs it with Plait.

    Uses the running `server` if one is given, so that pairs do not start one each time, and otherwise a
    private one that is removed when this returns; the result's `peer` names the client. Raises PeerUnavailable
    where Redis is not installed.
    """
    if server is not None:
        return server.pipelined(body_size, count)
    with fastest_redis() as own:
        return own.pipelined(body_size, count)


def redis_awaiting_64(body_size: int, count: int = AWAITING_COUNT, server: RedisStreams | None = None) -> Throughput:
    """64 tasks each awaiting its own XADD, for a run that pairs it with Plait; `server` as above."""
    if server is not None:
        return server.awaiting_64(body_size, count)
    with fastest_redis() as own:
        return own.awaiting_64(body_size, count)
