"""What one loop turn wrote, and the blocking work that makes it durable."""

from __future__ import annotations

from collections.abc import Callable

from plait.broker.appender import Appended
from plait.storage.logs.log import SyncJob


class Commit:
    """What one loop turn wrote, and who is told when it counts."""

    __slots__ = ("appended", "durable_replies", "ends", "replies", "since")

    def __init__(self, appended: Appended, since: float) -> None:
        self.appended = appended
        #: When it was written, on the monotonic clock.
        self.since = since
        self.replies: list[Callable[[], None]] = []
        self.durable_replies: list[Callable[[], None]] = []
        #: How far each log was written.
        self.ends: list[int] = []


class SyncWork:
    """The blocking part of a sync, log by log: the action log, which rests on the others, comes last (R3)."""

    __slots__ = ("done", "jobs")

    def __init__(self, jobs: list[SyncJob]) -> None:
        self.jobs = jobs
        #: The logs are synced; set by the thread that runs it, which may have more to do before its end is heard of.
        self.done = False

    def run(self) -> None:
        for job in self.jobs:
            job.run()
        self.done = True

    @property
    def size(self) -> int:
        """Bytes that wait for it."""
        return sum([job.size for job in self.jobs])

    def covers(self, ends: list[int]) -> bool:
        """Everything up to these is durable by it."""
        for job, end in zip(self.jobs, ends, strict=True):  # noqa: SIM110 - a generator would cost as much again
            if job.end < end:
                return False
        return True
