"""``App``: functions that handle messages, run as a service.

Return acknowledges, raise makes the group try the message again as its retry policy says (``RetryLater``: when the
handler says; ``Suspend``: and nothing else until then).
SIGTERM and SIGINT drain: no new messages, what is being handled is finished within ``drain_seconds``, the rest is given
back.
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
from plait.client.app.signature import Handler
from plait.client.app.subscription import HandleHook, SubscriberSettings, Subscription
from plait.client.arguments import Duration, Start, seconds_of, start_of, wait_of
from plait.client.blocking.loop_thread import new_event_loop
from plait.client.client import DEFAULT_ADDRESS, Client
from plait.client.closing import end_of
from plait.client.consume.consumer import Consumer
from plait.client.consume.ordered.ordered_consumer import OrderedConsumer, check_ordered
from plait.client.send.due_time import Delay
from plait.client.send.outgoing import Outgoing, SendHook
from plait.client.types import Receipt, Ticket
from plait.errors import Closed, InvalidArgument
from plait.limits import ClientLimits
from plait.model import names
from plait.model.retry_policy import Retry

log = logging.getLogger("plait.app")

Function = TypeVar("Function", bound=Callable[..., Any])

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class App:
    """A service made of handlers. ``group`` is that of every subscriber that names none."""

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
        # An address or name that cannot work is found now, not when the service starts.
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

        Its parameters say what it gets: one annotated ``plait.Message`` the message, another the body, decoded into
        its annotation (bytes, str, dict, a msgspec struct, a dataclass, a pydantic model). With ``batch=n`` it gets
        lists of up to n. ``concurrency`` is how many calls run at a time. A call that takes longer than ``timeout`` has
        failed; an ``async def`` is cancelled then. With ``suspend`` any failure keeps the handler from messages for
        that long, as ``plait.Suspend`` does. With ``ordered`` or ``affinity`` messages of one key are handled one after
        another, however many calls run. A body that does not decode into the annotation goes to the dead letters at
        once, with ``undecodable="retry"`` only after the attempts that the group's policy gives any failure. The other
        arguments are those of ``client.consumer``.
        """
        names.check("subject", subject)
        group = None if broadcast else group or self.group
        if group is None and not broadcast:
            raise InvalidArgument(
                f"subscriber of {subject!r} has no group; name one here or in App(group=...), or say broadcast=True"
            )
        if group is not None:
            names.check_group(group)
        _check_count("batch", batch)
        _check_count("concurrency", concurrency)
        _check_count("prefetch", prefetch)
        if delivery not in ("at_least_once", "at_most_once"):
            raise InvalidArgument(f"delivery {delivery!r} is not known; use 'at_least_once' or 'at_most_once'")
        check_ordered(ordered, affinity, group, delivery, handling)
        if undecodable not in ("reject", "retry"):
            raise InvalidArgument(f"undecodable {undecodable!r} is not known; use 'reject' or 'retry'")
        start_of(start, 0)
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidArgument(f"retry is {retry!r}; use plait.Retry(...)")
        if group is not None and any(
            (s.settings.subject, s.settings.group) == (subject, group) for s in self._subscriptions
        ):
            raise InvalidArgument(
                f"group {group!r} has a subscriber of {subject!r} already, each would get a share of the messages; "
                "give one of them a group of its own"
            )
        settings = SubscriberSettings(
            subject=subject,
            group=group,
            batch=batch,
            concurrency=concurrency,
            delivery=delivery,
            broadcast=broadcast,
            start=start,
            prefetch=prefetch,
            retry=retry,
            timeout=None if timeout is None else _positive("timeout", timeout),
            suspend=None if suspend is None else wait_of(suspend),
            ordered=ordered,
            affinity=affinity,
            handling=None if handling is None else seconds_of(handling),
            undecodable=undecodable,
        )
        # Types that a function defined for its own handlers are found too.
        local_names = dict(sys._getframe(1).f_locals)

        def decorate(function: Function) -> Function:
            handler = Handler(function, batch=batch is not None, local_names=local_names)
            self._subscriptions.append(Subscription(settings, handler, self._handle_hooks))
            return function

        return decorate

    def around_handle(self, function: Function) -> Function:
        """Decorates an ``async def`` that is put around each call of a handler; the first one declared is outermost.

        It gets the list of messages (one, but for batch handlers) and what goes on: ``await proceed()`` calls the
        handler and raises what it raises. What the hook raises counts as the handler's failure, its return as success.
        """
        _check_hook("around_handle", function)
        self._handle_hooks.append(function)
        return function

    def around_send(self, function: Function) -> Function:
        """Decorates an ``async def`` that is put around each ``app.send``; the first one declared is outermost.

        It gets the ``plait.Outgoing``, which it may change, and what goes on: ``return await proceed()`` sends and
        gives the receipt. ``app.post`` and the client itself go past it.
        """
        _check_hook("around_send", function)
        self._send_hooks.append(function)
        return function

    def on_startup(self, function: Function) -> Function:
        """Decorates what runs once connected, before the first message; ``def`` or ``async def``, no arguments."""
        self._startup.append(function)
        return function

    def on_shutdown(self, function: Function) -> Function:
        """Decorates what runs after the last message, while still connected; the last one declared runs first."""
        self._shutdown.append(function)
        return function

    # --- sending --------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The app's client while it runs, for its loop's thread."""
        if self._client is None:
            raise Closed("the app is not running; its client exists from start-up to shutdown")
        return self._client

    def _own_client(self) -> Client:
        client = self.client
        if threading.get_ident() != self._thread:
            raise InvalidArgument(
                "the app's client belongs to its loop; a def handler runs in another thread and sends with plait.sync"
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
        """``client.post``, from hooks and ``async def`` handlers; shutdown waits for what is posted."""
        return self._own_client().post(
            subject, body, key=key, tags=tags, headers=headers, delay=delay, deliver_at=deliver_at
        )

    # --- running --------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until SIGTERM or SIGINT, on a loop of its own (uvloop where it is installed).

        What Plait logs goes to standard error, from INFO on, unless the program has set up logging itself.
        """
        _log_to_stderr()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.run())

    def stop(self) -> None:
        """Begin to drain, as SIGTERM does; ``run`` returns when that is done. From any thread."""
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

        A second signal cuts the draining short. A stop that comes before the app is ready ends the connecting.
        Raises what makes the service impossible: no server, a group with other settings, a start-up hook's error.
        """
        if self._loop is not None:
            raise InvalidArgument("the app runs already")
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
                    # No such thing on this platform: control-C cancels ``run``, which drains too.
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
        """No new messages; finish what is being handled, within limits. The consumers' closing does the rest.

        A cancellation meanwhile does what a second signal does: what is being handled is given up at once, in order.
        """
        log.info("draining: no new messages, %d workers finish", sum(not worker.done() for worker in workers))
        stopping.set()
        # Also after ``stop``, which may have come before they were there.
        for consumer in self._consumers:
            consumer._stop()
        draining = tasks.child(self._finish(workers, hurry), "plait-drain")
        cancelled = await end_of(draining, hurry.set)
        for subscription, consumer in zip(self._subscriptions, self._consumers, strict=True):
            if subscription.unfinished and isinstance(consumer, OrderedConsumer):
                consumer._keep_locks()
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
                    log.warning("%d handlers did not finish; their messages are given back", len(busy))
                    break
                await asyncio.wait([*busy, hurried], timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            for worker in workers:
                worker.cancel()
        # A handler may need a moment to end, or ignore that it is cancelled.
        await asyncio.wait(workers, timeout=self.limits.cancel_seconds)


def _log_to_stderr() -> None:
    """A service that says nothing looks like one that hangs."""
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
    """Open a client or a consumer, to be closed with the stack; False: the app was stopped before it was open."""
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
        log.info("stopped before it was ready")
        return False
    opening.result()
    return True


async def _call(hook: Callable[[], Any]) -> None:
    result = hook()
    if inspect.isawaitable(result):
        await result
