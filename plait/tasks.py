"""Background tasks: every task is started here, so that no failure goes unnoticed.

asyncio reports the exception of a task to the code that awaits it. No code awaits a background task, so its work would
stop silently. There are three kinds of tasks:

- ``keep``: a job that must run as long as its owner does. A failure is logged, and the job is restarted after a pause.
- ``start``: a job that runs once. A failure is logged and passed to the callback ``failed`` of its owner.
- ``child``: a part of another coroutine's work. That coroutine awaits the task and gets its error.

A task that ends as cancelled although no caller cancelled it has failed: it awaited a future that another task
cancelled.
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

#: Called with the error that ended a task.
OnFailure = Callable[[Exception], None]


def start(job: Coroutine[Any, Any, T], name: str, *, failed: OnFailure | None = None) -> asyncio.Task[T]:
    """Run a job once. An error is logged, then passed to ``failed``."""
    task = asyncio.get_running_loop().create_task(job, name=name)
    task.add_done_callback(functools.partial(_ended, failed))
    return task


def child(job: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Run a part of the caller's work. The caller, or another coroutine, awaits the task and handles its error."""
    task = asyncio.get_running_loop().create_task(job, name=name)
    task.add_done_callback(_retrieve_exception)
    return task


def keep(job: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Run a job until the task is cancelled or the job returns; restart it after a failure."""
    return start(restarting(job, name), name)


async def restarting(job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """The coroutine that ``keep`` runs, for jobs on the loop of another thread."""
    while True:
        try:
            return await job()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            _report(name, _cancelled_by_none(name), "it is restarted")
        except Exception as error:  # noqa: BLE001 (every error is reported)
            _report(name, error, "it is restarted")
        await asyncio.sleep(TASK_RESTART_SECONDS)


def error_of(error: Exception) -> PlaitError:
    """The error to raise in user code for a failed task."""
    if isinstance(error, PlaitError):
        return error
    return InternalError(f"a background task of this client failed ({error!r}); its log has the details")


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


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, so that asyncio does not warn when a cancelled caller never awaits its child."""
    if not task.cancelled():
        task.exception()


def _report(name: str, error: BaseException, outcome: str) -> None:
    log.error("background task %s failed: %r; %s", name, error, outcome, exc_info=error)
