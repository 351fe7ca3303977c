"""One run of an app: connects, opens the consumers, starts the workers, and drains them at the end."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from plait import tasks
from plait.client.app.subscription import Subscription
from plait.client.client import Client
from plait.client.closing import end_of
from plait.client.consume.consumer import Consumer
from plait.limits import ClientLimits

log = logging.getLogger("plait.app")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

P = ParamSpec("P")
T = TypeVar("T")

#: A future, and the call whose result it gets.
_Work = tuple["Future[Any]", Callable[[], Any]]
#: A start-up or shutdown hook.
LifecycleHook = Callable[[], Any]


class HandlerThreads(Executor):
    """At most ``count`` threads for ``def`` handlers, started when there is work for them.

    A thread cannot be stopped from outside. These are daemon threads, so the program does not wait at its end for a
    handler that does not return: the process of an app ends after its drain time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in one of the threads."""
        if self._stopped:
            raise RuntimeError("the handler threads are stopped and take no more calls")
        future: Future[T] = Future()
        self._work.put((future, functools.partial(call, *args, **kwargs)))
        if len(self._threads) < self._count:
            name = f"plait-handler-{len(self._threads) + 1}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. Each thread ends after its current call; ``wait`` waits for that."""
        self._stopped = True
        for _ in self._threads:
            self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            if not future.set_running_or_notify_cancel():
                continue
            result: Any = None
            failure: BaseException | None = None
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the caller looks at it
                failure = error
            if self._stopped:
                # The loop that waited for it may be closed.
                return
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)


class AppRun:
    """From connecting to the end of draining, on the running loop."""

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        startup: Sequence[LifecycleHook],
        shutdown: Sequence[LifecycleHook],
        limits: ClientLimits,
    ) -> None:
        self._subscriptions = subscriptions
        self._startup = startup
        self._shutdown = shutdown
        self._limits = limits
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        #: None: not connected.
        self.client: Client | None = None
        self.stopping = asyncio.Event()
        #: True if the draining is to end now: running handlers are cancelled.
        self._hurry = asyncio.Event()
        self._consumers: list[Consumer] = []

    def stop(self) -> None:
        """Start to drain; a second call cuts the draining short."""
        if self.stopping.is_set():
            self._hurry.set()
        self.stopping.set()
        for consumer in self._consumers:
            consumer._stop()

    async def run(self, client: Client) -> None:
        """Connect the client and handle messages until ``stop``, a signal or cancellation, then drain."""
        with self._signals():
            async with AsyncExitStack() as stack:
                if not await self._opened(stack, client):
                    return
                self.client = client
                for hook in self._shutdown:
                    stack.push_async_callback(_call, hook)
                for hook in self._startup:
                    await _call(hook)
                await self._serve(client)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Make SIGTERM and SIGINT stop the app; only the main thread of a process gets them."""
        previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                try:
                    self.loop.add_signal_handler(number, self.stop)
                except (NotImplementedError, RuntimeError):
                    # Not supported on this platform: control-C cancels ``run``, which drains too.
                    break
                previous[number] = handler
        try:
            yield
        finally:
            for number, handler in previous.items():
                self.loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def _opened(self, stack: AsyncExitStack, thing: Client | Consumer) -> bool:
        """Open a client or a consumer, to be closed with the stack; returns False if the app was stopped meanwhile."""
        opening = tasks.child(stack.enter_async_context(thing), "plait-app-open")
        stopped = tasks.child(self.stopping.wait(), "plait-stopping")
        try:
            await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not opening.done():
                opening.cancel()
                await end_of(opening)
        if opening.cancelled() and self.stopping.is_set():
            log.info("the app was stopped before it was ready")
            return False
        opening.result()
        return True

    async def _serve(self, client: Client) -> None:
        threads = sum(s.settings.concurrency for s in self._subscriptions if not s.handler.is_async)
        pool = HandlerThreads(max(threads, 1))
        workers: list[asyncio.Task[None]] = []
        try:
            async with AsyncExitStack() as stack:
                for subscription in self._subscriptions:
                    consumer = subscription.consumer(client)
                    if not await self._opened(stack, consumer):
                        return
                    self._consumers.append(consumer)
                for subscription, consumer in zip(self._subscriptions, self._consumers, strict=True):
                    for _ in range(subscription.settings.concurrency):
                        work = subscription.work(consumer, pool, self.stopping)
                        workers.append(tasks.child(work, f"plait-{subscription.handler.name}"))
                log.info("ready: %s, as client %s", "; ".join(map(str, self._subscriptions)), client.client_id)
                stopped = tasks.child(self.stopping.wait(), "plait-stopping")
                try:
                    await asyncio.wait([*workers, stopped], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()
                    await self._drain(workers)
        finally:
            pool.shutdown(wait=False)
        for worker in workers:
            if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
                raise error

    async def _drain(self, workers: list[asyncio.Task[None]]) -> None:
        """Take no new messages and wait for running handlers, up to the limits. Closing the consumers returns the rest.

        A cancellation meanwhile has the effect of a second signal: running handlers are given up at once.
        """
        log.info("draining: no new messages, %d workers finish", sum(not worker.done() for worker in workers))
        self.stopping.set()
        # Also after ``stop``, which may have been called before the consumers existed.
        for consumer in self._consumers:
            consumer._stop()
        draining = tasks.child(self._finish(workers), "plait-drain")
        cancelled = await end_of(draining, self._hurry.set)
        for subscription, consumer in zip(self._subscriptions, self._consumers, strict=True):
            if subscription.unfinished:
                consumer._fetcher.keep_locks()
        if cancelled is not None:
            raise cancelled
        draining.result()

    async def _finish(self, workers: list[asyncio.Task[None]]) -> None:
        """Wait for the workers, then cancel those that are left."""
        hurried = tasks.child(self._hurry.wait(), "plait-hurry")
        deadline = self.loop.time() + self._limits.drain_seconds
        try:
            while busy := [worker for worker in workers if not worker.done()]:
                remaining = deadline - self.loop.time()
                if remaining <= 0 or self._hurry.is_set():
                    log.warning("%d handlers did not finish; their messages are returned to the group", len(busy))
                    break
                await asyncio.wait([*busy, hurried], timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            for worker in workers:
                worker.cancel()
        # A cancelled handler may need a moment to end, or ignore the cancellation.
        await asyncio.wait(workers, timeout=self._limits.cancel_seconds)


async def _call(hook: LifecycleHook) -> None:
    result = hook()
    if inspect.isawaitable(result):
        await result
