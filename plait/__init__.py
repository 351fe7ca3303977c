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
    ReadOnly,
    StaleRoute,
    StaleSession,
    StorageFailed,
    SubjectExists,
    SubjectNotFound,
    Timeout,
    TooLarge,
    Unavailable,
    UnknownProducer,
    VersionMismatch,
)
from plait.limits import ClientLimits
from plait.reason import Reason
from plait.retry import Retry
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
    "FlowControl",
    "ForkedClient",
    "FrameError",
    "GroupBusy",
    "GroupInfo",
    "GroupMismatch",
    "GroupNotFound",
    "InvalidArgument",
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
    "ReadOnly",
    "Reader",
    "Reason",
    "Receipt",
    "Receipts",
    "Reject",
    "Retry",
    "RetryLater",
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
    "Ticket",
    "Timeout",
    "TooLarge",
    "Unavailable",
    "UnknownProducer",
    "VersionMismatch",
    "__version__",
    "connect",
]

if TYPE_CHECKING:
    from plait.client.admin import Admin, ConsumerInfo, GroupInfo, SubjectDetails, SubjectInfo
    from plait.client.app import App
    from plait.client.batch import ArrowBatch, Batch
    from plait.client.client import Client, connect
    from plait.client.cluster import AllocationInfo, BrokerInfo, LostPartition, MemberShare, PartitionShare, RouteInfo
    from plait.client.consumer import Consumer
    from plait.client.dead import DeadHistory, DeadLetter, DeadQueue, DeadReason
    from plait.client.delay import DelayLevel
    from plait.client.outcomes import Reject, RetryLater, Suspend
    from plait.client.outgoing import Outgoing
    from plait.client.parked import ParkedKey
    from plait.client.reader import Reader
    from plait.client.schedule import ScheduleCount, ScheduledMessage
    from plait.client.types import Message, MessageId, PartitionName, Receipt, Receipts, Ticket
else:
    # NumPy and Arrow take most of the time of an import: what needs them is loaded when it is first asked for.
    _LATER = {
        "plait.client.admin": "Admin ConsumerInfo GroupInfo SubjectDetails SubjectInfo",
        "plait.client.app": "App",
        "plait.client.batch": "ArrowBatch Batch",
        "plait.client.client": "Client connect",
        "plait.client.cluster": "AllocationInfo BrokerInfo LostPartition MemberShare PartitionShare RouteInfo",
        "plait.client.consumer": "Consumer",
        "plait.client.dead": "DeadHistory DeadLetter DeadQueue DeadReason",
        "plait.client.delay": "DelayLevel",
        "plait.client.outcomes": "Reject RetryLater Suspend",
        "plait.client.outgoing": "Outgoing",
        "plait.client.parked": "ParkedKey",
        "plait.client.reader": "Reader",
        "plait.client.schedule": "ScheduleCount ScheduledMessage",
        "plait.client.types": "Message MessageId PartitionName Receipt Receipts Ticket",
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
