"""Closing that is never interrupted (R27).

Closing a consumer, a client or an app detaches it, releases its locks and returns what it holds. A caller may be
cancelled meanwhile: by ``asyncio.timeout``, a ``TaskGroup``, control-C. The closing runs in a task of its own, and the
caller is cancelled when that task has ended. It must not be cancelled earlier: the loop may end with it, and then the
closing would end half done. Every step of a closing has a time-out, so the wait is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from plait import tasks

T = TypeVar("T")

#: How often a closing begins when its own task is cancelled, which only the end of a loop does.
CANCELLATIONS_MAX = 10


class Closing(Generic[T]):
    """The closing of one object: it happens once, and every caller waits for its end.

    ``close`` may be called again after it was cancelled half way: its steps are idempotent.
    """

    def __init__(self, name: str, close: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._name = name
        self._close = close
        self._task: asyncio.Task[T] | None = None

    @property
    def begun(self) -> bool:
        """The object is closed, or about to be."""
        return self._task is not None

    async def __call__(self) -> T:
        """Close, or wait until that is done; what it returns or raises."""
        cancelled: asyncio.CancelledError | None = None
        for _ in range(CANCELLATIONS_MAX):
            if self._task is None or self._task.cancelled():
                # The end of a loop cancels every task and waits for all of them: there is time to begin again.
                self._task = tasks.child(self._close(), f"plait-close-{self._name}")
            cancelled = await end_of(self._task) or cancelled
            if not self._task.cancelled():
                break
        assert self._task is not None
        if cancelled is not None:
            raise cancelled
        return self._task.result()

    async def wait(self) -> None:
        """Until a closing that has begun has ended, however it ends."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])


async def end_of(
    task: asyncio.Task[Any], on_cancel: Callable[[], None] = lambda: None
) -> asyncio.CancelledError | None:
    """Wait for the end of a task, whatever happens to the caller meanwhile: the cancellation that it is to raise."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    return cancelled


async def all_of(several: list[Awaitable[Any]]) -> None:
    """Wait for all of them, whatever happens to some; then raise the first error."""
    for outcome in await asyncio.gather(*several, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
