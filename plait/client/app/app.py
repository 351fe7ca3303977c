"""``App``: runs functions that handle messages as a service.

A handler that returns acks its message. One that raises nacks it: the message is retried as the group's policy says
(``RetryLater``: after the handler's delay; ``Suspend``: the handler also gets no other message until then).
SIGTERM and SIGINT drain the app: it takes no new messages, finishes running handlers within ``drain_seconds``, and
returns the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar

from plait import tasks
from plait.client.app.handler_threads import HandlerThreads
from plait.client.app.outgoing import Outgoing, SendHook
from plait.client.app.signature import Handler
from plait.client.app.subscription import HandleHook, SubscriberSettings, Subscription
from plait.client.arguments import Duration, Start, seconds_of, wait_of
from plait.client.blocking.loop_thread import new_event_loop
from plait.client.client import DEFAULT_ADDRESS, Client
from plait.client.closing import end_of
from plait.client.consume.consumer import Consumer
from plait.client.consume.terms import ConsumerArguments
from plait.client.send.due_time import Delay
from plait.client.types import Receipt, Ticket
from plait.errors import Closed, InvalidArgument
from plait.limits import ClientLimits
from plait.model import names
from plait.model.retry_policy import Retry

log = logging.getLogger("plait.app")

Function = TypeVar("Function", bound=Callable[..., Any])

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class App:
    """A service made of handlers. ``group`` is the default group of its subscribers."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        group: str | None = None,
        client_id: str | None = None,
        compression: Literal["zstd", "lz4"] | None = None,
        limits: ClientLimits | None = None,
        spool: str | os.PathLike[str] | None = None,
    ) -> None:
        if group is not None:
            names.check_group(group)
        self.group = group
        self.limits = limits or ClientLimits()
        self._address = address
        self._client_id = client_id
        self._compression = compression
        self._spool = spool
        # Refuses an invalid address or client id now, not when the service starts.
        self._new_client()
        self._subscriptions: list[Subscription] = []
        self._handle_hooks: list[HandleHook] = []
        self._send_hooks: list[SendHook] = []
        self._startup: list[Callable[[], Any]] = []
        self._shutdown: list[Callable[[], Any]] = []
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._stopping: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None
        self._consumers: list[Consumer] = []

    def _new_client(self) -> Client:
        return Client(
            self._address,
            client_id=self._client_id,
            compression=self._compression,
            limits=self.limits,
            spool=self._spool,
        )

    # --- declaring ------------------------------------------------------------------------------

    def subscriber(
        self,
        subject: str,
        *,
        group: str | None = None,
        batch: int | None = None,
        concurrency: int = 1,
        delivery: Literal["at_least_once", "at_most_once"] = "at_least_once",
        broadcast: bool = False,
        start: Start | None = None,
        prefetch: int | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        suspend: Duration | None = None,
        ordered: bool = False,
        affinity: Literal["key"] | None = None,
        handling: Duration | None = None,
        undecodable: Literal["reject", "retry"] = "reject",
    ) -> Callable[[Function], Function]:
        """Decorates a handler, ``def`` (run in a thread) or ``async def``.

        A parameter annotated ``plait.Message`` gets the message; another one gets the body, decoded into its annotation
        (bytes, str, dict, a msgspec struct, a dataclass, a pydantic model). With ``batch=n`` the handler gets lists of
        up to n. ``concurrency`` is the number of calls that run at a time. A call that takes longer than ``timeout``
        fails; an ``async def`` is cancelled then. With ``suspend`` any failure suspends the handler for that long, as
        ``plait.Suspend`` does. With ``ordered`` or ``affinity`` messages of one key are handled one after another,
        however many calls run. A body that does not decode into the annotation becomes a dead letter at once; with
        ``undecodable="retry"`` it is retried as any failure is. The other arguments are those of ``client.consumer``.
        """
        group = None if broadcast else group or self.group
        if group is None and not broadcast:
            raise InvalidArgument(
                f"subscriber of {subject!r} has no group; pass group= here or to App(...), or pass broadcast=True"
            )
        arguments = ConsumerArguments(
            subject, group, broadcast, delivery, start, prefetch, retry, ordered, affinity, handling
        )
        arguments.checked()
        for name, number in (("batch", batch), ("concurrency", concurrency), ("prefetch", prefetch)):
            _check_count(name, number)
        if undecodable not in ("reject", "retry"):
            raise InvalidArgument(f"undecodable {undecodable!r} is not known; use 'reject' or 'retry'")
        self._check_other_subscribers(subject, group)
        settings = SubscriberSettings(
            consumer=arguments,
            batch=batch,
            concurrency=concurrency,
            timeout=None if timeout is None else _positive("timeout", timeout),
            suspend=None if suspend is None else wait_of(suspend),
            undecodable=undecodable,
        )
        # Annotations may name types that are local to the function in which the handler is defined.
        local_names = dict(sys._getframe(1).f_locals)

        def decorate(function: Function) -> Function:
            handler = Handler(function, batch=batch is not None, local_names=local_names)
            self._subscriptions.append(Subscription(settings, handler, self._handle_hooks))
            return function

        return decorate

    def _check_other_subscribers(self, subject: str, group: str | None) -> None:
        others = [(each.settings.consumer.subject, each.settings.consumer.group) for each in self._subscriptions]
        if group is not None and (subject, group) in others:
            raise InvalidArgument(
                f"group {group!r} already has a subscriber of {subject!r}: each would get only some of the messages; "
                "give one of them its own group"
            )

    def around_handle(self, function: Function) -> Function:
        """Decorates an ``async def`` hook that wraps each call of a handler; the first one declared is outermost.

        The hook gets the list of messages (one, except for batch handlers) and ``proceed``: ``await proceed()`` calls
        the handler and raises what it raises. If the hook raises, the handler failed; if it returns, it succeeded.
        """
        _check_hook("around_handle", function)
        self._handle_hooks.append(function)
        return function

    def around_send(self, function: Function) -> Function:
        """Decorates an ``async def`` hook that wraps each ``app.send``; the first one declared is outermost.

        The hook gets the ``plait.Outgoing``, which it may change, and ``proceed``: ``return await proceed()`` sends the
        message and returns the receipt. ``app.post`` and the client's own methods do not call hooks.
        """
        _check_hook("around_send", function)
        self._send_hooks.append(function)
        return function

    def on_startup(self, function: Function) -> Function:
        """Decorates a hook that runs once the app is connected, before the first message.

        It is a ``def`` or ``async def`` without arguments.
        """
        self._startup.append(function)
        return function

    def on_shutdown(self, function: Function) -> Function:
        """Decorates a hook that runs after the last message, while still connected; the last declared runs first."""
        self._shutdown.append(function)
        return function

    # --- sending --------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client of the running app. Use it only in the thread of the app's loop."""
        if self._client is None:
            raise Closed("the app is not running; its client exists from start-up to shutdown")
        return self._client

    def _own_client(self) -> Client:
        client = self.client
        if threading.get_ident() != self._thread:
            raise InvalidArgument(
                "the app's client works only in the thread of the app's loop; in a def handler send with plait.sync"
            )
        return client

    async def send(
        self,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        oneway: bool = False,
    ) -> Receipt:
        """``client.send``, from hooks and ``async def`` handlers."""
        client = self._own_client()
        if not self._send_hooks:
            return await client.send(
                subject,
                body,
                key=key,
                tags=tags,
                headers=headers,
                delay=delay,
                deliver_at=deliver_at,
                oneway=oneway,
            )
        listed = [tags] if isinstance(tags, str) else list(tags or ())
        outgoing = Outgoing(subject, body, key, listed, dict(headers or {}), oneway, delay, deliver_at)
        proceed: Callable[[], Awaitable[Receipt]] = partial(outgoing.send, client)
        for hook in reversed(self._send_hooks):
            proceed = partial(hook, outgoing, proceed)
        return await proceed()

    def post(
        self,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> Ticket:
        """``client.post``, from hooks and ``async def`` handlers; shutdown waits for posted messages."""
        return self._own_client().post(
            subject, body, key=key, tags=tags, headers=headers, delay=delay, deliver_at=deliver_at
        )

    # --- running --------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until SIGTERM or SIGINT, on a new event loop (uvloop if it is installed).

        Plait logs to standard error from level INFO, unless the program has configured logging.
        """
        _log_to_stderr()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.run())

    def stop(self) -> None:
        """Start to drain, as SIGTERM does; ``run`` returns when that is done. May be called from any thread."""
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._stop)
            except RuntimeError:
                # The loop has ended, and the app with it.
                pass

    def _stop(self) -> None:
        if self._stopping is None or self._hurry is None:
            return
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        for consumer in self._consumers:
            consumer._stop()

    async def run(self) -> None:
        """Connect and handle messages until SIGTERM, SIGINT, ``stop`` or cancellation, then drain.

        A second signal cuts the draining short. A stop before the app is ready cancels connecting.
        Raises the error that prevents the service: no server, a group with other settings, a failed start-up hook.
        """
        if self._loop is not None:
            raise InvalidArgument("the app is already running; stop it first, or create another App")
        if not self._subscriptions:
            raise InvalidArgument("the app has no subscriber; decorate a function with @app.subscriber(...)")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()
        try:
            with self._signals(self._loop):
                async with AsyncExitStack() as stack:
                    client = self._new_client()
                    if not await _opened(stack, client, self._stopping):
                        return
                    self._client = client
                    for hook in self._shutdown:
                        stack.push_async_callback(_call, hook)
                    for hook in self._startup:
                        await _call(hook)
                    await self._serve(client, self._stopping, self._hurry)
        finally:
            self._client = self._loop = self._stopping = self._hurry = None
            self._consumers = []

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """SIGTERM and SIGINT stop the app; only the main thread of a process gets them."""
        previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                try:
                    loop.add_signal_handler(number, self._stop)
                except (NotImplementedError, RuntimeError):
                    # Not supported on this platform: control-C cancels ``run``, which drains too.
                    break
                previous[number] = handler
        try:
            yield
        finally:
            for number, handler in previous.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def _serve(self, client: Client, stopping: asyncio.Event, hurry: asyncio.Event) -> None:
        threads = sum(s.settings.concurrency for s in self._subscriptions if not s.handler.is_async)
        pool = HandlerThreads(max(threads, 1))
        workers: list[asyncio.Task[None]] = []
        self._consumers = consumers = []
        try:
            async with AsyncExitStack() as stack:
                for subscription in self._subscriptions:
                    consumer = subscription.consumer(client)
                    if not await _opened(stack, consumer, stopping):
                        return
                    consumers.append(consumer)
                for subscription, consumer in zip(self._subscriptions, consumers, strict=True):
                    for _ in range(subscription.settings.concurrency):
                        work = subscription.work(consumer, pool, stopping)
                        workers.append(tasks.child(work, f"plait-{subscription.handler.name}"))
                log.info("ready: %s, as client %s", "; ".join(map(str, self._subscriptions)), client.client_id)
                stopped = tasks.child(stopping.wait(), "plait-stopping")
                try:
                    await asyncio.wait([*workers, stopped], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()
                    await self._drain(workers, stopping, hurry)
        finally:
            pool.shutdown(wait=False)
        for worker in workers:
            if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
                raise error

    async def _drain(self, workers: list[asyncio.Task[None]], stopping: asyncio.Event, hurry: asyncio.Event) -> None:
        """Take no new messages and wait for running handlers, up to the limits. Closing the consumers returns the rest.

        A cancellation meanwhile has the effect of a second signal: running handlers are given up at once.
        """
        log.info("draining: no new messages, %d workers finish", sum(not worker.done() for worker in workers))
        stopping.set()
        # Also after ``stop``, which may have been called before the consumers existed.
        for consumer in self._consumers:
            consumer._stop()
        draining = tasks.child(self._finish(workers, hurry), "plait-drain")
        cancelled = await end_of(draining, hurry.set)
        for subscription, consumer in zip(self._subscriptions, self._consumers, strict=True):
            if subscription.unfinished:
                consumer._fetcher.keep_locks()
        if cancelled is not None:
            raise cancelled
        draining.result()

    async def _finish(self, workers: list[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        """Wait for the workers, then cancel those that are left."""
        loop = asyncio.get_running_loop()
        hurried = tasks.child(hurry.wait(), "plait-hurry")
        deadline = loop.time() + self.limits.drain_seconds
        try:
            while busy := [worker for worker in workers if not worker.done()]:
                remaining = deadline - loop.time()
                if remaining <= 0 or hurry.is_set():
                    log.warning("%d handlers did not finish; their messages are returned to the group", len(busy))
                    break
                await asyncio.wait([*busy, hurried], timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            for worker in workers:
                worker.cancel()
        # A cancelled handler may need a moment to end, or ignore the cancellation.
        await asyncio.wait(workers, timeout=self.limits.cancel_seconds)


def _log_to_stderr() -> None:
    """Log to standard error unless logging is configured: a silent service looks like one that hangs."""
    plait_log = logging.getLogger("plait")
    if not plait_log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        plait_log.addHandler(handler)
        plait_log.setLevel(logging.INFO)


def _check_hook(name: str, function: Callable[..., Any]) -> None:
    if not inspect.iscoroutinefunction(function):
        raise InvalidArgument(f"{name} takes an async def, not {function!r}")


def _positive(name: str, value: Duration) -> float:
    seconds = seconds_of(value)
    if seconds <= 0:
        raise InvalidArgument(f"{name} must be more than 0, not {value!r}")
    return seconds


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidArgument(f"{name} must be a number from 1, not {value!r}")


async def _opened(stack: AsyncExitStack, thing: Client | Consumer, stopping: asyncio.Event) -> bool:
    """Open a client or a consumer, to be closed with the stack; returns False if the app was stopped meanwhile."""
    opening = tasks.child(stack.enter_async_context(thing), "plait-app-open")
    stopped = tasks.child(stopping.wait(), "plait-stopping")
    try:
        await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not opening.done():
            opening.cancel()
            await end_of(opening)
    if opening.cancelled() and stopping.is_set():
        log.info("the app was stopped before it was ready")
        return False
    opening.result()
    return True


async def _call(hook: Callable[[], Any]) -> None:
    result = hook()
    if inspect.isawaitable(result):
        await result
