"""A handler that fails: its messages are redelivered after their delay, and all are handled in the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec

import plait
from examples.demo.processes import DemoFailed

SUBJECT = "order.mail"
GROUP = "mailer"
COUNT = 200
#: Failures of each message before it succeeds.
FAILURES = 2
RETRY = plait.Retry(first=0.2, factor=2, jitter=0)
PATIENCE_SECONDS = 30.0


class Failing(msgspec.Struct, frozen=True):
    """The result."""

    messages: int
    calls: int
    early: int

    def check(self) -> None:
        """Check that every message had the expected number of attempts, and none was early."""
        if self != Failing(COUNT, COUNT * (FAILURES + 1), 0):
            raise DemoFailed(f"retries: {self}; expected {COUNT} messages, {COUNT * (FAILURES + 1)} calls, none early")


async def show_retries(address: str) -> Failing:
    """Send messages whose handler fails at first, on a busy node."""
    app = plait.App(address, group=GROUP)
    tried: dict[int, list[float]] = {}
    done = asyncio.Event()

    @app.subscriber(SUBJECT, retry=RETRY, concurrency=8)
    async def send_mail(message: plait.Message) -> None:
        moments = tried.setdefault(message.sequence, [])
        moments.append(asyncio.get_running_loop().time())
        if message.attempt <= FAILURES:
            raise ConnectionError("the mail server is down")
        if len(tried) == COUNT and all(len(times) > FAILURES for times in tried.values()):
            done.set()

    @app.on_startup
    async def send() -> None:
        await app.client.send_many(SUBJECT, [b"order %d is paid" % number for number in range(COUNT)])

    with without_tracebacks():
        running = asyncio.ensure_future(app.run())
        waiting = asyncio.ensure_future(done.wait())
        try:
            await asyncio.wait([running, waiting], timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            app.stop()
            await running
    early = sum(
        later - sooner < RETRY.wait(attempt, 0.0)
        for times in tried.values()
        for attempt, (sooner, later) in enumerate(pairwise(times), 1)
    )
    return Failing(len(tried), sum(map(len, tried.values())), early)


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Hide the log of the many expected failures and dead letters."""
    logs = [logging.getLogger(name) for name in ("plait.app", "plait.client")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
