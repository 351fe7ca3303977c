"""``Simulation``: several processes, their network, disks and clocks, in one thread and on one virtual time.

    with Simulation(seed=7) as sim:
        broker = sim.process("broker", serve)
        broker.start()
        sim.run(send_something(sim.process("producer")))
        broker.kill()

Every random choice follows from the seed: latencies, how reads are split, which of two ready loops runs first, and what
shipped code draws by ``plait.chance``. So a run repeats exactly. It fails on an unhandled exception, when Plait logs an
error, or when a wait takes too long; the failure names the command that repeats it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import random
import sys
import traceback
from asyncio import events
from collections.abc import Callable, Coroutine, Iterable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from plait.testing.sim.network import Network
from plait.testing.sim.process import Main, Process
from plait.testing.sim.sim_loop import SimLoop
from plait.testing.sim.trace import Trace

T = TypeVar("T")

#: A run that takes longer than this, in virtual time, is stuck.
RUN_SECONDS = 3600.0
#: A run with more steps is stuck, too.
STEPS_MAX = 5_000_000
#: The largest drift of a machine's clock.
DRIFT_MAX = 0.0002


class SimulationFailed(AssertionError):
    """A simulated process failed, or a wait took too long."""


class _Event(Protocol):
    def _fire(self, due: float) -> None: ...


class Later:
    """A scheduled call, outside of any process."""

    __slots__ = ("_arguments", "_callback", "cancelled")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._callback = callback
        self._arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        """Do not call it."""
        self.cancelled = True

    def _fire(self, due: float) -> None:
        if not self.cancelled:
            if events._get_running_loop() is not None:
                events._set_running_loop(None)
            self._callback(*self._arguments)


class Simulation:
    """Runs processes on virtual time. ``allow_logs`` are patterns of error messages that Plait may log."""

    def __init__(self, seed: int, *, allow_logs: Iterable[str] = ()) -> None:
        self.seed = seed
        #: Virtual seconds since the beginning.
        self.now = 0.0
        self.random = random.Random(f"{seed} simulation")
        self.trace = Trace()
        self.network = Network(self, random.Random(f"{seed} network"))
        self.processes: dict[str, Process] = {}
        self._heap: list[tuple[float, float, int, _Event]] = []
        self._number = 0
        self._steps = 0
        self._loops: list[SimLoop] = []
        self._defects: list[BaseException] = []
        self._closed = False
        self._logs = _Logs(self, tuple(allow_logs))
        logging.getLogger("plait").addHandler(self._logs)

    # --- processes ------------------------------------------------------------------------------

    def process(self, name: str, main: Main | None = None) -> Process:
        """The process of that name, made at the first call; each start of it runs ``main``."""
        process = self.processes.get(name)
        if process is None:
            drift = self.random.uniform(-DRIFT_MAX, DRIFT_MAX)
            process = self.processes[name] = Process(self, name, main, drift)
        elif main is not None:
            process.main = main
        return process

    def heal(self) -> None:
        """End every fault: no cuts, no pauses, and every process with a main runs."""
        self.network.heal()
        for process in self.processes.values():
            process.resume()
            if not process.alive and process.main is not None:
                process.start()

    def _made(self, loop: SimLoop) -> None:
        self._loops.append(loop)

    # --- time -----------------------------------------------------------------------------------

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> Later:
        """Call ``callback`` after virtual time, outside of any process: for faults and the network."""
        later = Later(callback, arguments)
        self._push(self.now + seconds, later)
        return later

    def _push(self, due: float, event: _Event) -> None:
        self._number += 1
        heapq.heappush(self._heap, (due, self.random.random(), self._number, event))

    def run(self, coroutine: Coroutine[Any, Any, T], *, seconds: float = RUN_SECONDS) -> T:
        """Run the coroutine in the process "test" until it is done; all other processes run meanwhile."""
        task = self.process("test").spawn(coroutine)
        self.run_until(task.done, seconds=seconds, waiting_for=getattr(coroutine, "__qualname__", "it"))
        result: T = task.result()
        return result

    async def sleep(self, seconds: float) -> None:
        """Wait for virtual time in a simulated process."""
        loop = events._get_running_loop()
        if not isinstance(loop, SimLoop) or loop.simulation is not self:
            raise RuntimeError("only a process of the simulation can wait on its time")
        await asyncio.sleep(seconds)

    def run_for(self, seconds: float) -> None:
        """Let this much virtual time pass."""
        end = self.now + seconds
        self._step_until(lambda: False, end)
        self.now = end

    def run_until(
        self, condition: Callable[[], object], *, seconds: float = RUN_SECONDS, waiting_for: str = "the condition"
    ) -> None:
        """Run until the condition, checked after every step, holds; raises after ``seconds`` of virtual time."""
        end = self.now + seconds
        if not self._step_until(condition, end):
            left = "no event is left" if not self._heap else f"{seconds:g} s have passed"
            raise SimulationFailed(f"{waiting_for} is not done and {left}")

    def _step_until(self, condition: Callable[[], object], end: float) -> bool:
        heap = self._heap
        hooks = sys.get_asyncgen_hooks()
        outer = events._get_running_loop()
        events._set_running_loop(None)
        # A dropped generator is closed by the loop that runs at that moment.
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_close_generator)
        try:
            while not condition():
                if not heap or heap[0][0] > end:
                    return False
                due, _, _, event = heapq.heappop(heap)
                self.now = due
                event._fire(due)
                self._steps += 1
                if self._defects:
                    raise self._defects.pop(0)
                if self._steps > STEPS_MAX:
                    raise SimulationFailed(f"{STEPS_MAX} steps and no end")
            return True
        except Exception as error:
            self._explain(error)
            raise
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outer)

    # --- failures -------------------------------------------------------------------------------

    def log(self, process: str, text: str) -> None:
        """Add an event to the trace."""
        self.trace.add(self.now, process, text)

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        """Fail the run at the end of this step."""
        failure = SimulationFailed(message)
        failure.__cause__ = cause
        self._defects.append(failure)

    def _unhandled(self, process: Process, context: dict[str, Any]) -> None:
        error = context.get("exception")
        message = context.get("message", "unhandled")
        if error is not None and process.expects(error):
            self.log(process.name, f"{message}: {error!r} (expected)")
            return
        details = "" if error is None else "\n" + "".join(traceback.format_exception(error))
        self.fail(f"in process {process.name} at {self.now:.6f} s: {message}{details}", error)

    def _explain(self, error: BaseException) -> None:
        """Add the command that repeats the run to the error."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        run = f"PLAIT_SEED={os.environ['PLAIT_SEED']} " if "PLAIT_SEED" in os.environ else ""
        again = f"Simulation(seed={self.seed})" + (f", as in: {run}pytest '{test}'" if test else "")
        note = f"simulated from seed {self.seed}; run it again with {again}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
            error.add_note("\n".join(["the last events:", *self.trace.lines()[-60:]]))

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything. Raises failures that only show now, such as a failed task that was never awaited."""
        if self._closed:
            return
        self._closed = True
        logging.getLogger("plait").removeHandler(self._logs)
        for loop in self._loops:
            for task in loop._tasks:
                if task.done() and not task.cancelled() and task._log_traceback:
                    if not loop.dead:
                        loop.call_exception_handler(
                            {"message": f"{task.get_name()} failed", "exception": task.exception()}
                        )
                    task.exception()
        for loop in self._loops:
            loop._die()
        for loop in self._loops:
            loop._bury()
        self._heap.clear()
        if self._defects:
            self._explain(self._defects[0])
            raise self._defects[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._explain(error)
        self._defects.clear()
        try:
            self.close()
        except SimulationFailed as late:
            error.add_note(f"and at the end: {late}")


class _Logs(logging.Handler):
    """Plait's log: a warning is an event of the trace, an error fails the simulation."""

    def __init__(self, simulation: Simulation, allowed: tuple[str, ...]) -> None:
        super().__init__(logging.WARNING)
        self._simulation = simulation
        self._allowed = allowed

    def emit(self, record: logging.LogRecord) -> None:
        loop = events._get_running_loop()
        if not isinstance(loop, SimLoop) or loop.simulation is not self._simulation or loop.dead:
            return
        text = record.getMessage()
        self._simulation.log(loop.process.name, f"logs {record.levelname.lower()}: {text}")
        if record.levelno >= logging.ERROR and not any(fnmatchcase(text, pattern) for pattern in self._allowed):
            cause = record.exc_info[1] if record.exc_info else None
            if cause is None or not loop.process.expects(cause):
                details = "" if cause is None else "\n" + "".join(traceback.format_exception(cause))
                where = f"process {loop.process.name} at {self._simulation.now:.6f} s"
                self._simulation.fail(f"{where} logged: {text}{details}", cause)


def _close_generator(generator: Any) -> None:
    loop = events._get_running_loop()
    if isinstance(loop, SimLoop) and not loop.dead:
        loop.create_task(generator.aclose())
