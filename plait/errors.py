"""Every error Plait raises, under one root.

Each class has a stable ``code`` that the wire, the CLI and HTTP share, and two facts a caller acts on:
``retryable`` (the same request may succeed later) and ``exit_code`` (what the CLI ends with). ``facts`` names what its
``details`` always hold; a test finds places that leave one out.
docs/errors.md lists them all; a test keeps that page and this file the same.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PlaitError(Exception):
    """Root of everything Plait raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    #: What ``details`` always has.
    facts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        #: Machine-readable facts that travel with the error over the wire.
        self.details: dict[str, Any] = details


# --- what the caller got wrong -------------------------------------------------------------------


class InvalidArgument(PlaitError, ValueError):
    """A value the caller passed is not allowed; the message names it and says what is."""

    code = "invalid_argument"
    exit_code = 2


class InvalidName(InvalidArgument):
    """A subject, group, client or tag name breaks the name rules."""

    code = "invalid_name"
    facts = ("kind", "name")


class TooLarge(InvalidArgument):
    """A message, frame or request is over a named limit."""

    code = "too_large"


class CodecError(InvalidArgument):
    """A body could not be encoded, or could not be decoded into the type asked for."""

    code = "codec"


class SubjectNotFound(PlaitError):
    """The subject does not exist and may not be created by use."""

    code = "subject_not_found"
    facts = ("subject",)
    exit_code = 4


class SubjectExists(PlaitError):
    """The subject exists already."""

    code = "subject_exists"
    facts = ("subject",)
    exit_code = 5


class GroupNotFound(PlaitError):
    """The group has never consumed that subject."""

    code = "group_not_found"
    facts = ("subject", "group")
    exit_code = 4


class DeadLetterNotFound(PlaitError):
    """There is no such dead letter (any more)."""

    code = "dead_letter_not_found"
    facts = ("subject", "group", "sequence")
    exit_code = 4


class KeyNotParked(PlaitError):
    """The key is not parked (any more) in that group."""

    code = "key_not_parked"
    facts = ("subject", "group")
    exit_code = 4


class NotScheduled(PlaitError):
    """The message is not scheduled (any more): it was delivered or cancelled."""

    code = "not_scheduled"
    facts = ("subject", "number")
    exit_code = 4


class GroupMismatch(PlaitError):
    """A member asks for settings that differ from its group's; both values are named."""

    code = "group_mismatch"
    facts = ("subject", "group", "has", "asked")
    exit_code = 5


class GroupBusy(PlaitError):
    """The group has live consumers, and the operation needs it idle."""

    code = "group_busy"
    facts = ("subject", "group")
    exit_code = 5


class LimitExceeded(PlaitError):
    """A named limit of the server is used up (subjects, connections, groups...)."""

    code = "limit_exceeded"
    facts = ("limit", "value")
    exit_code = 6


# --- the client's own state ----------------------------------------------------------------------


class BufferFull(PlaitError):
    """``post`` found the send buffer full; wait with ``flush`` or use ``send``."""

    code = "buffer_full"
    facts = ("limit", "value")
    retryable = True


class Closed(PlaitError):
    """The client, consumer or reader was closed already."""

    code = "closed"


class ForkedClient(PlaitError):
    """A client opened before a fork was used in the child; open a new one there."""

    code = "forked"


# --- what the server refuses ---------------------------------------------------------------------


class FlowControl(PlaitError):
    """The broker is too busy right now; nothing was stored and the client does not resend by itself."""

    code = "flow_control"
    retryable = True
    exit_code = 7


class ReadOnly(PlaitError):
    """The broker takes no sends at present."""

    code = "read_only"
    retryable = True
    exit_code = 7


class DiskFull(PlaitError):
    """A disk watermark is passed or the disk is full; nothing was stored."""

    code = "disk_full"
    retryable = True
    exit_code = 7


