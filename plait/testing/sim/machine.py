"""``Machine``: the part of a simulated process that survives a kill: the disk, the clocks and a random source."""

from __future__ import annotations

import random
import traceback
from typing import Any

from plait.testing.sim.sim_clock import SimClock
from plait.testing.sim.threads import SimThread
from plait.testing.sim.timeline import Timeline
from plait.testing.simulated_disk import SimulatedDisk

#: Range of the delay before work in a thread begins, and before its result arrives.
THREAD_SECONDS = (0.00002, 0.0005)


class Machine:
    """Has the name of its process."""

    def __init__(self, timeline: Timeline, name: str, drift: float) -> None:
        self.timeline = timeline
        self.name = name
        self.label = name.encode()
        #: Source of every random choice of the machine and its process.
        self.random = random.Random(f"{timeline.seed} {name}")
        self.clock = SimClock(timeline, booted=self.random.uniform(1_000.0, 100_000.0), drift=drift)
        self._disk: SimulatedDisk | None = None
        #: Range of the delay before work in a thread begins, and before its result arrives.
        self.thread_seconds = THREAD_SECONDS
        #: Functions in executors may block: each runs in a real thread, which is slower.
        self.blocking_threads = False
        #: The thread that ran last.
        self.thread: SimThread | None = None
        self.paused = False
        #: Without power it does not even refuse connections.
        self.powered = True
        self._expected: tuple[type[BaseException], ...] = ()

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

    def block(self, seconds: float) -> None:
        """Called in a thread: block it for this much virtual time. Needs ``blocking_threads``."""
        if self.thread is None:
            raise RuntimeError(f"no thread of {self.name} runs; set blocking_threads and call it in an executor")
        self.thread.block(seconds)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self.log(f"has its clock set by {seconds:+.3f} s")
        self.clock.jump(seconds)

    def kill(self, *, power_loss: bool = False) -> None:
        """End the process; ``power_loss``: and lose some unsynced writes."""
        self.paused = False
        self.powered = not power_loss
        if self._disk is not None:
            self._disk.crashed = True

    def expect(self, *kinds: type[BaseException]) -> None:
        """Do not fail the simulation for unhandled errors of these types."""
        self._expected += kinds

    def failed(self, text: str, error: BaseException | None, message: str = "") -> None:
        """Fail the simulation, unless the error is expected. ``message`` is logged if it is."""
        if error is not None and isinstance(error, self._expected):
            if message:
                self.log(message)
            return
        details = "" if error is None else "\n" + "".join(traceback.format_exception(error))
        self.timeline.fail(f"{text}{details}", error)

    def log(self, text: str) -> None:
        """Add an event to the trace."""
        self.timeline.log(self.name, text)

    def unhandled(self, context: dict[str, Any]) -> None:
        """Fail the simulation for what a loop could not handle."""
        error, message = context.get("exception"), context.get("message", "unhandled")
        where = f"in process {self.name} at {self.timeline.now:.6f} s"
        self.failed(f"{where}: {message}", error, f"{message}: {error!r} (expected)")
