"""``Process`` is a simulated process on its own machine. A test can kill, pause and restart it.

The clock and the disk belong to the machine and survive a kill. The memory of the process does not survive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import plait
from plait.testing.sim.machine import Machine
from plait.testing.sim.network import Network
from plait.testing.sim.sim_loop import SimLoop
from plait.testing.sim.timeline import Timeline
from plait.testing.simulated_disk import SimulatedCrash

#: The coroutine function that each start of a process runs.
Main = Callable[["Process"], Coroutine[Any, Any, Any]]


class SimBackground:
    """A thread of a simulated process, with its own loop; satisfies ``lease_renewer.Background``."""

    def __init__(self, process: Process) -> None:
        process.threads += 1
        self._loop = process.loop(f"thread-{process.threads}")
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)

    def stop(self) -> None:
        """Cancel the work. The loop stops when the work has ended."""
        if self._task is not None and not self._task.done():
            self._task.add_done_callback(lambda _: self._loop.stop())
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            self._loop.stop()


class Process(Machine):
    """A process of a simulation, made by ``Simulation.process``."""

    def __init__(self, timeline: Timeline, network: Network, name: str, main: Main | None, drift: float) -> None:
        super().__init__(timeline, name, drift)
        self._network = network
        self.main = main
        #: The number of times the process was started. A *run* is the time from a start to the next kill.
        self.lives = 0
        #: The number of threads with their own loops that were started.
        self.threads = 0
        #: The loops of the present run by name, and the loops of all runs.
        self.loops: dict[str, SimLoop] = {}
        self.all_loops: list[SimLoop] = []

    def __repr__(self) -> str:
        state = "dead" if not self.alive else "paused" if self.paused else "alive"
        return f"<process {self.name}, {state}, life {self.lives}>"

    @property
    def alive(self) -> bool:
        """True if the process was started and has not been killed since."""
        return bool(self.loops)

    def start(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
        """Start the process if it is down, and run the coroutine (default: ``main``). An error fails the simulation."""
        task = self.spawn(coroutine)
        task.add_done_callback(self._ended)
        return task

    def spawn(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
        """Like ``start``, for a caller that awaits the task and handles its error."""
        if not self.alive:
            self.lives += 1
            if self._disk is not None:
                # Read ``self.disk`` before ``powered`` is set: after a kill the property makes the disk that the crash
                # left, and what survives depends on ``powered``.
                self._disk = self.disk
            self.powered = True
            self.log("starts")
        if coroutine is None:
            if self.main is None:
                raise ValueError(f"process {self.name} has nothing to run; give start() a coroutine")
            coroutine = self.main(self)
        return self.loop().create_task(coroutine)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.loop().call_exception_handler(
                {"message": f"a task of process {self.name} ended with an error", "exception": error, "task": task}
            )

    def loop(self, name: str = "main") -> SimLoop:
        """The loop with the given name, made at its first use. Each loop represents a thread."""
        if name not in self.loops:
            seed = f"{self.timeline.seed} {self.name} {self.lives} {name}"
            # It leaves out the methods for signals, pipes and subprocesses: asyncio's base class refuses their calls.
            self.loops[name] = SimLoop(self, self._network, seed)  # type: ignore[abstract]
            self.all_loops.append(self.loops[name])
        return self.loops[name]

    def connect(self, *args: Any, **kwargs: Any) -> plait.Client:
        """``plait.connect`` with this machine's clocks. The client's lease renewer runs on a loop of this process."""
        return self._adopt(plait.connect(*args, **kwargs))

    def app(self, *args: Any, **kwargs: Any) -> plait.App:
        """``plait.App`` with this machine's clocks. Run it with ``start(app.run())``."""
        app = plait.App(*args, **kwargs)

        @app.on_startup
        def adopt_client() -> None:
            self._adopt(app.client)

        return app

    def _adopt(self, client: plait.Client) -> plait.Client:
        client._use_clock(self.clock)
        client._consumers.background = lambda: SimBackground(self)
        return client

    # --- faults ---------------------------------------------------------------------------------

    def kill(self, *, power_loss: bool = False) -> None:
        """Kill the process, between two turns or during one. No clean-up runs.

        The disk keeps every write. With ``power_loss`` the machine stops too: some unsynced writes are lost, and the
        peers of its connections are not notified.
        """
        if not self.alive:
            return
        self.log("loses power" if power_loss else "is killed")
        loops, self.loops = list(self.loops.values()), {}
        super().kill(power_loss=power_loss)
        for loop in loops:
            loop._die()
        self._network._died(self, silent=power_loss)

    def crash_at(self, operations: int) -> None:
        """Let this many more disk operations succeed and kill the process at the next one. If that is a write, a random
        number of its bytes is stored first."""
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
        """Stop the process as SIGSTOP does. Time passes, and its machine still receives bytes from the network."""
        if self.alive and not self.paused:
            self.log("is paused")
            self.paused = True

    def resume(self) -> None:
        """Resume a paused process. It then reads everything that arrived during the pause."""
        if self.paused:
            self.log("resumes")
            self.paused = False
            for loop in self.loops.values():
                loop._due = None
                loop._wake()
