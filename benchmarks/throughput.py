"""Throughput and latency compared with the machine's limits and with Redis Streams, in interleaved pairs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import loopback, plait_roles
from benchmarks.memory import back_memory
from benchmarks.peers.redis_streams import RedisStreams, fastest_redis, redis_awaiting_64, redis_pipelined_e2e
from benchmarks.peers.roles import Job, Role, RunReport, run_roles
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, median_ratio

BODY_SIZE = 100
PAUSE_SECONDS = 0.001
#: Approximate bytes of memory, in page cache and processes, for each byte of body.
MEMORY_FACTOR = 4
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to measure; the smoke run only shows that everything works."""

    pairs: int = 5
    many: int = 5_000_000
    loopback_size: int = 2 << 30
    end_to_end: int = 2_000_000
    messages: int = 1_000_000
    redis: int = 100_000
    awaiting: int = 100_000
    redis_awaiting: int = 20_000
    latency: int = 2_000


SMOKE = Scale(1, 20_000, 8 << 20, 20_000, 10_000, 2_000, 1_280, 640, 20)


def _job(server: PlaitServer, count: int, channel: str = "", variant: str = "") -> Job:
    return Job(
        address=server.address,
        channel=channel or f"bench-{next(_numbers)}",
        body_size=BODY_SIZE,
        count=count,
        pipeline_count=1000,
        tasks=64,
        pause_seconds=PAUSE_SECONDS,
        variant=variant,
    )


def _seconds(report: RunReport) -> float:
    ends = [report.producer.ended_ns] + ([report.consumer.ended_ns] if report.consumer else [])
    return (max(ends) - report.producer.started_ns) / 1e9


def _rate(server: PlaitServer, job: Job, produce: Role, consume: Role | None = None) -> float:
    """Messages per second, end to end if there is a consumer."""
    back_memory(MEMORY_FACTOR * job.count * job.body_size)
    return job.count / _seconds(run_roles(job, produce, consume, server.cpu_seconds))


def batch_paths(scale: Scale) -> Iterator[Result]:
    """``send_many`` and ``fetch_arrow`` compared with two blocking sockets; ``plait.sync`` compared with async."""
    with PlaitServer() as server:
        subjects: list[str] = []

        def send() -> float:
            job = _job(server, scale.many)
            subjects.append(job.channel)
            return _rate(server, job, plait_roles.send_many) * BODY_SIZE

        def fetch() -> float:
            job = _job(server, scale.many, subjects.pop(0), variant=str(next(_numbers)))
            return _rate(server, job, plait_roles.fetch_arrow) * BODY_SIZE

        def send_column() -> float:
            return _rate(server, _job(server, scale.many), plait_roles.send_column) * BODY_SIZE

        def raw() -> float:
            return loopback.loopback_bytes_per_second(scale.loopback_size)

        send()
        ratio, ours, theirs = median_ratio(send, raw, scale.pairs)
        yield Result("send_many of a list / loopback bytes", ratio, 0.3, details={"plait": ours, "loopback": theirs})
        ratio, ours, theirs = median_ratio(send_column, raw, scale.pairs)
        yield Result("send_many of a column / loopback bytes", ratio, 0.3, details={"plait": ours, "loopback": theirs})
        ratio, ours, theirs = median_ratio(fetch, raw, scale.pairs)
        yield Result("fetch_arrow / loopback bytes", ratio, 0.5, details={"plait": ours, "loopback": theirs})

        def send_blocking() -> float:
            return _rate(server, _job(server, scale.many), plait_roles.send_many_blocking) * BODY_SIZE

        ratio, ours, theirs = median_ratio(send_blocking, send, scale.pairs)
        yield Result("plait.sync send_many / async", ratio, 0.8, details={"sync": ours, "async": theirs})


