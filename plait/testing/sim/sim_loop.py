"""``SimLoop`` is an asyncio loop on virtual time. A ``Simulation`` runs many such loops in one thread.

The loop runs in turns, as asyncio's loop does. A turn runs, in order, the callbacks that are ready when it begins.
Callbacks that become ready during a turn wait for the next turn. Other loops may run between two turns. A turn takes a
little virtual time, so the clock advances even if the program never waits. Functions for executors run inside the
loop, in order, after a delay. Their results arrive after another delay, as from a thread.
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
from typing import Any, TypeVar

from plait import chance
from plait.testing.sim.machine import Machine, SimThread
from plait.testing.sim.network import Network
from plait.testing.simulated_disk import SimulatedCrash

T = TypeVar("T")
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

#: A turn of a loop takes between this time and twice this time.
TURN_SECONDS = 0.00001
#: The loop removes finished tasks from its list whenever the list has grown by this many tasks.
TASKS_KEPT = 256
#: The most attempts to end one coroutine of a dead process.
BURY_TRIES = 50


class _Handle(asyncio.Handle):
    """``asyncio.Handle`` without the check of the debug mode on every use."""

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
    """A loop with timers and network, but without signals, pipes, files or subprocesses. Made by ``Process.loop``."""

    def __init__(self, machine: Machine, network: Network, seed: str) -> None:
        self.machine = machine
        self._timeline = machine.timeline
        self._network = network
        self.dead = False
        #: The loop's clock differs from the process's clock by this much, as if it had stopped while the machine slept.
        self._asleep = random.Random(f"{seed} asleep").uniform(0.0, 900.0)
        self._random = random.Random(f"{seed} loop")
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_number = 0
        self._cancelled = 0
        #: The virtual time of the loop's next turn; None: no turn is scheduled.
        self._due: float | None = None
        self._free_at = 0.0
        self._in_turn = False
        self._closed = False
        self._threads_run = self._threads_answered = 0.0
        #: Threads that block for virtual time.
        self._blocked: set[SimThread] = set()
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_limit = TASKS_KEPT
        self._handler: ExceptionHandler | None = None

    # --- time and callbacks ---------------------------------------------------------------------

    def time(self) -> float:
        return self.machine.clock.monotonic() - self._asleep

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

    #: Thread-safe as it is, because one thread runs all loops.
    call_soon_threadsafe = call_soon  # type: ignore[assignment]

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
        # asyncio calls ``_timer_handle_cancelled`` only for a scheduled handle.
        handle._scheduled = True  # type: ignore[attr-defined]
        self._timer_number += 1
        heapq.heappush(self._timers, (self.machine.clock.virtual(when + self._asleep), self._timer_number, handle))
        if not self._in_turn:
            self._wake()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by the handle. Remove cancelled timers when there are many: most timers are cancelled time-outs."""
        self._cancelled += 1
        if self._cancelled > 100 and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    # --- driven by the simulation ---------------------------------------------------------------

    def _wake(self) -> None:
        """Schedule the next turn with the simulation."""
        if self.dead or self.machine.paused:
            return
        if self._ready:
            now, free = self._timeline.now, self._free_at
            due = now if now > free else free
        else:
            timers = self._timers
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._cancelled -= 1
            if not timers:
                return
            due = max(timers[0][0], self._free_at, self._timeline.now)
        if self._due is None or due < self._due:
            self._due = due
            self._timeline._push(due, self)

    def _fire(self, due: float) -> None:
        """Run the turn that was scheduled for ``due``, unless it was rescheduled since."""
        if due != self._due:
            return
        self._due = None
        if not self.dead and not self.machine.paused:
            self._turn()
            self._wake()

    def _turn(self) -> None:
        now = self._timeline.now
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle.cancelled():
                self._cancelled -= 1
            else:
                ready.append(handle)
        count = len(ready)
        self._timeline.trace.mix(b"%s %d %d" % (self.machine.label, int(now * 1e9), count))
        self._in_turn = True
        chances = chance.use(self.machine.random)
        if events._get_running_loop() is not self:
            # Do not reset the running loop after the turn, because that is slow. The next turn or ``Later`` sets it.
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
        """Stop the loop. No callback runs any more, not even clean-up."""
        self.dead = True
        self._ready.clear()
        self._timers.clear()
        for thread in self._blocked:
            thread.kill()
        self._blocked.clear()

    def _bury(self) -> None:
        """End the unfinished coroutines of a dead loop, without any effect on the simulation."""
        self._die()
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            # A coroutine that ends may start new tasks.
            while self._tasks:
                tasks, self._tasks = self._tasks, []
                for task in tasks:
                    if not task.done():
                        # Suppress asyncio's warning that the task was still pending.
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
        # Keep a reference, because a task that is garbage-collected would run the clean-up of a killed process.
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
        low, high = self.machine.thread_seconds
        draw = self._random.uniform
        # Results arrive in order, so all threads have ended when the last result arrives.
        self._threads_run = run = max(self._threads_run, self.time() + draw(low, high))
        self._threads_answered = answered = max(self._threads_answered, run + draw(low, high))

        def turn(thread: SimThread) -> None:
            """Let the thread run until it blocks or ends."""
            self._blocked.discard(thread)
            self.machine.thread = thread
            thread.resume()
            if thread.blocked is not None:
                self._blocked.add(thread)
                self.call_at(self.time() + thread.blocked, turn, thread)
            else:
                settle(thread.result, thread.error)

        def settle(result: T | None, error: BaseException | None) -> None:
            self.call_at(max(answered, self.time()), _settle, future, result, error)

        def work() -> None:
            if self.machine.blocking_threads:
                turn(SimThread(partial(func, *args)))
                return
            events._set_running_loop(None)
            try:
                settle(func(*args), None)
            except SimulatedCrash:
                raise
            except BaseException as error:  # noqa: BLE001 - the future raises it
                settle(None, error)
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
        return await self._network.connect(self, self.machine, protocol_factory, host, port)

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
        return self._network.listen(self, self.machine, protocol_factory, host or "127.0.0.1", port or 0)

    def remove_reader(self, fd: Any) -> bool:
        """Does nothing: no file descriptors are watched."""
        return False

    # --- the rest -------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._in_turn

    def is_closed(self) -> bool:
        return self.dead

    def close(self) -> None:
        self._closed = True
        self._die()

    def stop(self) -> None:
        """End the thread that this loop represents."""
        self._die()

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Does nothing: there is no debug mode."""

    async def shutdown_asyncgens(self) -> None:
        """Does nothing: the simulation closes generators."""

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.machine.unhandled(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), SimulatedCrash):
            self.machine.kill()
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
    """End a coroutine that no loop will resume. What it awaits while it ends is ignored."""
    for _ in range(BURY_TRIES):
        try:
            coroutine.throw(SimulatedCrash("the process is dead"))
        except BaseException:  # noqa: BLE001 - the process is dead
            return
    sys.stderr.write(f"simulation: {coroutine!r} does not end\n")
