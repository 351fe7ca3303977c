"""Progress on long work, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from plait.cli.output import console, words_of_size

#: Work shorter than this shows nothing.
PATIENCE_SECONDS = 1.0
#: Where there is no terminal, a line this often.
LINE_SECONDS = 5.0
#: A clock is looked at this often at most; the work itself matters more.
_CALLS_PER_LOOK = 16


class _DoneColumn(ProgressColumn):
    """How much, in the task's unit."""

    def render(self, task: Task) -> Text:
        return Text(_words(int(task.completed), task.fields["unit"]))


class ProgressSteps:
    """The progress of a few steps one after another; ``update`` is cheap enough for inner loops."""

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
        """A new step begins; without a ``total`` only what is done is shown."""
        self._name, self._total, self._unit = name, total, unit
        self._task = None
        self._look = 0

    def total(self, total: int) -> None:
        """It is known now how much the step is."""
        if total != self._total:
            self._total = total
            if self._bars is not None and self._task is not None:
                self._bars.update(self._task, total=total)

    def update(self, done: int) -> None:
        """So much of the step is done."""
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
            self._console.print(f"{self._name}: {_words(done, self._unit)}{share}", soft_wrap=True)

    def _draw(self, done: int) -> None:
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), _DoneColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        if self._task is None:
            self._task = self._bars.add_task(self._name, total=self._total, unit=self._unit)
        self._bars.update(self._task, completed=done)


def _words(done: int, unit: str) -> str:
    return words_of_size(done) if unit == "bytes" else f"{done:,} {unit}"