def against_redis(scale: Scale) -> Iterator[Result]:
    """End to end with batches, with one object per message, and with 64 awaiting tasks."""
    with PlaitServer() as server, RedisStreams() as redis, fastest_redis() as fastest:

        def redis_batches(peer: RedisStreams = redis) -> float:
            back_memory(MEMORY_FACTOR * scale.redis * BODY_SIZE)
            return redis_pipelined_e2e(BODY_SIZE, scale.redis, peer).messages_per_second

        # The bars are against redis-py without its C parser, which makes it faster; the details have both figures.
        hiredis = [redis_batches(fastest) for _ in range(scale.pairs)]

        def plait(count: int, produce: Role, consume: Role | None) -> Callable[[], float]:
            return lambda: _rate(server, _job(server, count), produce, consume)

        batches = plait(scale.end_to_end, plait_roles.send_many, plait_roles.fetch_arrow)
        ratio, ours, theirs = median_ratio(batches, redis_batches, scale.pairs)
        details = {"plait": ours, "redis": theirs, "redis with hiredis": hiredis}
        yield Result("end to end, batches / Redis Streams", ratio, 30, details=details)
        singles = plait(scale.messages, plait_roles.post_keyed, plait_roles.ack_messages)
        ratio, ours, theirs = median_ratio(singles, redis_batches, scale.pairs)
        details = {"plait": ours, "redis": theirs, "redis with hiredis": hiredis}
        yield Result("keyed post + acked Message / Redis", ratio, 12, details=details)

        def redis_tasks(peer: RedisStreams = redis) -> float:
            return redis_awaiting_64(BODY_SIZE, scale.redis_awaiting, peer).messages_per_second

        tasks = plait(scale.awaiting, plait_roles.send_awaiting, None)
        ratio, ours, theirs = median_ratio(tasks, redis_tasks, scale.pairs)
        hiredis = [redis_tasks(fastest) for _ in range(scale.pairs)]
        details = {"plait": ours, "redis": theirs, "redis with hiredis": hiredis}
        yield Result("64 awaiting tasks / Redis XADD", ratio, 8, details=details)


def sync_flush(scale: Scale) -> Iterator[Result]:
    """64 awaiting tasks with flush=sync compared with the limit of one fdatasync and one round trip."""
    with PlaitServer(flush="sync") as durable, PlaitServer() as quick:

        def ours() -> float:
            return _rate(durable, _job(durable, scale.awaiting), plait_roles.send_awaiting)

        def possible() -> float:
            sync = loopback.fdatasync_seconds(durable.data, 200, 16 * 1024)
            job = _job(quick, scale.latency)
            job_seconds = _seconds(run_roles(_one_task(job), plait_roles.send_awaiting, None, quick.cpu_seconds))
            return 64 / (sync + job_seconds / scale.latency)

        ratio, mine, limit = median_ratio(ours, possible, scale.pairs)
        yield Result(
            "flush=sync, 64 tasks / (fdatasync + round trip)", ratio, 0.5, details={"plait": mine, "limit": limit}
        )


def _one_task(job: Job) -> Job:
    return Job(job.address, job.channel, job.body_size, job.count, 1000, 1, job.pause_seconds)


def latency(scale: Scale) -> Iterator[Result]:
    """One message at a time, from before the send to inside the handler: compared with a bare round trip and Redis."""
    with PlaitServer() as server, fastest_redis() as redis:

        def ours() -> float:
            job = _job(server, scale.latency)
            report = run_roles(job, plait_roles.send_one_by_one, plait_roles.handle_one_by_one, server.cpu_seconds)
            assert report.consumer is not None
            return statistics.median(report.consumer.latencies_ns) / 1e9

        def redis_streams() -> float:
            return redis.latency(BODY_SIZE, scale.latency).p50_milliseconds / 1e3

        def bare() -> float:
            return loopback.asyncio_round_trip_seconds(scale.latency, BODY_SIZE, PAUSE_SECONDS)

        ratio, mine, theirs = median_ratio(ours, bare, scale.pairs)
        quick = [
            loopback.asyncio_round_trip_seconds(scale.latency, BODY_SIZE, PAUSE_SECONDS, quick=True)
            for _ in range(scale.pairs)
        ]
        yield Result(
            "send to handler p50 / asyncio round trip",
            ratio,
            3.5,
            at_most=True,
            details={"plait": mine, "asyncio": theirs, "the same on uvloop": quick},
        )
        ratio, mine, theirs = median_ratio(ours, redis_streams, scale.pairs)
        yield Result(
            "send to handler p50 / Redis Streams", ratio, 1, at_most=True, details={"plait": mine, "redis": theirs}
        )

        def request() -> float:
            job = _job(server, scale.latency)
            report = run_roles(job, plait_roles.request_one_by_one, plait_roles.reply_one_by_one, server.cpu_seconds)
            return statistics.median(report.producer.latencies_ns) / 1e9

        def two_sends() -> float:
            return 2 * ours()

        ratio, mine, theirs = median_ratio(request, two_sends, scale.pairs)
        yield Result(
            "request to reply p50 / two sends to handlers",
            ratio,
            1.5,
            at_most=True,
            details={"request": mine, "two sends": theirs},
        )
