"""The outcome of a message that failed: when it is redelivered, why it failed, or that it becomes a dead letter."""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.client.arguments import Duration, wait_of
from plait.errors import InvalidArgument
from plait.model.reason import Reason

#: (start, end, epoch) of sequences.
EpochRange = tuple[int, int, int]


class FailureOutcome(NamedTuple):
    """How rows failed. Rows with equal outcomes share one nack request."""

    #: Seconds until redelivery; None: as the group's retry policy says.
    delay: float | None = None
    reason: Reason | None = None
    #: True if the rows become dead letters at once.
    reject: bool = False
    #: True if the delivery counts as an attempt, because a handler had begun.
    counted: bool = True


#: Redelivered as the group's retry policy says.
FAILED = FailureOutcome()
#: Returned: no handler has begun. The rows are redelivered at once, and no attempt is counted.
UNBEGUN = FailureOutcome(0.0, counted=False)

#: The failed ranges by failure outcome.
Nacks = dict[FailureOutcome, list[EpochRange]]


def failed_of(delay: Duration | None, reason: Any) -> FailureOutcome:
    """The outcome of ``nack(delay, reason)``."""
    if delay is None and reason is None:
        return FAILED
    return FailureOutcome(None if delay is None else wait_of(delay), reason_of(reason))


def rejected_of(reason: Any) -> FailureOutcome:
    """The outcome of ``reject(reason)``."""
    return FailureOutcome(None, reason_of(reason), reject=True)


def reason_of(value: Any, handler: str = "") -> Reason | None:
    """The ``Reason`` for what a user passes: an exception, text or a ``Reason``."""
    if value is None:
        return None
    if isinstance(value, Reason):
        return _clean(value.type, value.text, value.handler or handler)
    if isinstance(value, str):
        return _clean("", value, handler)
    if isinstance(value, BaseException):
        try:
            found = Reason.of(value, handler)
        except Exception as error:  # noqa: BLE001 - the __str__ of a user's exception may raise anything
            return _clean(type(value).__qualname__, f"str() of the exception raised {type(error).__name__}", handler)
        return _clean(found.type, found.text, found.handler)
    raise InvalidArgument(f"reason {value!r} is a {type(value).__name__}; use an exception, text or a plait.Reason")


def _clean(*parts: str) -> Reason:
    """Escape lone surrogates: Python strings may contain them, UTF-8 cannot."""
    return Reason(*(part.encode("utf-8", "backslashreplace").decode() for part in parts))
