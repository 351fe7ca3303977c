"""A measured figure beside the bar it has to meet."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Result:
    """One row of the table: ``figure`` against ``bar``; ``at_most`` says which side is good."""

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


def median_ratio(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> tuple[float, list[float], list[float]]:
    """(median of ours/theirs, our figures, their figures) over interleaved pairs."""
    mine: list[float] = []
    other: list[float] = []
    for number in range(pairs):
        # Whoever goes second may find a warmer machine: take turns.
        if number % 2:
            other.append(theirs())
            mine.append(ours())
        else:
            mine.append(ours())
            other.append(theirs())
    return statistics.median(a / b for a, b in zip(mine, other, strict=True)), mine, other
