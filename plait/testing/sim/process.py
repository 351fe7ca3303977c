"""``Process``: a simulated process on its own machine. It can be killed, paused and started again.

The clock and the disk belong to the machine and survive a kill; memory does not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import plait
from plait.testing.sim.sim_clock import SimClock
from plait.testing.sim.sim_loop import SimLoop
from plait.testing.sim.threads import SimThread
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk

if TYPE_CHECKING:
    from plait.testing.sim.simulation import Simulation

#: The coroutine function that each start of a process runs.
Main = Callable[["Process"], Coroutine[Any, Any, Any]]

#: Range of the delay before work in a thread begins, and before its result arrives.
THREAD_SECONDS = (0.00002, 0.0005)


class SimBackground:
    """A thread of a simulated process, with its own loop; satisfies ``lease_renewer.Background``."""

    def __init__(self, process: Process) -> None:
        process.threads += 1
        self._loop = process.loop(f"thread-{process.threads}")
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)

    def stop(self) -> None:
        """Cancel its work; the loop stops when that has ended."""
        if self._task is not None and not self._task.done():
            self._task.add_done_callback(lambda _: self._loop.stop())
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            self._loop.stop()


class Process:
    """Made by ``Simulation.process``."""

    def __init__(self, simulation: Simulation, name: str, main: Main | None, drift: float) -> None:
        self.simulation = simulation
        self.name = name
        self.label = name.encode()
        self._seed = f"{simulation.seed} {name}"
        #: Source of every random choice of the process and its machine.
        self.random = random.Random(self._seed)
        self.main = main
        self.clock = SimClock(simulation, booted=self.random.uniform(1_000.0, 100_000.0), drift=drift)
        self._disk: SimulatedDisk | None = None
        #: Range of the delay before work in a thread begins, and before its result arrives.
        self.thread_seconds = THREAD_SECONDS
        self.paused = False
        #: Its machine has power; without power it does not even refuse connections.
        self.powered = True
        #: How often it was started.
        self.lives = 0
        #: How many threads with their own loops were started.
        self.threads = 0
        #: Functions in executors may block: each runs in a real thread, which is slower.
        self.blocking_threads = False
        self._thread: SimThread | None = None
        self.loops: dict[str, SimLoop] = {}
        self._expected: tuple[type[BaseException], ...] = ()

    def __repr__(self) -> str:
        state = "dead" if not self.alive else "paused" if self.paused else "alive"
        return f"<process {self.name}, {state}, life {self.lives}>"

    @property
    def alive(self) -> bool:
        """It was started and not killed since."""
        return bool(self.loops)

    @property
    def disk(self) -> SimulatedDisk:
        """The machine's disk; a new object after every kill."""
        if self._disk is None:
            self._disk = SimulatedDisk(seed=self.random.getrandbits(32))
        elif self._disk.crashed:
            # Copied on demand: a kill during a write first stores a part of the write.
            self._disk = self._disk.copy() if self.powered else self._disk.after_crash(self.random)
        return self._disk

    @disk.setter
    def disk(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def start(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
        """Start the process if it is down, and run the coroutine (default: ``main``); an error fails the simulation."""
        task = self.spawn(coroutine)
        task.add_done_callback(self._ended)
        return task

    def spawn(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
        """Like ``start``, for a caller that awaits the task and handles its error."""
        if not self.alive:
            self.lives += 1
            if self._disk is not None:
                # ``disk`` depends on ``powered``.
                self._disk = self.disk
            self.powered = True
            self._log("starts")
        if coroutine is None:
            if self.main is None:
                raise ValueError(f"process {self.name} has nothing to run; give start() a coroutine")
            coroutine = self.main(self)
        return self.loop().create_task(coroutine)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.loop().call_exception_handler({"message": "it ended with an error", "exception": error, "task": task})

    def expect(self, *kinds: type[BaseException]) -> None:
        """Do not fail the simulation for unhandled errors of these types."""
        self._expected += kinds

    def expects(self, error: BaseException) -> bool:
        """Whether an unhandled error is expected."""
        return isinstance(error, self._expected)

    def loop(self, name: str = "main") -> SimLoop:
        """The loop of that name, made at its first use; each loop represents a thread."""
        if name not in self.loops:
            seed = f"{self._seed} {self.lives} {name}"
            # Signals, pipes and subprocesses raise NotImplementedError.
            self.loops[name] = SimLoop(self.simulation, self, name, seed)  # type: ignore[abstract]
            self.simulation._made(self.loops[name])
        return self.loops[name]

    def connect(self, *args: Any, **kwargs: Any) -> plait.Client:
        """``plait.connect`` on this machine's clocks; the lease renewer runs on a loop of this process."""
        return self._adopt(plait.connect(*args, **kwargs))

    def app(self, *args: Any, **kwargs: Any) -> plait.App:
        """``plait.App`` on this machine's clocks; run it with ``start(app.run())``."""
        app = plait.App(*args, **kwargs)

        @app.on_startup
        def adopt_client() -> None:
            self._adopt(app.client)

        return app

    def _adopt(self, client: plait.Client) -> plait.Client:
        client._use_clock(self.clock)
        client._background = lambda: SimBackground(self)
        return client

    def block(self, seconds: float) -> None:
        """Called in a thread: block it for this much virtual time. Needs ``blocking_threads``."""
        thread = self._thread
        if thread is None:
            raise RuntimeError(f"no thread of {self.name} runs; set blocking_threads and call it in an executor")
        thread.block(seconds)

    # --- faults ---------------------------------------------------------------------------------

    def kill(self, *, power_loss: bool = False) -> None:
        """Kill the process, between two turns or during one. No clean-up runs.

        The disk keeps every write. With ``power_loss`` the machine stops too: some unsynced writes are lost, and peers
        receive nothing until the next start.
        """
        if not self.alive:
            return
        self._log("loses power" if power_loss else "is killed")
        loops, self.loops = list(self.loops.values()), {}
        self.paused = False
        self.powered = not power_loss
        for loop in loops:
            loop._die()
        self.simulation.network._died(self, silent=power_loss)
        if self._disk is not None:
            self._disk.crashed = True

    def crash_at(self, operations: int) -> None:
        """Kill the process after this many more disk operations; a write is torn at any byte."""
        disk = self.disk
        last = disk.operations + operations

        def watch(operation: str, path: str, size: int) -> None:
            if disk.operations > last and not disk.crashed:
                self.kill()
                raise SimulatedCrash(byte=self.random.randint(0, size) if operation == "write" else 0)

        disk.on_operation = watch

    def restart(self) -> None:
        """Kill the process, if it is alive, and start it again at once."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop it as SIGSTOP does: time passes, and the network still delivers."""
        if self.alive and not self.paused:
            self._log("is paused")
            self.paused = True

    def resume(self) -> None:
        """Resume a paused process; it finds everything that arrived during the pause."""
        if self.paused:
            self._log("resumes")
            self.paused = False
            for loop in self.loops.values():
                loop._due = None
                loop._wake()

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._log(f"has its clock set by {seconds:+.3f} s")
        self.clock.jump(seconds)

    def _log(self, text: str) -> None:
        self.simulation.log(self.name, text)
