"""Cancels a call at each of its steps.

A step is one suspension of the call's task, or of a task that the call started, directly or indirectly. The steps of a
call are the same in every run if the events that it waits for arrive in the same order.

``async for at in every_step()`` repeats a scenario. The scenario calls ``at.cancel(call)``, which cancels the call at
the first step, then in the next repetition at the second step, and so on, until the call ends before its step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: No call has more steps than this. The test fails if a call has more, because it never ends.
STEPS_MAX = 500

#: Names of tasks that belong to clients, consumers and apps.
_CLIENTS = tuple(
    f"plait-{kind}"
    for kind in (
        "acks",
        "close",
        "connect",
        "consumer",
        "drain",
        "heartbeat",
        "leave",
        "member-heartbeats",
        "open",
        "poked",
    )
)

_counting: ContextVar[Steps | None] = ContextVar("_counting", default=None)


class Steps:
    """Counts the suspensions of a call's tasks, and calls ``reached`` at one of them."""

    def __init__(self, at: int, reached: Callable[[], None]) -> None:
        self.count = 0
        self._at = at
        self._reached = reached

    def suspended(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._reached()


class _Counted(Coroutine[Any, Any, T]):
    """A coroutine whose suspensions are counted."""

    def __init__(self, inner: Coroutine[Any, Any, T] | Generator[Any, Any, T], steps: Steps) -> None:
        self._inner = inner
        self._steps = steps

    def send(self, value: Any) -> Any:
        waiting = self._inner.send(value)
        self._steps.suspended()
        return waiting

    def throw(self, *error: Any) -> Any:
        waiting = self._inner.throw(*error)
        self._steps.suspended()
        return waiting

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("a counted coroutine is run by its task")


class Outcome(Generic[T]):
    """The outcome of a call that was to be cancelled."""

    def __init__(self, steps: int, *, reached: bool, result: T | None, error: BaseException | None) -> None:
        #: The number of suspensions.
        self.steps = steps
        #: True if the call reached the step at which it was to be cancelled.
        self.reached = reached
        self.result = result
        self.error = error

    @property
    def cancelled(self) -> bool:
        return isinstance(self.error, asyncio.CancelledError)


async def cancel_at(step: int, call: Coroutine[Any, Any, T], *, everything: bool = False) -> Outcome[T]:
    """Run a call in a new task and cancel it at its ``step``-th suspension.

    With ``everything`` all tasks that the call started are cancelled with it, as the end of ``asyncio.run`` does.
    """
    loop = asyncio.get_running_loop()
    family: list[asyncio.Task[Any]] = []
    before = loop.get_task_factory()
    reached = False

    def cancel() -> None:
        nonlocal reached
        reached = True
        for task in family if everything else family[:1]:
            task.cancel()

    steps = Steps(step, cancel)

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        counting = _counting.get()
        task: asyncio.Task[Any] = asyncio.Task(
            coroutine if counting is None else _Counted(coroutine, counting), loop=loop, **options
        )
        if counting is steps:
            family.append(task)
        return task

    loop.set_task_factory(make)
    token = _counting.set(steps)
    try:
        task = loop.create_task(call)
    finally:
        _counting.reset(token)
    result: T | None = None
    error: BaseException | None = None
    try:
        result = await asyncio.shield(task)
    except BaseException as raised:
        if not task.done():
            # The caller's own task was cancelled, not the call.
            raise
        error = raised
    finally:
        loop.set_task_factory(before)
    return Outcome(steps.count, reached=reached, result=result, error=error)


async def every_step(stride: int = 1) -> AsyncIterator[Stepping]:
    """One step after another, ``stride`` apart, until the call ends before its step."""
    for step in range(1, STEPS_MAX, stride):
        stepping = Stepping(step)
        yield stepping
        if not stepping.reached:
            return
    raise AssertionError(f"the call has more than {STEPS_MAX} steps")


class Stepping:
    """One step of ``every_step``; the scenario calls ``cancel`` once."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.reached = False

    async def cancel(self, call: Coroutine[Any, Any, T], *, everything: bool = False) -> Outcome[T]:
        """Run the call and cancel it at this step."""
        outcome = await cancel_at(self.step, call, everything=everything)
        self.reached = outcome.reached
        return outcome


@contextlib.contextmanager
def no_new_tasks() -> Generator[None, None, None]:
    """Check that no client task started in this block runs after it; broker tasks may."""
    before = asyncio.all_tasks()
    yield
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before if task.get_name().startswith(_CLIENTS))
    assert not left, f"left running: {left}"
