"""How many messages per second a broker examines for a reader or a group with a filter, over the network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import uvloop

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result

#: Rows of one ``send_many``.
MANY_COUNT = 50_000
#: Every hundredth message matches.
SHARE = 100
BODY = b"x" * 100
ROUNDS = 5
CONDITION = "amount = 0 AND city = 'SHA'"
#: Name, least rate in millions of messages per second, and what is measured.
BARS = (
    ("tag", 5.0, "a tag filter"),
    ("sql", 1.0, "an SQL filter on two headers"),
    ("group tag", 5.0, "the tag filter of a group"),
    ("group sql", 1.0, "the SQL filter of a group on two headers"),
)


async def _send(client: plait.Client, count: int) -> None:
    for start in range(0, count, MANY_COUNT):
        numbers = range(start, min(start + MANY_COUNT, count))
        tags = [["rare"] if number % SHARE == 0 else ["common"] for number in numbers]
        headers = [{"amount": number % SHARE, "city": "BJS" if number % 2 else "SHA"} for number in numbers]
        await client.send_many("filtered", [BODY] * len(numbers), tags=tags, headers=headers)


async def _rate(client: plait.Client, count: int, **filters: Any) -> float:
    """Messages examined per second, until all that match were read."""
    found, wanted = 0, len(range(0, count, SHARE))
    async with client.reader("filtered", start="earliest", **filters) as reader:
        began = time.perf_counter()
        while found < wanted:
            messages = await reader.fetch(10_000, wait=30)
            if not messages:
                raise TimeoutError(f"only {found} of {wanted} messages arrived")
            found += len(messages)
        return count / (time.perf_counter() - began)


async def _group_rate(client: plait.Client, count: int, group: str, **filters: Any) -> float:
    """Messages that a group is done with per second."""
    found, wanted = 0, len(range(0, count, SHARE))
    async with client.consumer("filtered", group, **filters) as consumer:
        began = time.perf_counter()
        while found < wanted:
            arrow = await consumer.fetch_arrow(10_000, wait=30)
            if not len(arrow):
                raise TimeoutError(f"only {found} of {wanted} messages arrived")
            found += len(arrow)
            await arrow.ack()
        return count / (time.perf_counter() - began)


def scans(smoke: bool) -> Iterator[Result]:
    """A tag and an SQL condition on two headers; each matches one message in a hundred."""
    count = 5_000 if smoke else 2_000_000

    rates: dict[str, list[float]] = {name: [] for name, _, _ in BARS}
    #: Messages examined per second of the broker's CPU time, which other processes of the machine disturb less.
    cpu_rates: dict[str, list[float]] = {name: [] for name, _, _ in BARS}

    async def measure(server: PlaitServer) -> None:
        async with plait.connect(server.address) as client:
            await _send(client, count)
            for number in range(1 if smoke else ROUNDS):
                for name, scan in (
                    ("tag", _rate(client, count, tags=["rare"])),
                    ("sql", _rate(client, count, where=CONDITION)),
                    ("group tag", _group_rate(client, count, f"tag-{number}", tags=["rare"])),
                    ("group sql", _group_rate(client, count, f"sql-{number}", where=CONDITION)),
                ):
                    before = server.cpu_seconds()
                    rates[name].append(await scan)
                    cpu_rates[name].append(count / (server.cpu_seconds() - before))

    with PlaitServer() as server:
        uvloop.run(measure(server))
    for name, bar, what in BARS:
        median, cpu = statistics.median(rates[name]) / 1e6, statistics.median(cpu_rates[name]) / 1e6
        details = {"rates": rates[name], "per_cpu_second": f"{cpu:.2f} M"}
        yield Result(f"messages examined for {what}", median, bar, unit="M/s", details=details)
