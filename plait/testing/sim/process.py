"""``Process``: a simulated process on a machine of its own, which can be killed, paused and started again.

Its clock and its disk outlive it, as a machine's do; everything in memory does not.
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

#: What a process does, from its start on.
Main = Callable[["Process"], Coroutine[Any, Any, Any]]

#: How long work in threads takes to begin, and its result to come back.
THREAD_SECONDS = (0.00002, 0.0005)


class SimBackground:
    """A thread of a simulated process, with a loop of its own; satisfies ``lease_renewer.Background``."""

    def __init__(self, process: Process) -> None:
        process.threads += 1
        self._loop = process.loop(f"thread-{process.threads}")
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)

    def stop(self) -> None:
        """Its work is cancelled, and it ends with that."""
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
        #: What it and its machine leave to chance.
        self.random = random.Random(self._seed)
        self.main = main
        self.clock = SimClock(simulation, booted=self.random.uniform(1_000.0, 100_000.0), drift=drift)
        self._disk: SimulatedDisk | None = None
        #: Between these, work for threads takes until it begins, and once more until it is told.
        self.thread_seconds = THREAD_SECONDS
        self.paused = False
        #: Its machine has power; without, it does not even refuse connections.
        self.powered = True
        #: How often it was started.
        self.lives = 0
        #: Threads with loops of their own so far.
        self.threads = 0
        #: Functions for threads may block: each runs in a real thread, which costs more.
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
        """The machine's disk as it is now; another object after every kill."""
        if self._disk is None:
            self._disk = SimulatedDisk(seed=self.random.getrandbits(32))
        elif self._disk.crashed:
            # Not before it is asked for: a kill in the middle of a write still leaves a part of that.
            self._disk = self._disk.copy() if self.powered else self._disk.after_crash(self.random)
        return self._disk

    @disk.setter
    def disk(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def start(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
        """Run the coroutine, or what the process is for; the first of a life begins it. Its error is the process's."""
        task = self.spawn(coroutine)
        task.add_done_callback(self._ended)
        return task

    def spawn(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
        """Like ``start``, for a caller who asks the task what became of it."""
        if not self.alive:
            self.lives += 1
            if self._disk is not None:
                # Looked at before the power is back.
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
        """Such errors do not fail the simulation when nobody handles them."""
        self._expected += kinds

    def expects(self, error: BaseException) -> bool:
        """Whether that is one of them."""
        return isinstance(error, self._expected)

    def loop(self, name: str = "main") -> SimLoop:
        """One of its loops, made when it is asked for first; each stands for a thread."""
        if name not in self.loops:
            seed = f"{self._seed} {self.lives} {name}"
            # What it has not got (signals, pipes, subprocesses) raises NotImplementedError.
            self.loops[name] = SimLoop(self.simulation, self, name, seed)  # type: ignore[abstract]
            self.simulation._made(self.loops[name])
        return self.loops[name]

    def connect(self, *args: Any, **kwargs: Any) -> plait.Client:
        """``plait.connect`` on this machine's clocks; its thread that renews leases is a loop of this process."""
        return self._at_home(plait.connect(*args, **kwargs))

    def app(self, *args: Any, **kwargs: Any) -> plait.App:
        """``plait.App`` on this machine's clocks; run it with ``start(app.run())``."""
        app = plait.App(*args, **kwargs)

        @app.on_startup
        def move_in() -> None:
            self._at_home(app.client)

        return app

    def _at_home(self, client: plait.Client) -> plait.Client:
        client._go_by(self.clock)
        client._background = lambda: SimBackground(self)
        return client

    def block(self, seconds: float) -> None:
        """Called by a function in a thread: it is busy for so much virtual time. Needs ``blocking_threads``."""
        thread = self._thread
        if thread is None:
            raise RuntimeError(f"no thread of {self.name} runs; set blocking_threads and call it in an executor")
        thread.block(seconds)

    # --- what can happen to it ------------------------------------------------------------------

    def kill(self, *, power_loss: bool = False) -> None:
        """End it between two turns or in the middle of one. No clean-up runs.

        Its disk keeps what was written. A ``power_loss`` takes the machine along: what was not synced is lost in part,
        and peers hear nothing until it is started again.
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
        """Kill it when its disk has done so many operations more; a write is cut anywhere then."""
        disk = self.disk
        last = disk.operations + operations

        def watch(operation: str, path: str, size: int) -> None:
            if disk.operations > last and not disk.crashed:
                self.kill()
                raise SimulatedCrash(byte=self.random.randint(0, size) if operation == "write" else 0)

        disk.on_operation = watch

    def restart(self) -> None:
        """Kill it, if it lives, and start it again at once."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop it as SIGSTOP does: time and the network go on without it."""
        if self.alive and not self.paused:
            self._log("is paused")
            self.paused = True

    def resume(self) -> None:
        """Let it go on; it finds everything that came meanwhile."""
        if self.paused:
            self._log("goes on")
            self.paused = False
            for loop in self.loops.values():
                loop._due = None
                loop._wake()

    def jump(self, seconds: float) -> None:
        """Its wall clock is set forward or back."""
        self._log(f"has its clock set by {seconds:+.3f} s")
        self.clock.jump(seconds)

    def _log(self, text: str) -> None:
        self.simulation.log(self.name, text)
