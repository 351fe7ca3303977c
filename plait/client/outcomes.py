"""What a handler may raise to say more than that it failed."""

from __future__ import annotations

from plait.client.arguments import Duration, wait_of


class RetryLater(Exception):
    """Not now: the message comes again after ``delay``, whatever the group's policy is. That is no error."""

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"again in {self.seconds:g} s")


class Suspend(Exception):
    """Nothing can be handled for ``delay``: the handler gets no messages until then, and this one comes again."""

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"suspended for {self.seconds:g} s")
