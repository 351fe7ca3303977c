"""Event loops: which kind, and one in a thread of its own for blocking callers."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

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
    """uvloop's where it is installed, asyncio's own otherwise."""
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
        """Run a coroutine over there and wait for its result; ``TimeoutError`` if it takes longer than ``timeout``.

        Whatever interrupts the waiting, control-C above all, cancels the coroutine, unless ``cancel`` is False.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call on the loop's own thread would wait for itself")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise Closed("the interpreter is ending; nothing can be sent or received any more") from None
        try:
            return future.result(timeout)
        except BaseException:
            if cancel:
                future.cancel()
            raise

    def stop(self, seconds: float | None = None) -> None:
        """Cancel what runs there and end the thread."""
        if self._thread.is_alive():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:
                # It ended by itself meanwhile.
                return
            self._thread.join(seconds)


_shared: LoopThread | None = None
_lock = threading.Lock()
#: The loops of parent processes: never touched, not even by the garbage collector.
_inherited: list[LoopThread] = []


def shared_loop() -> LoopThread:
    """The process's one loop for blocking clients, started by the first of them."""
    global _shared
    with _lock:
        if _shared is None or not _shared.running:
            _shared = LoopThread("plait-sync")
        return _shared


def _after_fork() -> None:
    """A child has none of its parent's threads: it starts a loop of its own when it needs one."""
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
