"""Runs one handler: feeds it messages, acks those on which it returns, and nacks those on which it raises.

A handler chooses another outcome with ``RetryLater``, ``Suspend`` or ``Reject``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Literal

import msgspec

from plait.client.app.signature import Handler
from plait.client.arguments import Duration, wait_of
from plait.client.client import Client
from plait.client.consume.consumer import Batch, Consumer
from plait.client.consume.failure import UNBEGUN, FailureOutcome, reason_of
from plait.client.consume.terms import ConsumerArguments
from plait.client.requests.requesting import asks_for_reply
from plait.client.types import Message
from plait.errors import CodecError, PlaitError
from plait.model.reason import Reason

log = logging.getLogger("plait.app")

#: Wraps each call of a handler; gets its messages, and a function that calls the next hook or the handler.
HandleHook = Callable[[list[Message], Callable[[], Awaitable[None]]], Awaitable[None]]

#: Exceptions that Python raises in a task, not the handler: on control-C where the loop does not handle it, and at the
#: end of the interpreter. Any other exception of a decoder or a handler is a failure of its message only.
_NOT_THE_HANDLERS = (KeyboardInterrupt, GeneratorExit)

#: The timeout of one ``fetch`` for a batch; the next one follows at once.
BATCH_WAIT_SECONDS = 3600.0


class RetryLater(Exception):
    """Retry the message after ``delay``, whatever the group's policy is. It is not logged as an error.

    It counts as an attempt: after the last attempt of the policy the message becomes a dead letter.
    """

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"again in {self.seconds:g} s")


class Suspend(Exception):
    """Suspend the handler: it gets no messages for ``delay``, and then this one again.

    It does not count as an attempt: the message never becomes a dead letter because of it.
    """

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"suspended for {self.seconds:g} s")


class Reject(Exception):
    """Make the message a dead letter at once: no attempt can succeed.

    ``reason`` is text, an exception or a ``plait.Reason``; by default the exception that this one was raised from.
    """

    def __init__(self, reason: str | BaseException | Reason | None = None) -> None:
        # Validated here, so that the traceback shows where the reason was given.
        checked = reason_of(reason)
        self.reason: str | BaseException | Reason = "" if reason is None else reason
        super().__init__("" if checked in (None, Reason()) else str(checked))

    def reason_for(self, handler: str) -> Reason | None:
        if isinstance(self.reason, str):
            if not self.reason and self.__cause__ is not None:
                return reason_of(self.__cause__, handler)
            return reason_of(Reason("plait.Reject", self.reason), handler)
        return reason_of(self.reason, handler)


class SubscriberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``@app.subscriber``."""

    consumer: ConsumerArguments
    #: None: every message is handled by itself.
    batch: int | None
    concurrency: int
    #: Seconds after which a call fails; None: no limit.
    timeout: float | None
    #: Seconds for which any failure suspends the handler; None: only ``Suspend`` suspends it.
    suspend: float | None
    #: A body that does not decode is made a dead letter at once ("reject"), or retried like other failures ("retry").
    undecodable: Literal["reject", "retry"]


class Call:
    """One call of a handler. A ``def`` runs in a thread, which may continue after the timeout."""

    __slots__ = ("arguments", "awaited", "failure", "result", "thread")

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments
        self.thread: asyncio.Future[Any] | None = None
        #: True if a worker waits for the call.
        self.awaited = True
        #: The exception that its thread raised.
        self.failure: BaseException | None = None
        #: What the handler returned: the reply to a request.
        self.result: Any = None

    @property
    def running(self) -> bool:
        """True if the call or its thread has not ended."""
        return self.awaited or (self.thread is not None and not self.thread.done())

    async def ended(self) -> None:
        """Wait until the call's thread is free: the worker's next call needs one."""
        if self.thread is not None and not self.thread.done():
            await asyncio.wait([self.thread])


