"""``SimLoop``: an asyncio loop on virtual time, one of many that a ``Simulation`` drives in one thread.

It runs turn by turn as asyncio's own does: what became ready before the turn runs in it, in order, and what that makes
ready waits for the next. Between two turns any other loop may run. A turn takes a little virtual time, so no program
can stop the clock by being busy. Work for threads runs inside the loop, after a delay and in the order it was given,
and its result comes after another delay, as from a thread.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from plait import chance
from plait.testing.sim.threads import SimThread
from plait.testing.simulated_disk import SimulatedCrash

if TYPE_CHECKING:
    from plait.testing.sim.process import Process
    from plait.testing.sim.simulation import Simulation

T = TypeVar("T")

#: A turn of a loop takes this long, or up to twice that.
TURN_SECONDS = 0.00001
#: Finished tasks are let go of when there are so many more than at the last time.
TASKS_KEPT = 256
#: Throws into one coroutine of a dead process before it is left to itself.
BURY_TRIES = 50


class _Handle(asyncio.Handle):
    """As asyncio's own, which asks every time whether it is to be debugged."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], loop: SimLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class SimLoop(asyncio.AbstractEventLoop):
    """Made by ``Process.loop``. Everything of the network and of time; no signals, pipes, files or subprocesses."""

    def __init__(self, simulation: Simulation, process: Process, name: str, seed: str) -> None:
        self.simulation = simulation
        self.process = process
        self.name = name
        self.dead = False
        #: The loop's clock has stood still for this long while the machine slept: it is not the process's own clock.
        self._asleep = random.Random(f"{seed} asleep").uniform(0.0, 900.0)
        self._random = random.Random(f"{seed} loop")
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_number = 0
        self._cancelled = 0
        #: When the simulation will look at it next.
        self._due: float | None = None
        self._free_at = 0.0
        self._in_turn = False
        self._closed = False
        self._threads_run = self._threads_told = 0.0
        #: Threads that are busy for a while.
        self._blocked: set[SimThread] = set()
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_limit = TASKS_KEPT
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # --- time and callbacks ---------------------------------------------------------------------

    def time(self) -> float:
        return self.process.clock.monotonic() - self._asleep

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        if self.dead:
            self._check_closed()
            handle.cancel()
            return handle
        self._ready.append(handle)
        if not self._in_turn:
            self._wake()
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self.dead:
            handle.cancel()
            return handle
        # Known to the handle as scheduled, so that it tells when it is cancelled.
        handle._scheduled = True  # type: ignore[attr-defined]
        self._timer_number += 1
        heapq.heappush(self._timers, (self.process.clock.virtual(when + self._asleep), self._timer_number, handle))
        if not self._in_turn:
            self._wake()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by the handle. Most timers are time-outs that never come: they must not pile up."""
        self._cancelled += 1
        if self._cancelled > 100 and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    # --- driven by the simulation ---------------------------------------------------------------

    def _wake(self) -> None:
        """Tell the simulation when there is something to do."""
        if self.dead or self.process.paused:
            return
        if self._ready:
            now, free = self.simulation.now, self._free_at
            due = now if now > free else free
        else:
            timers = self._timers
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._cancelled -= 1
            if not timers:
                return
            due = max(timers[0][0], self._free_at, self.simulation.now)
        if self._due is None or due < self._due:
            self._due = due
            self.simulation._push(due, self)

    def _fire(self, due: float) -> None:
        """The simulation has come to that time; nothing if it was asked to look earlier or later since."""
        if due != self._due:
            return
        self._due = None
        if not self.dead and not self.process.paused:
            self._turn()
            self._wake()

    def _turn(self) -> None:
        now = self.simulation.now
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle.cancelled():
                self._cancelled -= 1
            else:
                ready.append(handle)
        count = len(ready)
        self.simulation.trace.mix(b"%s %d %d" % (self.process.label, int(now * 1e9), count))
        self._in_turn = True
        chances = chance.use(self.process.random)
        if events._get_running_loop() is not self:
            # It stays so until another loop has a turn, or something happens outside of all: to say it is not cheap.
            events._set_running_loop(self)
        try:
            for _ in range(count):
                handle_ = ready.popleft()
                if not handle_._cancelled:
                    handle_._run()
                if self.dead:
                    break
        finally:
            chance.use(chances)
            self._in_turn = False
        self._free_at = now + TURN_SECONDS * (1.0 + self._random.random())

    def _die(self) -> None:
        """Nothing of it runs any more, not even what cleans up."""
        self.dead = True
        self._ready.clear()
        self._timers.clear()
        for thread in self._blocked:
            thread.kill()
        self._blocked.clear()

    def _bury(self) -> None:
        """After the end: take its unfinished coroutines apart, where they can do nothing."""
        self._die()
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            # What ends may begin something more.
            while self._tasks:
                tasks, self._tasks = self._tasks, []
                for task in tasks:
                    if not task.done():
                        # Nobody wants to hear that it was pending.
                        task._log_destroy_pending = False  # type: ignore[attr-defined]
                        _take_apart(task.get_coro())
        finally:
            events._set_running_loop(before)
            self._tasks.clear()

    # --- futures, tasks, threads ----------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        self._check_closed()
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        # Kept: a task that is collected runs the clean-up of a process that was killed.
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_limit:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._tasks_limit = len(self._tasks) + TASKS_KEPT
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        self._check_closed()
        future: asyncio.Future[T] = self.create_future()
        low, high = self.process.thread_seconds
        draw = self._random.uniform
        # In order: who waits for all threads to end is told when they have.
        self._threads_run = run = max(self._threads_run, self.time() + draw(low, high))
        self._threads_told = told = max(self._threads_told, run + draw(low, high))

        def turn(thread: SimThread) -> None:
            """Let the thread run until it blocks or ends."""
            self._blocked.discard(thread)
            self.process._thread = thread
            thread.resume()
            if thread.blocked is not None:
                self._blocked.add(thread)
                self.call_at(self.time() + thread.blocked, turn, thread)
            else:
                self.call_at(max(told, self.time()), _settle, future, thread.result, thread.error)

        def work() -> None:
            if self.process.blocking_threads:
                turn(SimThread(partial(func, *args)))
                return
            events._set_running_loop(None)
            try:
                result = func(*args)
            except SimulatedCrash:
                raise
            except BaseException as error:  # noqa: BLE001 - told to who waits for it
                self.call_at(told, _settle, future, None, error)
            else:
                self.call_at(told, _settle, future, result, None)
            finally:
                events._set_running_loop(self)

        self.call_at(run, work)
        return future

    # --- the network ----------------------------------------------------------------------------

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        **options: Any,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        _refuse(options)
        if host is None or port is None:
            raise ValueError("a simulated connection needs a host and a port")
        return await self.simulation.network.connect(self, protocol_factory, host, port)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        backlog: int = 100,
        start_serving: bool = True,
        **options: Any,
    ) -> asyncio.AbstractServer:
        _refuse(options)
        return self.simulation.network.listen(self, protocol_factory, host or "127.0.0.1", port or 0)

    def remove_reader(self, fd: Any) -> bool:
        """No file is ever waited for."""
        return False

    # --- the rest -------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._in_turn

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._die()

    def stop(self) -> None:
        """As ``run_forever`` would end: the thread that this loop stands for is over."""
        self._die()

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """There is no other mode."""

    async def shutdown_asyncgens(self) -> None:
        """There are none to shut down."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._handler = handler

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.simulation._unhandled(self.process, context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), SimulatedCrash):
            self.process.kill()
        elif self.dead:
            return
        elif self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def _check_closed(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _refuse(options: dict[str, Any]) -> None:
    unknown = [name for name, value in options.items() if value is not None]
    if unknown:
        raise ValueError(f"the simulated network has no {', '.join(unknown)}")


def _take_apart(coroutine: Any) -> None:
    """End a coroutine that nothing will ever continue; what it awaits while it ends is not waited for."""
    for _ in range(BURY_TRIES):
        try:
            coroutine.throw(SimulatedCrash("the process is dead"))
        except BaseException:  # noqa: BLE001 - its last words
            return
    sys.stderr.write(f"simulation: {coroutine!r} does not end\n")
