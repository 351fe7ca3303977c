"""Runs asynchronous code for blocking callers: an event loop in a background thread, and the blocking form of methods.

A blocking class wraps an object of the asynchronous client (``_inner``) and has a function that runs coroutines on the
client's loop (``_run``). Its methods are made from those of the wrapped class: no signature and no docstring exists
twice, and a type checker knows the arguments and results.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from plait.errors import Closed

T = TypeVar("T")


class RunInLoop(Protocol):
    """Runs a coroutine on a loop in another thread and waits for its result."""

    def __call__(
        self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None, *, cancel: bool = True
    ) -> T: ...


#: How long the interpreter waits for a loop thread when it ends.
STOP_SECONDS = 2.0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop if it is installed, otherwise of asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """A loop that runs in a daemon thread until it is stopped."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None, *, cancel: bool = True) -> T:
        """Run a coroutine on the loop and wait for its result; ``TimeoutError`` after ``timeout`` seconds.

        An interrupt of the wait, such as control-C, cancels the coroutine unless ``cancel`` is False.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call on the loop's thread would never return; call it from another thread")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise Closed("the interpreter is exiting; close clients before it exits") from None
        try:
            return future.result(timeout)
        except BaseException:
            if cancel:
                future.cancel()
            raise

    def stop(self, seconds: float | None = None) -> None:
        """Cancel the loop's tasks and end the thread."""
        if self._thread.is_alive():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:
                # The loop has ended already.
                return
            self._thread.join(seconds)


_shared: LoopThread | None = None
_lock = threading.Lock()
#: The loops of parent processes. They are referenced here so that the garbage collector does not close them.
_inherited: list[LoopThread] = []


def shared_loop() -> LoopThread:
    """The process's loop for blocking clients; starts it at the first call."""
    global _shared
    with _lock:
        if _shared is None or not _shared.running:
            _shared = LoopThread("plait-sync")
        return _shared


def _after_fork() -> None:
    """Forget the parent's loop in a forked child, which does not have the thread. The child starts its own loop."""
    global _shared, _lock
    _lock = threading.Lock()
    if _shared is not None:
        _inherited.append(_shared)
        _shared = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _stop_shared() -> None:
    if _shared is not None:
        _shared.stop(STOP_SECONDS)


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner")


class Blocking(Generic[T]):
    """Base of the blocking classes: wraps an object of the asynchronous client."""

    def __init__(self, inner: T, run: RunInLoop) -> None:
        self._inner = inner
        self._run = run

    def __repr__(self) -> str:
        return repr(self._inner)


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """The blocking form of an asynchronous method: runs it on the loop and waits for its result."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(method(self._inner, *args, **kwargs))
        return result

    return call


def signed_as(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[Concatenate[Owner, P], R]], Callable[Concatenate[Owner, P], R]]:
    """Gives a method the signature of one of the asynchronous client; its docstring stays, if it has one.

    The names of the result's classes are those that ``plait.sync`` exports: ``Consumer`` is ``SyncConsumer`` there.
    """

    def decorate(function: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
        function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        function.__doc__ = function.__doc__ or method.__doc__
        return function

    return decorate
