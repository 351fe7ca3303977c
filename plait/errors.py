"""Every error that Plait raises, under one root.

Each class has a stable ``code``, shared by the wire, the CLI and HTTP. If it is ``retryable``, the same request may
succeed later. ``facts`` are the keys that ``details`` always has. Tests compare code and docs/errors.md with this file.
"""

from __future__ import annotations

from typing import Any, ClassVar

#: Code → class, to turn an error reply into an exception.
BY_CODE: dict[str, type[PlaitError]] = {}


class PlaitError(Exception):
    """Root of everything Plait raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    facts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        # A subclass without a code of its own is sent as its parent.
        BY_CODE.setdefault(cls.code, cls)

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        #: Machine-readable facts that travel with the error over the wire.
        self.details: dict[str, Any] = details


BY_CODE[PlaitError.code] = PlaitError


# --- mistakes of the caller -------------------------------------------------------------------
class InvalidArgument(PlaitError, ValueError):
    """An argument is not allowed; the message names the value and the values that are allowed."""

    code = "invalid_argument"
    exit_code = 2


class InvalidName(InvalidArgument):
    """A subject, group, client or tag name breaks the name rules."""

    code = "invalid_name"
    facts = ("kind", "name")


class InvalidFilter(InvalidArgument):
    """A filter cannot be understood; the message and ``position`` name the place of the mistake."""

    code = "invalid_filter"
    facts = ("position",)


class TooLarge(InvalidArgument):
    """A message, frame or request is over a named limit."""

    code = "too_large"


class CodecError(InvalidArgument):
    """A body could not be encoded, or could not be decoded into the requested type."""

    code = "codec"


class SubjectNotFound(PlaitError):
    """The subject does not exist, and the server does not create subjects on first use."""

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
    """The dead letter does not exist, or not any more."""

    code = "dead_letter_not_found"
    facts = ("subject", "group", "sequence")
    exit_code = 4


class KeyNotParked(PlaitError):
    """The key is not parked in that group, or not any more."""

    code = "key_not_parked"
    facts = ("subject", "group")
    exit_code = 4


class NotScheduled(PlaitError):
    """The message is not scheduled any more: it was delivered or cancelled."""

    code = "not_scheduled"
    facts = ("subject", "number")
    exit_code = 4


class TransactionNotFound(PlaitError):
    """The broker does not know the transaction: it was decided long ago and forgotten, or none of it is stored."""

    code = "transaction_not_found"
    facts = ("transaction",)
    exit_code = 4


class TransactionDecided(PlaitError):
    """The transaction was decided before, with the other outcome, or it takes no more messages."""

    code = "transaction_decided"
    facts = ("transaction", "outcome")
    exit_code = 5


class TransactionIncomplete(PlaitError):
    """Some messages of the transaction are not stored, so it cannot be committed; roll it back and begin another."""

    code = "transaction_incomplete"
    facts = ("transaction",)


class TransactionSpansGroups(PlaitError):
    """The subject has no partition on the broker group that has the other messages of the transaction."""

    code = "transaction_spans_groups"
    facts = ("subject", "group")
    exit_code = 5


class RecurrenceNotFound(PlaitError):
    """There is no recurrence of that name."""

    code = "recurrence_not_found"
    facts = ("name",)
    exit_code = 4


class RecurrenceExists(PlaitError):
    """A recurrence of that name exists already, with another definition."""

    code = "recurrence_exists"
    facts = ("name",)
    exit_code = 5


class GroupMismatch(PlaitError):
    """A consumer requests settings that differ from its group's; the message names both."""

    code = "group_mismatch"
    facts = ("subject", "group", "has", "asked")
    exit_code = 5


class GroupBusy(PlaitError):
    """The group has connected consumers, and the operation needs it idle."""

    code = "group_busy"
    facts = ("subject", "group")
    exit_code = 5


class RewindIncomplete(PlaitError):
    """A group was rewound in some partitions and not in others; repeat the rewind with the same position."""

    code = "rewind_incomplete"
    facts = ("subject", "group", "done", "failed")
    retryable = True


class LimitExceeded(PlaitError):
    """A limit of the server is reached (subjects, connections, groups...); the message names it."""

    code = "limit_exceeded"
    facts = ("limit", "value")
    exit_code = 6


class BufferFull(PlaitError):
    """The send buffer is full, so ``post`` accepted no message; wait with ``flush`` or use ``send``."""

    code = "buffer_full"
    facts = ("limit", "value")
    retryable = True


