"""A commit (what one loop turn wrote) and the blocking work that makes it durable."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from plait.broker.partitions.partition import Partition, ReadBatch
from plait.errors import PlaitError
from plait.frame.view import FrameView
from plait.storage.logs.log import SyncJob

#: Called once, with the sequence of the first row or with the error.
SendCallback = Callable[[int | None, PlaitError | None], None]


class Commit(msgspec.Struct, eq=False):
    """What one loop turn wrote, and the callbacks that run when the commit takes effect."""

    #: Time of the write, on the monotonic clock.
    since: float = 0.0
    #: Partition → the end of its appended rows.
    partitions: dict[Partition, int] = {}
    #: Partition with suspended pulls or reads → the last small frame that was appended to it.
    newest: dict[Partition, ReadBatch] = {}
    #: Callbacks of sends, each with its result.
    replies: list[tuple[SendCallback, int | None, PlaitError | None]] = []
    #: (schedule partition, frame, its log offset, number of its first row) of delayed rows.
    delayed: list[tuple[Partition, FrameView, int, int]] = []
    #: Callbacks of all other requests: called when the commit takes effect.
    answers: list[Callable[[], None]] = []
    #: Callbacks that are called when the commit is durable.
    durable_answers: list[Callable[[], None]] = []
    #: The written end of each log.
    ends: list[int] = []


class SyncWork:
    """The blocking part of a sync, log by log: the action log refers to the others and comes last (R3)."""

    __slots__ = ("done", "jobs")

    def __init__(self, jobs: list[SyncJob]) -> None:
        self.jobs = jobs
        #: True once the logs are synced. A checkpoint calls ``run`` in the middle of its own work, so this can be true
        #: long before its thread has finished.
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
        for job, end in zip(self.jobs, ends, strict=True):  # noqa: SIM110 - a generator takes twice the time
            if job.end < end:
                return False
        return True