class Subscription:
    """One ``@app.subscriber``."""

    def __init__(self, settings: SubscriberSettings, handler: Handler, hooks: list[HandleHook]) -> None:
        self.settings = settings
        self.handler = handler
        #: The app's ``around_handle`` hooks, outermost first.
        self._hooks = hooks
        #: No worker starts a call before this time (of the loop's clock).
        self._suspended_until = 0.0
        self._resuming: asyncio.TimerHandle | None = None
        #: Calls that have not ended.
        self._calls: set[Call] = set()
        self._client: Client | None = None

    @property
    def unfinished(self) -> bool:
        """True if a handler still runs that did not end at its timeout or when it was cancelled."""
        return any(call.running for call in self._calls)

    @property
    def _one_at_a_time(self) -> bool:
        """True if messages of one key are handled one after another."""
        return self.settings.consumer.ordered or self.settings.consumer.affinity is not None

    def __str__(self) -> str:
        consumer = self.settings.consumer
        who = "every message" if consumer.group is None else f"group {consumer.group}"
        return f"{self.handler.name} handles {consumer.subjects} ({who})"

    def consumer(self, client: Client) -> Consumer:
        self._client = client
        return client._consumer(self.settings.consumer, any_thread=not self.handler.is_async)

    async def work(self, consumer: Consumer, pool: Executor, stopping: asyncio.Event) -> None:
        """One worker: handle messages until the consumer stops."""
        if self.settings.batch is None:
            async for message in consumer:
                if not await self._resumed(stopping):
                    message._delivered.report_row(message._row, UNBEGUN)
                    return
                if not message._delivered.may_begin(message._row):
                    # The consumer lost the message's lock during a suspension.
                    message._delivered.report_row(message._row, UNBEGUN)
                    continue
                self._suspend(consumer, await self._handle(message, pool, stopping))
            return
        while not stopping.is_set():
            batch = await consumer.fetch(self.settings.batch, BATCH_WAIT_SECONDS)
            if not await self._resumed(stopping):
                batch._report(UNBEGUN)
                return
            if not batch._may_begin():
                batch._report(UNBEGUN)
            elif len(batch):
                self._suspend(consumer, await self._handle_batch(batch, pool, stopping))

    async def _handle(self, message: Message, pool: Executor, stopping: asyncio.Event) -> BaseException | None:
        """Handle one message; returns the failure, if any."""
        try:
            arguments = self.handler.arguments(self.handler.decode(message), message)
        except _NOT_THE_HANDLERS:
            raise
        except BaseException as error:  # noqa: BLE001 - any exception fails only its message
            await self._report_failure(message, self._refusal(message, error))
            return error
        call = Call(arguments)
        failure = await self._call(call, pool, [message], stopping)
        if failure is None and call.result is not None:
            failure = await self._reply(message, call.result)
        if failure is None:
            message.ack()
        else:
            await self._report_failure(message, self._failed(failure))
        await call.ended()
        self._calls.discard(call)
        return failure

    async def _handle_batch(self, batch: Batch, pool: Executor, stopping: asyncio.Event) -> BaseException | None:
        """Handle a batch; returns the failure of the call or of decoding a message, if any."""
        failure: BaseException | None = None
        bodies: list[Any] = []
        messages: list[Message] = []
        for message in batch:
            try:
                bodies.append(self.handler.decode(message))
                messages.append(message)
            except _NOT_THE_HANDLERS:
                raise
            except BaseException as error:  # noqa: BLE001 - any exception fails only its message
                await self._report_failure(message, self._refusal(message, error))
                failure = error
        if messages:
            call = Call(self.handler.arguments(bodies, messages))
            broken = await self._call(call, pool, messages, stopping)
            if broken is not None:
                batch._report(self._failed(broken))
                await call.ended()
                self._calls.discard(call)
                return broken
            self._calls.discard(call)
        batch._report(None)
        return failure

    async def _reply(self, message: Message, body: Any) -> PlaitError | None:
        """If the message is a request, reply with the result of its handler. Returns the error if that fails."""
        assert self._client is not None
        try:
            if asks_for_reply(message):
                await self._client.reply(message, body)
        except PlaitError as error:
            log.error("%s replied to %s in vain: %s", self.handler.name, self._fate([message]), error)
            return error
        return None

    async def _report_failure(self, message: Message, outcome: FailureOutcome) -> None:
        """Fail a message. If it is a request and this was its last attempt, its sender gets the reason."""
        deliveries = message._delivered.deliveries
        most = deliveries.attempts if deliveries is not None else 0
        last = outcome.reject or (outcome.counted and most and message.attempt >= most)
        if last and self.settings.consumer.delivery == "at_least_once" and asks_for_reply(message):
            assert self._client is not None
            with contextlib.suppress(PlaitError):
                # Without it, the request ends with its timeout.
                await self._client.reply(message, failure=outcome.reason or "no reason was given")
        message._delivered.report_row(message._row, outcome)

    def _refusal(self, message: Message, error: BaseException) -> FailureOutcome:
        """The outcome of a message whose body cannot be decoded; the handler is not called."""
        if isinstance(error, CodecError) and self.settings.undecodable == "reject":
            # Decoding would fail the next time too.
            log.error("%s cannot take %s: %s", self.handler.name, self._fate([message], rejected=True), error)
            return FailureOutcome(None, reason_of(error, self.handler.name), reject=True)
        if isinstance(error, CodecError):
            log.error("%s cannot take %s: %s", self.handler.name, self._fate([message]), error)
        else:
            # The decoder itself failed: another attempt may succeed.
            log.error("%s cannot decode %s", self.handler.name, self._fate([message]), exc_info=error)
        return self._failed(error)

    def _fate(self, messages: list[Message], *, rejected: bool = False) -> str:
        """For logs: the position of failed messages, and what happens to them next."""
        place = _place(messages)
        if self.settings.consumer.delivery == "at_most_once":
            return f"{place}, which is lost (at_most_once)"
        if rejected:
            return f"{place}, which goes to the dead letters"
        deliveries, attempt = messages[0]._delivered.deliveries, max(message.attempt for message in messages)
        most = f" of {deliveries.attempts}" if deliveries is not None and deliveries.attempts else ""
        shown = f"{place} (attempt {attempt}{most})"
        # From attempt ``reasons_from`` on the broker decides; ``PendingOutcomes`` logs new dead letters.
        return (
            f"{shown}, which is tried again" if deliveries is not None and attempt < deliveries.reasons_from else shown
        )

    def _failed(self, failure: BaseException) -> FailureOutcome:
        name = self.handler.name
        try:
            if isinstance(failure, Reject):
                return FailureOutcome(None, failure.reason_for(name), reject=True)
            if isinstance(failure, Suspend):
                # The message is not at fault: no attempt is counted.
                return FailureOutcome(failure.seconds, counted=False)
            if isinstance(failure, RetryLater):
                return FailureOutcome(failure.seconds, reason_of(failure, name))
        except Exception:
            log.exception("%s raised a %s whose __init__ did not run; call it", name, type(failure).__qualname__)
        return FailureOutcome(None, reason_of(failure, name))

    async def _invoke(self, call: Call, pool: Executor) -> None:
        """Call the handler; raises what it raises."""
        if self.handler.is_async:
            call.result = await self.handler.function(*call.arguments)
            return
        context = contextvars.copy_context()
        work = functools.partial(_outcome, context, self.handler.function, call.arguments)
        call.thread = asyncio.get_running_loop().run_in_executor(pool, work)
        # A thread cannot be stopped: it continues after the timeout, and the worker waits for it.
        result, call.failure = await asyncio.shield(call.thread)
        if call.failure is not None:
            raise call.failure
        # A plain function may return a coroutine.
        call.result = await result if inspect.isawaitable(result) else result

    async def _call(
        self, call: Call, pool: Executor, messages: list[Message], stopping: asyncio.Event
    ) -> BaseException | None:
        """Call the handler with its hooks; returns the failure, or None if it returned."""
        self._calls.add(call)
        failure: BaseException | None = None
        task = asyncio.current_task()
        assert task is not None
        invoke: Callable[[], Awaitable[None]] = functools.partial(self._invoke, call, pool)
        for hook in reversed(self._hooks):
            invoke = functools.partial(hook, messages, invoke)
        try:
            async with asyncio.timeout(self.settings.timeout) as limit:
                await invoke()
                if task.cancelling():
                    # A pending cancellation is raised at the next await, which must be inside this block.
                    await asyncio.sleep(0)
            if limit.expired():
                # The handler suppressed the cancellation at the timeout and returned.
                raise TimeoutError
        except asyncio.CancelledError as error:
            # The app cancels its workers only while it drains. Before that, the handler has cancelled its own task.
            if task.cancelling() and stopping.is_set():
                raise
            while task.cancelling():
                task.uncancel()
            failure = error
        except TimeoutError as error:
            failure = error
            if limit.expired():
                failure = TimeoutError(f"{self.handler.name} did not return within {self.settings.timeout:g} s")
        except BaseException as error:
            if isinstance(error, _NOT_THE_HANDLERS) and error is not call.failure:
                raise
            failure = error
        finally:
            call.awaited = False
        if self._one_at_a_time:
            # Once the failure is reported, the broker may deliver the message, or the next of its key, to any consumer.
            await call.ended()
        if isinstance(failure, RetryLater | Suspend):
            log.info("%s: %s, %s", self.handler.name, _place(messages), failure)
        elif isinstance(failure, Reject):
            log.warning("%s rejected %s: %s", self.handler.name, _place(messages), failure)
        elif failure is not None:
            log.error("%s failed on %s", self.handler.name, self._fate(messages), exc_info=failure)
        return failure

    def _suspend(self, consumer: Consumer, failure: BaseException | None) -> None:
        """Suspend the handler if the failure requires it, and return the prefetched messages."""
        if isinstance(failure, Suspend):
            seconds = getattr(failure, "seconds", 0.0)
        elif failure is not None and self.settings.suspend is not None and not isinstance(failure, RetryLater | Reject):
            seconds = self.settings.suspend
        else:
            return
        loop = asyncio.get_running_loop()
        self._suspended_until = max(self._suspended_until, loop.time() + seconds)
        consumer._fetcher.suspend()
        log.warning("%s is suspended for %g s", self.handler.name, seconds)
        if self._resuming is not None:
            self._resuming.cancel()
        self._resuming = loop.call_at(self._suspended_until, consumer._fetcher.resume)

    async def _resumed(self, stopping: asyncio.Event) -> bool:
        """Wait for the end of a suspension; returns False if the app stops."""
        loop = asyncio.get_running_loop()
        while loop.time() < self._suspended_until and not stopping.is_set():
            try:
                async with asyncio.timeout_at(self._suspended_until):
                    await stopping.wait()
            except TimeoutError:
                pass
        return not stopping.is_set()


def _outcome(
    context: contextvars.Context, function: Callable[..., Any], arguments: list[Any]
) -> tuple[Any, BaseException | None]:
    """Returns (result, error) of a call: a future cannot carry a StopIteration, and a SystemExit would end the loop."""
    try:
        return context.run(function, *arguments), None
    except BaseException as error:  # noqa: BLE001 - the caller looks at it
        return None, error


def _place(messages: list[Message]) -> str:
    """The position of messages, for logs; their content must not be logged."""
    first = f"{messages[0].subject}#{messages[0].sequence}"
    return first if len(messages) == 1 else f"{len(messages)} messages from {first}"
