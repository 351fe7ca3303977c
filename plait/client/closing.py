"""Closing that is never interrupted (R27).

Closing a consumer, a client or an app detaches it, releases its locks and returns what it holds. A caller may be
cancelled meanwhile: by ``asyncio.timeout``, a ``TaskGroup``, control-C. The closing runs in a task of its own, and the
cancellation reaches the caller only when that task has ended; otherwise the loop could end before the closing is
complete. Every step of a closing has a time-out, so the wait is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from plait import tasks

T = TypeVar("T")

#: How often a closing is started again after its task was cancelled, which happens only when the loop ends.
CANCELLATIONS_MAX = 10


class Closing(Generic[T]):
    """Closes one object once; every caller waits until it is closed.

    ``close`` may run again after a cancellation half way: its steps must be idempotent.
    """

    def __init__(self, name: str, close: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._name = name
        self._close = close
        self._task: asyncio.Task[T] | None = None

    @property
    def begun(self) -> bool:
        """True if the object is closed or closing."""
        return self._task is not None

    async def __call__(self) -> T:
        """Close, or wait for the closing that runs. Returns or raises what ``close`` does."""
        cancelled: asyncio.CancelledError | None = None
        for _ in range(CANCELLATIONS_MAX):
            if self._task is None or self._task.cancelled():
                # A loop that ends cancels every task and waits for all of them, so a new task can still run.
                self._task = tasks.child(self._close(), f"plait-close-{self._name}")
            cancelled = await end_of(self._task) or cancelled
            if not self._task.cancelled():
                break
        assert self._task is not None
        if cancelled is not None:
            raise cancelled
        return self._task.result()

    async def wait(self) -> None:
        """Wait until a closing that has begun ends, with or without an error."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])


async def end_of(
    task: asyncio.Task[Any], on_cancel: Callable[[], None] = lambda: None
) -> asyncio.CancelledError | None:
    """Wait for a task even if the caller is cancelled; returns that cancellation, for the caller to raise."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    return cancelled


async def all_of(several: list[Awaitable[Any]]) -> None:
    """Wait for all of them, also when some fail; then raise the first error."""
    for outcome in await asyncio.gather(*several, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
