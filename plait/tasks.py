"""Background tasks: the one way to start them, so that none ends unnoticed.

An exception that leaves an asyncio task is kept until the task is awaited; for a background task that is never, and the
work it did stops without a trace. So every task is started here, as one of three kinds:

- ``keep``: a job that must run as long as its owner does. It is logged when it fails, and started again after a pause.
- ``start``: a job that runs once. It is logged when it fails, and its owner gets the error by ``failed``.
- ``child``: a part of what another coroutine does. That coroutine awaits it, and gets its error.

A task that ends as cancelled although no caller cancelled it has failed: it awaited a future that another cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from plait.errors import InternalError, PlaitError
from plait.limits import TASK_RESTART_SECONDS

log = logging.getLogger("plait.tasks")

T = TypeVar("T")

#: Gets the error that ended a task.
OnFailure = Callable[[Exception], None]


def start(job: Coroutine[Any, Any, T], name: str, *, failed: OnFailure | None = None) -> asyncio.Task[T]:
    """Run a job once. An error that leaves it is logged, then given to ``failed``."""
    task = asyncio.get_running_loop().create_task(job, name=name)
    task.add_done_callback(functools.partial(_ended, failed))
    return task


def child(job: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Run a part of what the caller does: the caller, or another coroutine, awaits it and deals with its error."""
    task = asyncio.get_running_loop().create_task(job, name=name)
    task.add_done_callback(_look_at)
    return task


def keep(job: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Run a job until the task is cancelled or the job returns; one that fails is started again."""
    return start(restarting(job, name), name)


async def restarting(job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """What ``keep`` runs; for jobs that run on the loop of another thread."""
    while True:
        try:
            return await job()
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            _report(name, _cancelled_by_none(name), "it is started again")
        except Exception as error:  # noqa: BLE001 (it is reported, whatever it is)
            _report(name, error, "it is started again")
        await asyncio.sleep(TASK_RESTART_SECONDS)


def error_of(error: Exception) -> PlaitError:
    """The error that users get for a task that failed."""
    if isinstance(error, PlaitError):
        return error
    return InternalError(f"a background task of this client failed ({error!r}); its log has the details")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled_by_none(name: str) -> InternalError:
    return InternalError(f"{name} ended as cancelled, but no caller cancelled it")


def _ended(failed: OnFailure | None, task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        if task.cancelling():
            return
        error: BaseException | None = _cancelled_by_none(task.get_name())
    else:
        error = task.exception()
    if isinstance(error, Exception):
        _report(task.get_name(), error, "it has ended" if failed is None else "its owner gets the error")
        if failed is not None:
            failed(error)


def _look_at(task: asyncio.Task[Any]) -> None:
    """A caller that is cancelled does not await its children: asyncio must not complain of their errors then."""
    if not task.cancelled():
        task.exception()


def _report(name: str, error: BaseException, outcome: str) -> None:
    log.error("background task %s failed: %r; %s", name, error, outcome, exc_info=error)
