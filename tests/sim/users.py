"""What the simulated clusters share: limits of clients, excuses for faults, and consumers that leave."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import plait
from plait.errors import PlaitError
from plait.testing.history import History
from plait.testing.sim import Fault, Simulation

CLIENT_LIMITS = plait.ClientLimits(
    reconnect_max_seconds=1.0, request_seconds=3.0, route_seconds=5.0, pull_wait_seconds=5.0
)
#: How long the effects of a fault outlast it: locks change owners, clients reconnect.
AFTERMATH_SECONDS = 8.0
DRAIN_SECONDS = 120.0
#: A run that handles nothing for this long is stuck, because leases, retries and reconnects together take less.
QUIET_SECONDS = 30.0
#: Extra time after the end. A delayed consumer with a defect would now handle messages that it no longer owns.
SHOW_SECONDS = 0.5


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn off garbage collection: it would scan all live objects of a run again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def excuse(
    histories: Iterable[History], fault: Fault, now: float, *, consumers: Iterable[str], brokers: Iterable[str]
) -> None:
    """Record what a fault of these consumers or of these brokers excuses. A jump of a clock excuses nothing."""
    if fault.kind == "jump":
        return
    until = now + fault.seconds + AFTERMATH_SECONDS
    for history in histories:
        for broker in brokers:
            history.broken(fault.kind, now, until=until, forgets=fault.kind == "power_loss", at=broker)
        for consumer in consumers:
            history.broken(fault.kind, now, until=until, consumer=consumer)
            if fault.kind in ("kill", "power_loss"):
                history.gone(consumer, now)


async def until_it_leaves(tasks: list[asyncio.Task[None]], leaving: Coroutine[Any, Any, None]) -> None:
    """Run the tasks of a consumer until one of them ends or ``leaving`` has ended; raises the error of a task."""
    stay = asyncio.create_task(leaving)
    try:
        await asyncio.wait([*tasks, stay], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*tasks, stay):
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for each in ended:
        if isinstance(each, Exception):
            raise each


async def empty(
    sim: Simulation, client: plait.Client, subjects: Iterable[str], emptied: str, others: Sequence[str]
) -> None:
    """Route the subjects to other broker groups, and wait until the emptied one accepts no rows and has drained."""
    async with client:
        for subject in subjects:
            places = [f"{subject}@{group}" for group in others]
            await client.admin.expand_subject(subject, places)
            while not await _is_empty(client, subject, emptied):
                await sim.sleep(0.5)


async def _is_empty(client: plait.Client, subject: str, emptied: str) -> bool:
    try:
        route = await client.admin.route(subject)
    except PlaitError:
        return False
    mine = [share for share in route.partitions if str(share.partition).partition("@")[2] == emptied]
    return route.reached and not any(share.takes or share.draining for share in mine)
