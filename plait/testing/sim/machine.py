"""``Machine`` is the part of a simulated process that survives a kill: its disk, its clocks and its random source.

``SimThread`` runs a function of the process that may block for virtual time, as a ``def`` handler does.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from typing import Any

from plait.testing.sim.timeline import Timeline
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk

#: Range of the delay before work in a thread begins, and before its result arrives.
THREAD_SECONDS = (0.00002, 0.0005)


#: Wall time at the beginning of every simulation, in microseconds since the Unix epoch.
WALL_START = 1_700_000_000_000_000


class SimClock:
    """The clocks of one machine, made from virtual time; satisfies ``plait.clock.Clock``.

    Each machine's ``monotonic`` has its own start and runs a little fast or slow. So code that compares the clocks of
    two machines fails, as it would in reality. ``now`` is wall time, which ``jump`` changes.
    """

    def __init__(self, time: Timeline, *, booted: float = 1000.0, drift: float = 0.0) -> None:
        self._time = time
        self._booted = booted
        self._rate = 1.0 + drift
        self._jumped = 0

    def now(self) -> int:
        return WALL_START + self._jumped + int(self._time.now * self._rate * 1_000_000)

    def monotonic(self) -> float:
        return self._booted + self._time.now * self._rate

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator does; ``monotonic`` does not change."""
        self._jumped += round(seconds * 1_000_000)

    def virtual(self, monotonic: float) -> float:
        """The virtual time at which ``monotonic()`` has this value."""
        return (monotonic - self._booted) / self._rate


class SimThread:
    """Runs ``function``. The simulation calls ``resume``, and the function calls ``block``.

    The function has its own thread, but never runs in parallel with the simulation. While the function runs, the
    simulation waits, and while the simulation runs, the function waits. So a run with the same seed repeats exactly.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._thread = threading.Thread(target=self._run, name="plait-simulated", daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        #: The virtual seconds for which the function blocks; None: it has ended.
        self.blocked: float | None = 0.0

    def resume(self) -> None:
        """Run the function until it blocks or ends."""
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._back.acquire()

    def kill(self) -> None:
        """End the function where it blocks, because its process is dead."""
        if self.blocked is not None and self._thread.ident is not None:
            self._killed = True
            self.resume()
            self._thread.join()

    def block(self, seconds: float) -> None:
        """Block for ``seconds`` of virtual time. Only the function itself calls this, in its thread."""
        self.blocked = seconds
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise SimulatedCrash("the process of this thread was killed")

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - the loop gives it to the future
            self.error = error
        self.blocked = None
        self._back.release()


class Machine:
    """The machine of one process, with the name of the process."""

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
        #: True if functions in executors may call ``block``. Then each of them runs in a real thread, which is slower.
        self.blocking_threads = False
        #: The thread that ran last.
        self.thread: SimThread | None = None
        self.paused = False
        #: False after a power loss, until the next start. A machine without power does not even refuse connections.
        self.powered = True
        self._expected: tuple[type[BaseException], ...] = ()

    @property
    def disk(self) -> SimulatedDisk:
        """The machine's disk; a new object after every kill."""
        if self._disk is None:
            self._disk = SimulatedDisk(seed=self.random.getrandbits(32))
        elif self._disk.crashed:
            # Copy only now, and not in ``kill``, because a write that the kill interrupts first stores a part.
            self._disk = self._disk.copy() if self.powered else self._disk.after_crash(self.random)
        return self._disk

    @disk.setter
    def disk(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def block(self, seconds: float) -> None:
        """Block the calling thread for ``seconds`` of virtual time. Requires ``blocking_threads``."""
        if self.thread is None:
            raise RuntimeError(f"no thread of {self.name} runs; set blocking_threads and call it in an executor")
        self.thread.block(seconds)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self.log(f"has its clock set by {seconds:+.3f} s")
        self.clock.jump(seconds)

    def kill(self, *, power_loss: bool = False) -> None:
        """End the process. With ``power_loss``, some unsynced writes are lost."""
        self.paused = False
        self.powered = not power_loss
        if self._disk is not None:
            self._disk.crashed = True

    def expect(self, *kinds: type[BaseException]) -> None:
        """Do not fail the simulation for unhandled errors of these types."""
        self._expected += kinds

    def failed(self, text: str, error: BaseException | None, message: str = "") -> None:
        """Fail the simulation, unless the error is expected. If it is expected, only log ``message``."""
        if error is not None and isinstance(error, self._expected):
            if message:
                self.log(message)
            return
        details = "" if error is None else "\n" + "".join(traceback.format_exception(error))
        self.timeline.fail(f"{text}{details}", error)

    def log(self, text: str) -> None:
        self.timeline.log(self.name, text)

    def unhandled(self, context: dict[str, Any]) -> None:
        """Fail the simulation because of an error that a loop did not handle, unless it is expected."""
        error, message = context.get("exception"), context.get("message", "unhandled")
        where = f"in process {self.name} at {self.timeline.now:.6f} s"
        self.failed(f"{where}: {message}", error, f"{message}: {error!r} (expected)")
