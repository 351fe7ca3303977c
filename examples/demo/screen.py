"""The output of the demo: progress bars on a terminal, a line per second elsewhere, and a line per event."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from plait.cli.output import console

LINE_SECONDS = 1.0


class Screen:
    """Shows events, and named counts with their totals."""

    def __init__(self) -> None:
        self._console = console()
        self._begun = time.monotonic()
        self._next_line = self._begun + LINE_SECONDS
        self._counts: dict[str, tuple[int, int]] = {}
        #: The counts of the last line.
        self._told: dict[str, tuple[int, int]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console, refresh_per_second=8)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def event(self, text: str) -> None:
        """Print an event."""
        stamp = f"{time.monotonic() - self._begun:5.1f} s  "
        self._console.print(Text(stamp + text), soft_wrap=True)

    def count(self, name: str, done: int, total: int) -> None:
        """Set a count and its total."""
        self._counts[name] = (done, total)
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=total)
            self._bars.update(self._tasks[name], completed=done)
        elif time.monotonic() >= self._next_line:
            self.line()

    def line(self) -> None:
        """Print the counts that have changed since the last line, if there are no bars."""
        new = {name: count for name, count in self._counts.items() if self._told.get(name) != count}
        if self._bars is None and new:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._told |= new
            self.event(", ".join(f"{name} {done:,} of {total:,}" for name, (done, total) in new.items()))

    def table(self, table: Table) -> None:
        self._console.print(table)
