"""A handler with the messages it gets: returns acknowledge, exceptions give back."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from plait.client.arguments import Start
from plait.client.batch import Batch
from plait.client.client import Client
from plait.client.consumer import Consumer
from plait.client.signature import Handler
from plait.client.types import Message
from plait.errors import CodecError
from plait.limits import ClientLimits

log = logging.getLogger("plait.app")

#: How long one wait for a batch is; the next one follows at once.
BATCH_WAIT_SECONDS = 3600.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What ``@app.subscriber`` was given."""

    subject: str
    group: str | None
    batch: int | None
    concurrency: int
    delivery: Literal["at_least_once", "at_most_once"]
    broadcast: bool
    start: Start | None
    prefetch: int | None


class Subscription:
    """One ``@app.subscriber``."""

    def __init__(self, settings: Settings, handler: Handler, limits: ClientLimits) -> None:
        self.settings = settings
        self.handler = handler
        self._limits = limits
        #: Failures since the last success, over all workers.
        self._failures = 0

    def consumer(self, client: Client) -> Consumer:
        """The consumer that feeds the handler."""
        s = self.settings
        return client._consumer(
            s.subject, s.group, s.broadcast, s.delivery, s.start, s.prefetch, any_thread=not self.handler.is_async
        )

    async def work(self, consumer: Consumer, pool: ThreadPoolExecutor, stopping: asyncio.Event) -> None:
        """One worker: handle what comes until the consumer stops."""
        if self.settings.batch is None:
            async for message in consumer:
                if not await self._handle(message, pool):
                    await self._pause(stopping)
            return
        while not stopping.is_set():
            batch = await consumer.fetch(self.settings.batch, BATCH_WAIT_SECONDS)
            if len(batch) and not await self._handle_batch(batch, pool):
                await self._pause(stopping)

    async def _handle(self, message: Message, pool: ThreadPoolExecutor) -> bool:
        try:
            arguments = self.handler.arguments(self.handler.decode(message), message)
        except CodecError as error:
            self._refuse(message, error)
            return False
        if not await self._call(arguments, pool, message):
            message.nack()
            return False
        message.ack()
        return True

    async def _handle_batch(self, batch: Batch, pool: ThreadPoolExecutor) -> bool:
        bodies: list[Any] = []
        messages: list[Message] = []
        for message in batch:
            try:
                bodies.append(self.handler.decode(message))
                messages.append(message)
            except CodecError as error:
                self._refuse(message, error)
        if messages and not await self._call(self.handler.arguments(bodies, messages), pool, batch):
            batch._nack_soon()
            return False
        batch._ack_soon()
        return len(messages) == len(batch)

    def _refuse(self, message: Message, error: CodecError) -> None:
        self._failures += 1
        log.error("%s cannot take %s, which goes back to the group: %s", self.handler.name, _place(message), error)
        message.nack()

    async def _call(self, arguments: list[Any], pool: ThreadPoolExecutor, about: Message | Batch) -> bool:
        """Whether the handler returned."""
        failure: BaseException | None = None
        try:
            if self.handler.is_async:
                await self.handler.function(*arguments)
            else:
                context = contextvars.copy_context()
                call = functools.partial(_outcome, context, self.handler.function, arguments)
                result, failure = await asyncio.get_running_loop().run_in_executor(pool, call)
                if inspect.isawaitable(result):
                    # A plain function around an asynchronous one.
                    await result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            failure = error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and the message goes back
            failure = error
        if failure is None:
            self._failures = 0
            return True
        self._failures += 1
        log.error("%s failed on %s, which goes back to the group", self.handler.name, _place(about), exc_info=failure)
        return False

    async def _pause(self, stopping: asyncio.Event) -> None:
        """Failing again and again: twice as long each time, so that a message nobody can handle costs little."""
        first, longest = self._limits.failure_pause_first_seconds, self._limits.failure_pause_max_seconds
        seconds = min(first * 2 ** min(max(self._failures - 1, 0), 32), longest)
        try:
            async with asyncio.timeout(seconds):
                await stopping.wait()
        except TimeoutError:
            pass


def _outcome(
    context: contextvars.Context, function: Callable[..., Any], arguments: list[Any]
) -> tuple[Any, Exception | None]:
    """Result or error of a call: a StopIteration cannot pass through a future."""
    try:
        return context.run(function, *arguments), None
    except Exception as error:  # noqa: BLE001 - told to the caller
        return None, error


def _place(about: Message | Batch) -> str:
    """Where it is stored; what is in it is not for logs."""
    if isinstance(about, Message):
        return f"{about.subject}#{about.sequence}"
    return f"{len(about)} messages from {about[0].subject}#{about[0].sequence}"
