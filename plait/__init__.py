"""Plait: a durable message queue for Python teams.

``connect`` for asynchronous code, ``plait.sync`` for blocking code, ``App`` for handlers.
"""

import typing

from plait.client.admin import Admin, ConsumerInfo, GroupInfo, SubjectDetails, SubjectInfo
from plait.client.app import App
from plait.client.batch import ArrowBatch, Batch
from plait.client.client import Client, connect
from plait.client.cluster import AllocationInfo, BrokerInfo, MemberShare, PartitionShare, RouteInfo
from plait.client.consumer import Consumer
from plait.client.dead import DeadHistory, DeadLetter, DeadQueue, DeadReason
from plait.client.delay import DelayLevel
from plait.client.outcomes import Reject, RetryLater, Suspend
from plait.client.outgoing import Outgoing
from plait.client.parked import ParkedKey
from plait.client.reader import Reader
from plait.client.schedule import ScheduleCount, ScheduledMessage
from plait.client.types import Message, MessageId, PartitionName, Receipt, Receipts, Ticket
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

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Blocking callers may write ``import plait`` too; who does not, does not load it.
        if name == "sync":
            import importlib

            return importlib.import_module("plait.sync")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
