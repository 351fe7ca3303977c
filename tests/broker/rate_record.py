"""What a limited group delivered, for models: never more than its rate, whatever restarts and pauses there were."""

from __future__ import annotations


class RateRecord:
    """The deliveries of one group since its limit was set, or its broker was started."""

    def __init__(self) -> None:
        #: Messages a second; None: there is no limit.
        self.messages: float | None = None
        self._since = 0.0
        self._count = 0

    def begin(self, messages: float | None, now: float) -> None:
        """A limit is set."""
        if messages != self.messages:
            self.messages = messages
            self.restarted(now)

    def restarted(self, now: float) -> None:
        """The broker starts again: its limit has no tokens."""
        self._since, self._count = now, 0

    def delivered(self, count: int, now: float) -> None:
        """Messages were delivered. A delivery of one message may be a part of a message too early."""
        self._count += count
        if self.messages is not None and count:
            most = self.messages * (now - self._since) + 1
            assert self._count <= most, (
                f"{self._count} messages in {now - self._since:.2f} s at a rate of {self.messages}"
            )
