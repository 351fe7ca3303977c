"""What one loop turn wrote, and the blocking work that makes it durable."""

from __future__ import annotations

from collections.abc import Callable

from plait.broker.sends import Appended
from plait.storage.log import SyncJob


class Commit:
    """What one loop turn wrote, and who is told when it counts."""

    __slots__ = ("action_end", "appended", "durable_replies", "message_end", "replies", "since")

    def __init__(self, appended: Appended, since: float) -> None:
        self.appended = appended
        #: When it was written, on the monotonic clock.
        self.since = since
        self.replies: list[Callable[[], None]] = []
        self.durable_replies: list[Callable[[], None]] = []
        self.message_end = 0
        self.action_end = 0


class SyncWork:
    """The blocking part of a sync: the message log first, then the action log that rests on it (R3)."""

    __slots__ = ("_action", "_message", "done")

    def __init__(self, message: SyncJob, action: SyncJob) -> None:
        self._message = message
        self._action = action
        #: The logs are synced; set by the thread that runs it, which may have more to do before its end is heard of.
        self.done = False

    def run(self) -> None:
        self._message.run()
        self._action.run()
        self.done = True

    @property
    def size(self) -> int:
        """Bytes that wait for it."""
        return self._message.size + self._action.size

    @property
    def jobs(self) -> tuple[SyncJob, SyncJob]:
        return self._message, self._action
