"""The progress of long work, on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from plait.cli.output import console, format_size

#: Work shorter than this shows nothing.
PATIENCE_SECONDS = 1.0
#: The interval between lines where standard error is not a terminal.
LINE_SECONDS = 5.0
#: ``update`` reads the clock once in this many calls, to stay cheap.
_CALLS_PER_LOOK = 16


class _DoneColumn(ProgressColumn):
    """The amount done, in the task's unit."""

    def render(self, task: Task) -> Text:
        return Text(_amount(int(task.completed), task.fields["unit"]))


class ProgressSteps:
    """The progress of a sequence of steps. ``update`` is cheap enough for inner loops."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._unit = "messages"
        self._total: int | None = None
        self._begun = time.monotonic()
        self._look = 0
        self._next_line = self._begun + LINE_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def step(self, name: str, total: int | None = None, unit: str = "messages") -> None:
        """Begin a step. Without a ``total`` only the amount done is shown."""
        self._name, self._total, self._unit = name, total, unit
        self._task = None
        self._look = 0

    def total(self, total: int) -> None:
        if total != self._total:
            self._total = total
            if self._bars is not None and self._task is not None:
                self._bars.update(self._task, total=total)

    def update(self, done: int) -> None:
        self._look -= 1
        if self._look > 0:
            return
        self._look = _CALLS_PER_LOOK
        now = time.monotonic()
        if self._console.is_terminal:
            if now - self._begun >= PATIENCE_SECONDS:
                self._draw(done)
        elif now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            share = f" ({done / self._total:.0%})" if self._total else ""
            self._console.print(f"{self._name}: {_amount(done, self._unit)}{share}", soft_wrap=True)

    def _draw(self, done: int) -> None:
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), _DoneColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        if self._task is None:
            self._task = self._bars.add_task(self._name, total=self._total, unit=self._unit)
        self._bars.update(self._task, completed=done)


def _amount(done: int, unit: str) -> str:
    return format_size(done) if unit == "bytes" else f"{done:,} {unit}"
