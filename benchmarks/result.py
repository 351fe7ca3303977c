"""A measured figure and the bar that it has to meet."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.suite import machine_facts


@dataclass(slots=True)
class Result:
    """One row of the table: ``figure`` against ``bar``, which is an upper bound if ``at_most``."""

    name: str
    figure: float
    bar: float
    unit: str = "×"
    at_most: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.figure <= self.bar if self.at_most else self.figure >= self.bar

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def write_json(path: Path, results: list[Result]) -> None:
    """Write the figures of one run, with the facts about the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine_facts(), "time": int(time.time()), "results": [r.as_json() for r in results]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def median_ratio(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> tuple[float, list[float], list[float]]:
    """(median of ours/theirs, our figures, their figures) over interleaved pairs."""
    mine: list[float] = []
    other: list[float] = []
    for number in range(pairs):
        # The second of a pair may find a warmer machine, so the order alternates.
        if number % 2:
            other.append(theirs())
            mine.append(ours())
        else:
            mine.append(ours())
            other.append(theirs())
    return statistics.median(a / b for a, b in zip(mine, other, strict=True)), mine, other
