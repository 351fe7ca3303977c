"""What a handler may raise to say more than that it failed."""

from __future__ import annotations

from plait.client.arguments import Duration, wait_of
from plait.client.consume.failure import reason_of
from plait.model.reason import Reason


class RetryLater(Exception):
    """Not now: the message comes again after ``delay``, whatever the group's policy is. That is no error.

    It is an attempt: after the last one that the policy allows, the message goes to the dead letters.
    """

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"again in {self.seconds:g} s")


class Suspend(Exception):
    """Nothing can be handled for ``delay``: the handler gets no messages until then, and this one comes again.

    That is no attempt: however often it happens, the message does not die of it.
    """

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"suspended for {self.seconds:g} s")


class Reject(Exception):
    """No attempt will ever succeed: the message goes to the dead letters at once.

    ``reason`` is text, an exception or a ``plait.Reason``; without one it is what the exception was raised from.
    """

    def __init__(self, reason: str | BaseException | Reason | None = None) -> None:
        # Checked here, where the traceback leads to whoever wrote it.
        told = reason_of(reason)
        self.reason: str | BaseException | Reason = "" if reason is None else reason
        super().__init__("" if told in (None, Reason()) else str(told))

    def told(self, handler: str) -> Reason | None:
        """What the dead letter says."""
        if isinstance(self.reason, str):
            if not self.reason and self.__cause__ is not None:
                return reason_of(self.__cause__, handler)
            return reason_of(Reason("plait.Reject", self.reason), handler)
        return reason_of(self.reason, handler)
