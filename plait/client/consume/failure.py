"""What is said of a message that failed: when it comes again, why it failed, or that it never comes again."""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.client.arguments import Duration, wait_of
from plait.errors import InvalidArgument
from plait.model.reason import Reason

#: (start, end, epoch) of sequences.
EpochRange = tuple[int, int, int]


class FailureOutcome(NamedTuple):
    """Rows that failed in the same way are told in one request."""

    #: Seconds to wait; None: as the group retries.
    delay: float | None = None
    reason: Reason | None = None
    #: To the dead letters at once.
    reject: bool = False
    #: It was an attempt: somebody had begun with it.
    counted: bool = True


#: As the group retries.
FAILED = FailureOutcome()
#: Nobody began with it: others may have it at once, and it was no attempt.
UNBEGUN = FailureOutcome(0.0, counted=False)

#: What failed, by how.
Nacks = dict[FailureOutcome, list[EpochRange]]


def failed_of(delay: Duration | None, reason: Any) -> FailureOutcome:
    """What ``nack(delay, reason)`` says."""
    if delay is None and reason is None:
        return FAILED
    return FailureOutcome(None if delay is None else wait_of(delay), reason_of(reason))


def rejected_of(reason: Any) -> FailureOutcome:
    """What ``reject(reason)`` says."""
    return FailureOutcome(None, reason_of(reason), reject=True)


def reason_of(value: Any, handler: str = "") -> Reason | None:
    """A reason as users give it: an exception, text or a ``Reason``."""
    if value is None:
        return None
    if isinstance(value, Reason):
        return _clean(value.type, value.text, value.handler or handler)
    if isinstance(value, str):
        return _clean("", value, handler)
    if isinstance(value, BaseException):
        try:
            found = Reason.of(value, handler)
        except Exception as error:  # noqa: BLE001 - an exception that cannot say what it is has failed all the same
            return _clean(type(value).__qualname__, f"its text cannot be read: {type(error).__name__}", handler)
        return _clean(found.type, found.text, found.handler)
    raise InvalidArgument(f"reason {value!r} is a {type(value).__name__}; use an exception, text or a plait.Reason")


def _clean(*parts: str) -> Reason:
    """Half of a surrogate pair is text to Python and to nobody else."""
    return Reason(*(part.encode("utf-8", "backslashreplace").decode() for part in parts))
