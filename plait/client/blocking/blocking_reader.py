"""The reader for blocking code: reads without a group."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Any, Self

from plait.client.arguments import Duration
from plait.client.blocking.blocking_consumer import ITERATION_SECONDS
from plait.client.blocking.loop_thread import RunInLoop
from plait.client.blocking.proxy import Blocking
from plait.client.read.reader import ITERATION_COUNT, Reader
from plait.client.types import Message


class SyncReader(Blocking[Reader]):
    """Reads a subject from a position. A restart of the server only delays it."""

    def __init__(self, inner: Reader, run: RunInLoop) -> None:
        super().__init__(inner, run)
        self.subject = inner.subject
        #: Messages that the loop handed over and no caller has taken: an interrupted call loses none.
        self._ready: deque[Message] = deque()
        self._lock = threading.Lock()

    @property
    def position(self) -> Any:
        """The position of the next read."""
        return self._inner.position

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        self._inner._closed = True
        if self._inner._router.meta.closed is None:
            self._run(self._inner.close())

    def fetch(self, count: int = 500, wait: Duration = 1.0) -> list[Message]:
        """Up to ``count`` messages: those available now, or else the first that arrive within ``wait`` seconds."""
        if not self._ready or count < 1:
            self._run(self._hand_over(count, wait))
        with self._lock:
            return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    async def _hand_over(self, count: int, wait: Duration) -> None:
        """Fetch messages and hand them over. Runs on the loop."""
        self._ready.extend(await self._inner.fetch(count, wait))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Wait for the next message, without a timeout."""
        while True:
            with self._lock:
                if self._ready:
                    return self._ready.popleft()
            if self._inner._closed:
                raise StopIteration
            self._run(self._hand_over(ITERATION_COUNT, ITERATION_SECONDS))
