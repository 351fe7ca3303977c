"""Plait: a durable message queue for Python teams.

``connect`` for asynchronous code, ``plait.sync`` for blocking code, ``App`` for handlers.
"""

from typing import TYPE_CHECKING

from plait.errors import (
    BufferFull,
    Closed,
    CodecError,
    DamageError,
    DataDirError,
    DataLost,
    DeadLetterNotFound,
    DiskFull,
    Expired,
    FlowControl,
    ForkedClient,
    FrameError,
    GroupBusy,
    GroupMismatch,
    GroupNotFound,
    InvalidArgument,
    InvalidFilter,
    InvalidName,
    KeyNotParked,
    LimitExceeded,
    MetaBusy,
    MetaUnavailable,
    NoBroker,
    NotScheduled,
    OutOfSequence,
    PlaitError,
    ProducerConflict,
    ProtocolError,
    RateLimited,
    ReadOnly,
    RecurrenceExists,
    RecurrenceNotFound,
    RewindIncomplete,
    StaleRoute,
    StaleSession,
    StorageFailed,
    SubjectExists,
    SubjectNotFound,
    Timeout,
    TooLarge,
    TransactionDecided,
    TransactionIncomplete,
    TransactionNotFound,
    TransactionSpansGroups,
    Unavailable,
    UnknownProducer,
    VersionMismatch,
)
from plait.limits import ClientLimits
from plait.model.filter_terms import TagFilter
from plait.model.rate import Rate
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.version import VERSION as __version__

__all__ = [
    "Admin",
    "AllocationInfo",
    "App",
    "ArrowBatch",
    "Batch",
    "BrokerInfo",
    "BufferFull",
    "Client",
    "ClientLimits",
    "Closed",
    "CodecError",
    "Consumer",
    "ConsumerInfo",
    "DamageError",
    "DataDirError",
    "DataLost",
    "DeadHistory",
    "DeadLetter",
    "DeadLetterNotFound",
    "DeadQueue",
    "DeadReason",
    "DelayLevel",
    "DiskFull",
    "Expired",
    "Explanation",
    "FlowControl",
    "ForkedClient",
    "FrameError",
    "GroupBusy",
    "GroupInfo",
    "GroupMismatch",
    "GroupNotFound",
    "HalfMessage",
    "InvalidArgument",
    "InvalidFilter",
    "InvalidName",
    "KeyNotParked",
    "LimitExceeded",
    "LostPartition",
    "MemberShare",
    "Message",
    "MessageId",
    "MetaBusy",
    "MetaUnavailable",
    "NoBroker",
    "NotScheduled",
    "OutOfSequence",
    "Outgoing",
    "ParkedKey",
    "PartitionName",
    "PartitionShare",
    "PlaitError",
    "ProducerConflict",
    "ProtocolError",
    "QueryResult",
    "Rate",
    "RateLimited",
    "ReadOnly",
    "Reader",
    "Reason",
    "Receipt",
    "Receipts",
    "Recurrence",
    "RecurrenceExists",
    "RecurrenceNotFound",
    "Reject",
    "RequestFailed",
    "RequestTimeout",
    "Retry",
    "RetryLater",
    "Rewind",
    "RewindIncomplete",
    "RouteInfo",
    "ScheduleCount",
    "ScheduledMessage",
    "StaleRoute",
    "StaleSession",
    "StorageFailed",
    "SubjectDetails",
    "SubjectExists",
    "SubjectInfo",
    "SubjectNotFound",
    "Suspend",
    "TagFilter",
    "Ticket",
    "Timeout",
    "TooLarge",
    "Transaction",
    "TransactionDecided",
    "TransactionIncomplete",
    "TransactionInfo",
    "TransactionNotFound",
    "TransactionSpansGroups",
    "Unavailable",
    "UnknownProducer",
    "VersionMismatch",
    "WhyEvent",
    "__version__",
    "connect",
]

if TYPE_CHECKING:
    from plait.client.admin.admin import (
        Admin,
        AllocationInfo,
        MemberShare,
        PartitionShare,
        RouteInfo,
    )
    from plait.client.admin.dead_letter_admin import DeadHistory, DeadLetter, DeadReason
    from plait.client.admin.parked_key_admin import ParkedKey
    from plait.client.admin.recurrence_admin import Recurrence
    from plait.client.admin.rewind_admin import Rewind
    from plait.client.admin.schedule_admin import ScheduleCount, ScheduledMessage
    from plait.client.app.app import App, Outgoing
    from plait.client.app.subscription import Reject, RetryLater, Suspend
    from plait.client.client import Client, connect
    from plait.client.consume.consumer import ArrowBatch, Batch, Consumer
    from plait.client.read.explanation import Explanation, WhyEvent
    from plait.client.read.query import QueryResult
    from plait.client.read.reader import Reader
    from plait.client.requests.request_errors import RequestFailed, RequestTimeout
    from plait.client.send.encoding import DelayLevel
    from plait.client.transactions.transaction import Transaction
    from plait.client.transactions.transaction_info import HalfMessage, TransactionInfo
    from plait.client.types import Message, MessageId, PartitionName, Receipt, Receipts, Ticket
    from plait.wire.admin.cluster import BrokerInfo, LostPartition
    from plait.wire.admin.dead_letters import DeadQueue
    from plait.wire.admin.subjects import ConsumerInfo, GroupInfo, SubjectDetails, SubjectInfo
else:
    # NumPy and Arrow take most of the time of an import: what needs them is loaded when it is first asked for.
    _LATER = {
        "plait.client.app.app": "App Outgoing",
        "plait.client.client": "Client connect",
        "plait.client.admin.admin": "Admin AllocationInfo MemberShare PartitionShare RouteInfo",
        "plait.client.consume.consumer": "ArrowBatch Batch Consumer",
        "plait.client.admin.dead_letter_admin": "DeadHistory DeadLetter DeadReason",
        "plait.client.requests.request_errors": "RequestFailed RequestTimeout",
        "plait.client.send.encoding": "DelayLevel",
        "plait.client.app.subscription": "Reject RetryLater Suspend",
        "plait.client.admin.parked_key_admin": "ParkedKey",
        "plait.client.read.explanation": "Explanation WhyEvent",
        "plait.client.read.query": "QueryResult",
        "plait.client.read.reader": "Reader",
        "plait.client.admin.rewind_admin": "Rewind",
        "plait.client.admin.recurrence_admin": "Recurrence",
        "plait.client.admin.schedule_admin": "ScheduleCount ScheduledMessage",
        "plait.client.transactions.transaction": "Transaction",
        "plait.client.transactions.transaction_info": "HalfMessage TransactionInfo",
        "plait.client.types": "Message MessageId PartitionName Receipt Receipts Ticket",
        "plait.wire.admin.cluster": "BrokerInfo LostPartition",
        "plait.wire.admin.dead_letters": "DeadQueue",
        "plait.wire.admin.subjects": "ConsumerInfo GroupInfo SubjectDetails SubjectInfo",
    }
    _MODULES = {name: module for module, names in _LATER.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        import importlib

        if name == "sync":
            # Blocking callers may write ``import plait`` too.
            value = importlib.import_module("plait.sync")
        elif name in _MODULES:
            value = getattr(importlib.import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, "sync"})
