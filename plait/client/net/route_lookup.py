"""Asks the meta server for the route of a subject, repeatedly, until it is the one that a sender needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from plait import chance, tasks
from plait.client.net.router import Router, SubjectRoute
from plait.errors import DiskFull, FlowControl, LimitExceeded, PlaitError, ReadOnly
from plait.limits import ClientLimits

#: Errors of a meta server that cannot create the subject now. The request fails without another attempt.
_FINAL: Final = (ReadOnly, DiskFull, FlowControl, LimitExceeded)


class RouteLookup:
    """The request for the route of one subject; at most one runs."""

    __slots__ = (
        "_closed",
        "_failed",
        "_found",
        "_limits",
        "_router",
        "_subject",
        "_task",
        "_wanted",
        "backoff",
        "error",
        "first",
    )

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        subject: str,
        found: Callable[[SubjectRoute], None],
        failed: Callable[[PlaitError], None],
    ) -> None:
        self._router = router
        self._limits = limits
        self._subject = subject
        self._found = found
        self._failed = failed
        #: True while no route is known: a cached route is good enough then.
        self.first = True
        #: The newest route version that a broker has reported.
        self._wanted = 0
        #: The pause before the next request. It grows until a route proves right and the owner sets the pause to 0.
        self.backoff = 0.0
        #: Why the last request failed.
        self.error: PlaitError | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        """A request runs."""
        return self._task is not None

    def start(self, version: int = 0) -> None:
        """Start a request for a route of at least this version, unless one runs."""
        self._wanted = max(self._wanted, version)
        if self._task is None and not self._closed:
            # After a defect of the task the owner fails its rows; the next send asks again.
            self._task = tasks.start(
                self._look(),
                f"plait-route-{self._subject}",
                failed=lambda error: self._failed(tasks.error_of(error)),
            )

    def close(self) -> None:
        """Stop the request, and start no other."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        router, limits = self._router, self._limits
        pause = limits.send_retry_first_seconds
        try:
            if self.backoff:
                # The route of the last request was wrong as well.
                await _sleep_about(self.backoff)
            if not self.first:
                self.backoff = min(2 * (self.backoff or pause), limits.send_retry_max_seconds)
            while True:
                try:
                    found = await (router.route if self.first else router.refresh)(self._subject)
                except PlaitError as error:
                    if isinstance(error, _FINAL) or not error.retryable:
                        self._failed(error)
                        return
                    self.error = error
                else:
                    self.error = None
                    if found.version >= self._wanted:
                        break
                await _sleep_about(pause)
                pause = min(pause * 2, limits.send_retry_max_seconds)
        finally:
            self._task = None
        self._found(found)


async def _sleep_about(seconds: float) -> None:
    await asyncio.sleep(seconds * chance.uniform(0.5, 1.0))
