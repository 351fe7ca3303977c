"""``Timeline`` has the virtual time of a simulation, the scheduled events, the trace, and the failures that end a run.

Every random choice follows from the seed, for example which of two events at the same time comes first.
"""

from __future__ import annotations

import heapq
import os
import random
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

#: A run that takes longer than this, in virtual time, fails because it is stuck.
RUN_SECONDS = 3600.0
#: A run with more steps fails too.
STEPS_MAX = 5_000_000
#: The number of events that are kept as text, to be printed after a failure.
TRACE_SIZE = 400


class SimulationFailed(AssertionError):
    """A simulated process failed, or a wait took too long."""


class Trace:
    """The digest of all events, and the text of the last ones.

    Two runs with equal digests had the same events and sent the same bytes.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, str, str]] = deque(maxlen=TRACE_SIZE)
        self._digest = 0
        self.count = 0

    @property
    def digest(self) -> str:
        """The digest of every event so far."""
        return f"{self.count}-{self._digest:08x}"

    def add(self, time: float, process: str, text: str) -> None:
        self._events.append((time, process, text))
        self.mix(f"{time!r} {process} {text}".encode())

    def mix(self, data: bytes) -> None:
        """Add bytes to the digest only."""
        self._digest = crc32(data, self._digest)
        self.count += 1

    def lines(self) -> list[str]:
        """The last events, oldest first."""
        return [f"{time:12.6f}  {process:<12} {text}" for time, process, text in self._events]


class _Event(Protocol):
    def _fire(self, due: float) -> None: ...


class Later:
    """A scheduled call that belongs to no process."""

    __slots__ = ("_arguments", "_callback", "cancelled")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._callback = callback
        self._arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def _fire(self, due: float) -> None:
        if not self.cancelled:
            if events._get_running_loop() is not None:
                events._set_running_loop(None)
            self._callback(*self._arguments)


class Timeline:
    """Runs events in the order of their virtual time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        #: Virtual seconds since the beginning.
        self.now = 0.0
        self.random = random.Random(f"{seed} simulation")
        self.trace = Trace()
        self._heap: list[tuple[float, float, int, _Event]] = []
        self._number = 0
        self._steps = 0
        self._defects: list[BaseException] = []

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> Later:
        """Call ``callback`` after ``seconds`` of virtual time, outside of any process, as faults and the network do."""
        later = Later(callback, arguments)
        self._push(self.now + seconds, later)
        return later

    def _push(self, due: float, event: _Event) -> None:
        self._number += 1
        heapq.heappush(self._heap, (due, self.random.random(), self._number, event))

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        self._step_until(lambda: False, end)
        self.now = end

    def run_until(
        self, condition: Callable[[], object], *, seconds: float = RUN_SECONDS, waiting_for: str = "the condition"
    ) -> None:
        """Run until the condition holds; it is checked after every step. Raises after ``seconds`` of virtual time."""
        if not self._step_until(condition, self.now + seconds):
            left = "no event is left" if not self._heap else f"{seconds:g} s have passed"
            raise SimulationFailed(f"{waiting_for} is not done and {left}")

    def _step_until(self, condition: Callable[[], object], end: float) -> bool:
        heap = self._heap
        hooks = sys.get_asyncgen_hooks()
        outer = events._get_running_loop()
        events._set_running_loop(None)
        # The loop that runs when an asynchronous generator is garbage-collected closes the generator.
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

    def log(self, process: str, text: str) -> None:
        self.trace.add(self.now, process, text)

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        """Fail the run at the end of this step."""
        failure = SimulationFailed(message)
        failure.__cause__ = cause
        self._defects.append(failure)

    def _explain(self, error: BaseException) -> None:
        """Add the command that repeats the run to the error."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        run = f"PLAIT_SEED={os.environ['PLAIT_SEED']} " if "PLAIT_SEED" in os.environ else ""
        again = f"Simulation(seed={self.seed})" + (f", as in: {run}pytest '{test}'" if test else "")
        note = f"simulated from seed {self.seed}; run it again with {again}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
            error.add_note("\n".join(["the last events:", *self.trace.lines()[-60:]]))


def _close_generator(generator: Any) -> None:
    loop = events._get_running_loop()
    if loop is not None and not loop.is_closed():
        loop.create_task(generator.aclose())
