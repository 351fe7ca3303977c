"""Threads for ``def`` handlers.

A thread cannot be stopped from outside. These are daemon threads, so the program does not wait at its end for a handler
that does not return: the process of an app ends after its drain time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: A future, and the call whose result it gets.
_Work = tuple["Future[Any]", Callable[[], Any]]


class HandlerThreads(Executor):
    """At most ``count`` threads, started when there is work for them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in one of the threads."""
        if self._stopped:
            raise RuntimeError("the handler threads are stopped and take no more calls")
        future: Future[T] = Future()
        self._work.put((future, functools.partial(call, *args, **kwargs)))
        if len(self._threads) < self._count:
            name = f"plait-handler-{len(self._threads) + 1}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. Each thread ends after its current call; ``wait`` waits for that."""
        self._stopped = True
        for _ in self._threads:
            self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            if not future.set_running_or_notify_cancel():
                continue
            result: Any = None
            failure: BaseException | None = None
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the caller looks at it
                failure = error
            if self._stopped:
                # The loop that waited for it may be closed.
                return
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
