"""A commit (what one loop turn wrote) and the blocking work that makes it durable."""

from __future__ import annotations

from collections.abc import Callable

from plait.broker.appender import Appended
from plait.storage.logs.log import SyncJob


class Commit:
    """What one loop turn wrote, and the callbacks that run when it counts."""

    __slots__ = ("appended", "durable_replies", "ends", "replies", "since")

    def __init__(self, appended: Appended, since: float) -> None:
        self.appended = appended
        #: Time of the write, on the monotonic clock.
        self.since = since
        self.replies: list[Callable[[], None]] = []
        self.durable_replies: list[Callable[[], None]] = []
        #: The written end of each log.
        self.ends: list[int] = []


class SyncWork:
    """The blocking part of a sync, log by log: the action log refers to the others and comes last (R3)."""

    __slots__ = ("done", "jobs")

    def __init__(self, jobs: list[SyncJob]) -> None:
        self.jobs = jobs
        #: The logs are synced. Set by the thread that runs ``run``, which may do more work before it reports its end.
        self.done = False

    def run(self) -> None:
        for job in self.jobs:
            job.run()
        self.done = True

    @property
    def size(self) -> int:
        """Bytes that this sync makes durable."""
        return sum([job.size for job in self.jobs])

    def covers(self, ends: list[int]) -> bool:
        """Whether this sync makes every log durable up to these ends."""
        for job, end in zip(self.jobs, ends, strict=True):  # noqa: SIM110 - a generator would cost as much again
            if job.end < end:
                return False
        return True