class Closed(PlaitError):
    """The client, consumer or reader was closed already."""

    code = "closed"


class ForkedClient(PlaitError):
    """A client that was opened before a fork is used in the child process."""

    code = "forked"


# --- refused by the server ---------------------------------------------------------------------
class FlowControl(PlaitError):
    """The broker is too busy; nothing was stored, and the client does not resend by itself."""

    code = "flow_control"
    retryable = True
    exit_code = 7


class RateLimited(FlowControl):
    """The subject is at its limit of messages or bytes a second; nothing was stored, and the client sends again."""

    code = "rate_limited"
    facts = ("subject", "seconds")


class ReadOnly(PlaitError):
    """The broker does not accept sends at present."""

    code = "read_only"
    retryable = True
    exit_code = 7


class DiskFull(PlaitError):
    """The disk is full, or its use is above a watermark; nothing was stored."""

    code = "disk_full"
    retryable = True
    exit_code = 7


class NoBroker(PlaitError):
    """No broker group is available for a new subject or partition."""

    code = "no_broker"
    retryable = True
    exit_code = 7


class MetaBusy(PlaitError):
    """Concurrent changes of the same record won every attempt; nothing was changed."""

    code = "meta_busy"
    retryable = True
    exit_code = 7


class StaleRoute(PlaitError):
    """The broker does not serve the partition, or not any more; refresh the route and retry."""

    code = "stale_route"
    retryable = True


class OutOfSequence(PlaitError):
    """A frame does not follow the last stored one of its producer; ``details['last']`` is its producer sequence."""

    code = "out_of_sequence"
    facts = ("last",)


class UnknownProducer(PlaitError):
    """The broker forgot the producer before it acknowledged this send; it is unknown whether the send is stored."""

    code = "unknown_producer"


class ProducerConflict(PlaitError):
    """Another process uses the same producer id: its rows have this send's sequences; nothing was stored."""

    code = "producer_conflict"


class StaleSession(PlaitError):
    """The session of the consumer ended: it lost contact, or attached elsewhere; attach again."""

    code = "stale_session"
    retryable = True


class Expired(PlaitError):
    """Retention has removed the requested sequences."""

    code = "expired"


class DataLost(PlaitError):
    """Messages that a reader has not read yet are gone, or other messages have their sequences."""

    code = "data_lost"


# --- connection --------------------------------------------------------------------------------
class Unavailable(PlaitError):
    """No server could be reached in time."""

    code = "unavailable"
    retryable = True
    exit_code = 3


class MetaUnavailable(PlaitError):
    """The meta server's database cannot be used at present; the request may be repeated."""

    code = "meta_unavailable"
    retryable = True
    exit_code = 3


class Timeout(PlaitError, TimeoutError):
    """No reply came in time; it is unknown whether the request took effect."""

    code = "timeout"
    retryable = True
    exit_code = 3


class ProtocolError(PlaitError):
    """The peer violated the protocol."""

    code = "protocol"
    exit_code = 3


class VersionMismatch(ProtocolError):
    """The two sides have no protocol or format version in common; nothing was changed."""

    code = "version_mismatch"


class InternalError(PlaitError):
    """A defect in a server or client; its log has the details. It is unknown whether the request took effect."""

    code = "internal"
    exit_code = 70


class FrameError(PlaitError):
    """The bytes are not a valid frame."""

    code = "frame_invalid"


class DataDirError(PlaitError):
    """The data directory cannot be used: another process has locked it, its format is newer, or it is not Plait's."""

    code = "data_dir"
    exit_code = 8


class DamageError(PlaitError):
    """Stored data is damaged; the message names the file and the place. Nothing was deleted."""

    code = "damaged"
    exit_code = 8


class StorageFailed(PlaitError):
    """A write or sync of a first-hand log failed; the server stops acknowledging and exits; a restart recovers."""

    code = "storage_failed"
    exit_code = 9


class ArchiveError(PlaitError):
    """An archive cannot be used: it is no archive, it is damaged, or it belongs to other data."""

    code = "archive"
    exit_code = 8


class ArchiveConflict(ArchiveError):
    """Two archivers changed one archive at the same time; the first change stands, and nothing is lost."""

    code = "archive_conflict"
    retryable = True
    exit_code = 5


def from_code(code: str, message: str, details: dict[str, Any] | None = None) -> PlaitError:
    """The exception for an error reply. An unknown code, from a newer server, becomes a plain ``PlaitError``."""
    return BY_CODE.get(code, PlaitError)(message, **(details or {}))
