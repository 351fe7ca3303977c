"""Exceptions with which a handler chooses the outcome of its message."""

from __future__ import annotations

from plait.client.arguments import Duration, wait_of
from plait.client.consume.failure import reason_of
from plait.model.reason import Reason


class RetryLater(Exception):
    """Retry the message after ``delay``, whatever the group's policy is. It is not logged as an error.

    It counts as an attempt: after the last attempt of the policy the message becomes a dead letter.
    """

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"again in {self.seconds:g} s")


class Suspend(Exception):
    """Suspend the handler: it gets no messages for ``delay``, and then this one again.

    It does not count as an attempt: the message never becomes a dead letter because of it.
    """

    def __init__(self, delay: Duration) -> None:
        self.seconds = wait_of(delay)
        super().__init__(f"suspended for {self.seconds:g} s")


class Reject(Exception):
    """Make the message a dead letter at once: no attempt can succeed.

    ``reason`` is text, an exception or a ``plait.Reason``; by default the exception that this one was raised from.
    """

    def __init__(self, reason: str | BaseException | Reason | None = None) -> None:
        # Validated here, so that the traceback shows where the reason was given.
        checked = reason_of(reason)
        self.reason: str | BaseException | Reason = "" if reason is None else reason
        super().__init__("" if checked in (None, Reason()) else str(checked))

    def reason_for(self, handler: str) -> Reason | None:
        """The reason of the dead letter."""
        if isinstance(self.reason, str):
            if not self.reason and self.__cause__ is not None:
                return reason_of(self.__cause__, handler)
            return reason_of(Reason("plait.Reject", self.reason), handler)
        return reason_of(self.reason, handler)
