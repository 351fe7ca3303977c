"""The errors that end a request."""

from __future__ import annotations

from plait.errors import PlaitError, Timeout


class RequestTimeout(Timeout):
    """A request had no reply in time; it may still be handled."""

    code = "request_timeout"
    facts = ("subject", "seconds")


class RequestFailed(PlaitError):
    """The handler of a request gave up; the message has the reason."""

    code = "request_failed"
    facts = ("subject", "reason")