class NoBroker(PlaitError):
    """No broker group is available for a new subject or partition."""

    code = "no_broker"
    retryable = True
    exit_code = 7


class MetaBusy(PlaitError):
    """Others changed the same thing again and again; nothing was changed."""

    code = "meta_busy"
    retryable = True
    exit_code = 7


class StaleRoute(PlaitError):
    """The partition is not served here (any more); refresh the route and go on."""

    code = "stale_route"
    retryable = True


class OutOfSequence(PlaitError):
    """A frame does not follow the last one stored for its producer; ``details['last']`` names that one."""

    code = "out_of_sequence"
    facts = ("last",)


class UnknownProducer(PlaitError):
    """The broker forgot the producer before it answered this send; whether it is stored is in doubt."""

    code = "unknown_producer"


class ProducerConflict(PlaitError):
    """Other rows are stored under this send's numbers: another process uses its producer id; nothing was stored."""

    code = "producer_conflict"


class StaleSession(PlaitError):
    """The consumer was given up (lost contact, or attached elsewhere); attach again."""

    code = "stale_session"
    retryable = True


class Expired(PlaitError):
    """The sequences asked for were removed by retention."""

    code = "expired"


class DataLost(PlaitError):
    """Messages that a reader was to get are not there any more, or others have their sequences now."""

    code = "data_lost"


# --- the way there -------------------------------------------------------------------------------


class Unavailable(PlaitError):
    """No server could be reached in time."""

    code = "unavailable"
    retryable = True
    exit_code = 3


class MetaUnavailable(PlaitError):
    """The meta server's database cannot be used at present; what was asked for may be asked for again."""

    code = "meta_unavailable"
    retryable = True
    exit_code = 3


class Timeout(PlaitError, TimeoutError):
    """The answer did not come in time; whether the request took effect is unknown."""

    code = "timeout"
    retryable = True
    exit_code = 3


class ProtocolError(PlaitError):
    """The other side broke the protocol."""

    code = "protocol"
    exit_code = 3


class VersionMismatch(ProtocolError):
    """No protocol or format version is shared; nothing was touched."""

    code = "version_mismatch"


class InternalError(PlaitError):
    """A server or client met a defect of its own; its log has the details. The request's effect is unknown."""

    code = "internal"
    exit_code = 70


# --- data ----------------------------------------------------------------------------------------


class FrameError(PlaitError):
    """Bytes are not a valid frame."""

    code = "frame_invalid"


class DataDirError(PlaitError):
    """The data directory cannot be used: locked by another process, of a newer format, or not ours."""

    code = "data_dir"
    exit_code = 8


class DamageError(PlaitError):
    """Stored data is damaged; what and where is named, nothing was cut."""

    code = "damaged"
    exit_code = 8


class StorageFailed(PlaitError):
    """A write or sync of a first-hand log failed; the server stops acknowledging, exits and recovers."""

    code = "storage_failed"
    exit_code = 9


class ArchiveError(PlaitError):
    """An archive cannot be used: it is not one, is damaged, or does not fit what is to be archived."""

    code = "archive"
    exit_code = 8


class ArchiveConflict(ArchiveError):
    """Two archivers changed one archive at once; the first one's change counts, nothing is lost."""

    code = "archive_conflict"
    retryable = True
    exit_code = 5


def _all_errors() -> dict[str, type[PlaitError]]:
    found: dict[str, type[PlaitError]] = {}
    pending: list[type[PlaitError]] = [PlaitError]
    while pending:
        kind = pending.pop()
        found[kind.code] = kind
        pending.extend(kind.__subclasses__())
    return found


#: Stable code → class, for turning an error reply back into an exception.
BY_CODE: dict[str, type[PlaitError]] = _all_errors()


def from_code(code: str, message: str, details: dict[str, Any] | None = None) -> PlaitError:
    """The exception for an error reply; a code of a newer server becomes a plain ``PlaitError``."""
    return BY_CODE.get(code, PlaitError)(message, **(details or {}))
