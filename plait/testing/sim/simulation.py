"""``Simulation`` runs several processes with their network, disks and clocks, in one thread and on virtual time.

    with Simulation(seed=7) as sim:
        broker = sim.process("broker", serve)
        broker.start()
        sim.run(send_something(sim.process("producer")))
        broker.kill()

Every random choice follows from the seed: latencies, how reads are split, which of two ready loops runs first, and the
random numbers that Plait gets from ``plait.chance``. So a run with the same seed repeats exactly. A run fails if an
exception is not handled, if Plait logs an error, or if a wait takes too long. The failure names the command that
repeats the run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from asyncio import events
from collections.abc import Coroutine, Iterable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self, TypeVar

from plait.testing.sim.network import Network
from plait.testing.sim.process import Main, Process
from plait.testing.sim.sim_loop import SimLoop
from plait.testing.sim.timeline import RUN_SECONDS, SimulationFailed, Timeline

T = TypeVar("T")

#: The largest drift of a machine's clock.
DRIFT_MAX = 0.0002


class Simulation(Timeline):
    """Runs processes on virtual time. ``allow_logs`` are patterns of error messages that Plait may log."""

    def __init__(self, seed: int, *, allow_logs: Iterable[str] = ()) -> None:
        super().__init__(seed)
        self.network = Network(self, random.Random(f"{seed} network"))
        self.processes: dict[str, Process] = {}
        self._closed = False
        self._logs = _Logs(self, tuple(allow_logs))
        logging.getLogger("plait").addHandler(self._logs)

    def process(self, name: str, main: Main | None = None) -> Process:
        """The process with the given name, made at the first call. Each start of the process runs ``main``."""
        process = self.processes.get(name)
        if process is None:
            drift = self.random.uniform(-DRIFT_MAX, DRIFT_MAX)
            process = self.processes[name] = Process(self, self.network, name, main, drift)
        elif main is not None:
            process.main = main
        return process

    def heal(self) -> None:
        """End every fault: end all cuts and pauses, and start every process that has a main and is down."""
        self.network.heal()
        for process in self.processes.values():
            process.resume()
            if not process.alive and process.main is not None:
                process.start()

    def run(self, coroutine: Coroutine[Any, Any, T], *, seconds: float = RUN_SECONDS) -> T:
        """Run the coroutine in the process "test" until it is done. All other processes run meanwhile."""
        task = self.process("test").spawn(coroutine)
        self.run_until(task.done, seconds=seconds, waiting_for=getattr(coroutine, "__qualname__", "it"))
        result: T = task.result()
        return result

    async def sleep(self, seconds: float) -> None:
        """Wait for virtual time in a simulated process."""
        loop = events._get_running_loop()
        if not isinstance(loop, SimLoop) or loop.machine.timeline is not self:
            raise RuntimeError("only a process of the simulation can wait on its time")
        await asyncio.sleep(seconds)

    def close(self) -> None:
        """End all processes. Raises failures that are found only now, such as a failed task that was never awaited."""
        if self._closed:
            return
        self._closed = True
        logging.getLogger("plait").removeHandler(self._logs)
        loops = [loop for process in self.processes.values() for loop in process.all_loops]
        for loop in loops:
            for task in loop._tasks:
                if task.done() and not task.cancelled() and task._log_traceback:
                    if not loop.dead:
                        loop.call_exception_handler(
                            {"message": f"{task.get_name()} failed", "exception": task.exception()}
                        )
                    task.exception()
        for loop in loops:
            loop._die()
        for loop in loops:
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
    """Handles Plait's log records: adds a warning to the trace, and fails the simulation for an error."""

    def __init__(self, simulation: Simulation, allowed: tuple[str, ...]) -> None:
        super().__init__(logging.WARNING)
        self._simulation = simulation
        self._allowed = allowed

    def emit(self, record: logging.LogRecord) -> None:
        loop = events._get_running_loop()
        if not isinstance(loop, SimLoop) or loop.machine.timeline is not self._simulation or loop.dead:
            return
        text, machine = record.getMessage(), loop.machine
        machine.log(f"logs {record.levelname.lower()}: {text}")
        if record.levelno >= logging.ERROR and not any(fnmatchcase(text, pattern) for pattern in self._allowed):
            where = f"process {machine.name} at {self._simulation.now:.6f} s"
            machine.failed(f"{where} logged: {text}", record.exc_info[1] if record.exc_info else None)
