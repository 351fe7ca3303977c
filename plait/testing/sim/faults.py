"""``Faults`` makes scripts of random faults for a simulation, from a seed.

A script is made before the run. It is plain data, so a test can print it, reduce it to the faults that matter, and play
it. Every fault ends before its script ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from plait.testing.sim.process import Process
from plait.testing.sim.simulation import Simulation

FaultKind = Literal["kill", "power_loss", "crash_at", "pause", "cut", "cut_one_way", "jump"]


class Fault(NamedTuple):
    """One fault."""

    kind: FaultKind
    #: Virtual seconds after the beginning of the script.
    at: float
    #: How long it lasts: until a killed process starts again, a paused process resumes, or a cut ends.
    seconds: float
    process: str
    #: The process at the other end of a cut.
    other: str = ""
    #: For "jump", the seconds by which the clock jumps; for "crash_at", the number of disk operations before the crash.
    amount: float = 0.0

    @property
    def end(self) -> float:
        """When the fault ends, in virtual seconds after the beginning of the script."""
        return self.at + self.seconds

    def __str__(self) -> str:
        rest = f" from {self.other}" if self.other else ""
        rest += f" by {self.amount:g}" if self.amount else ""
        return f"{self.at:.3f} s: {self.kind} {self.process}{rest} for {self.seconds:.3f} s"


class Faults:
    """Makes random scripts.

    - ``processes``: the processes that faults can hit.
    - ``pairs``: the pairs of processes that can be cut off from each other.
    - ``disks``: the processes that can crash during a disk operation.
    - ``weights``: how often each kind of fault is chosen, relative to the others. A missing kind is never chosen.
    - ``long_seconds``: the longest duration of a fault; most faults are much shorter. It should exceed every time-out
      that matters, such as a lease.
    """

    def __init__(
        self,
        rng: random.Random,
        processes: Sequence[str],
        pairs: Sequence[tuple[str, str]] = (),
        *,
        disks: Sequence[str] = (),
        weights: dict[FaultKind, float] | None = None,
        every_seconds: float = 2.0,
        long_seconds: float = 12.0,
        jump_seconds: float = 3600.0,
    ) -> None:
        self._random = rng
        self._processes = processes
        self._pairs = pairs
        self._disks = disks
        chosen = weights or {"kill": 3, "crash_at": 1, "pause": 2, "cut": 2, "cut_one_way": 1, "jump": 1}
        possible = {"cut": bool(pairs), "cut_one_way": bool(pairs), "crash_at": bool(disks)}
        self._weights = {kind: weight for kind, weight in chosen.items() if possible.get(kind, True)}
        self._every_seconds = every_seconds
        self._long_seconds = long_seconds
        self._jump_seconds = jump_seconds

    def script(self, seconds: float) -> list[Fault]:
        """Random faults in order of time, which all end within ``seconds``."""
        draw = self._random
        kinds, weights = list(self._weights), list(self._weights.values())
        found: list[Fault] = []
        at = draw.expovariate(1.0 / self._every_seconds)
        while at < seconds:
            kind = draw.choices(kinds, weights)[0]
            found.append(self._fault(kind, at, seconds - at))
            at += draw.expovariate(1.0 / self._every_seconds)
        return found

    def _fault(self, kind: FaultKind, at: float, left: float) -> Fault:
        draw = self._random
        # Most faults are short. One in four may last long enough for a time-out.
        longest = self._long_seconds if draw.random() < 0.25 else self._long_seconds / 10
        lasts = min(draw.uniform(0.0, longest), left)
        if kind in ("cut", "cut_one_way"):
            one, other = draw.choice(self._pairs)
            if draw.random() < 0.5:
                one, other = other, one
            return Fault(kind, at, lasts, one, other)
        process = draw.choice(self._disks if kind == "crash_at" else self._processes)
        if kind == "jump":
            return Fault(kind, at, 0.0, process, amount=draw.uniform(-self._jump_seconds, self._jump_seconds))
        if kind == "crash_at":
            return Fault(kind, at, lasts, process, amount=draw.randrange(20))
        return Fault(kind, at, lasts, process)


def play(
    simulation: Simulation, script: Iterable[Fault], on_fault: Callable[[Fault], object] = lambda _: None
) -> float:
    """Schedule the faults, and return the virtual time when the last one ends. Each fault calls ``on_fault`` first."""
    end = simulation.now
    for fault in script:
        simulation.call_later(fault.at, _begin, simulation, fault, on_fault)
        end = max(end, simulation.now + fault.end)
    return end


def _begin(simulation: Simulation, fault: Fault, on_fault: Callable[[Fault], object]) -> None:
    process = simulation.processes[fault.process]
    on_fault(fault)
    match fault.kind:
        case "kill" | "power_loss":
            process.kill(power_loss=fault.kind == "power_loss")
            simulation.call_later(fault.seconds, _start, process)
        case "crash_at":
            if process.alive:
                process.crash_at(int(fault.amount))
            # End the fault even if the disk did fewer operations and the process did not crash.
            simulation.call_later(fault.seconds, _end_crash, process)
        case "pause":
            process.pause()
            simulation.call_later(fault.seconds, process.resume)
        case "jump":
            process.jump(fault.amount)
        case "cut" | "cut_one_way":
            other = simulation.processes[fault.other]
            simulation.network.cut(process, other, both=fault.kind == "cut")
            simulation.call_later(fault.seconds, simulation.network.mend, process, other)


def _start(process: Process) -> None:
    if not process.alive:
        process.start()


def _end_crash(process: Process) -> None:
    process.disk.on_operation = None
    _start(process)
