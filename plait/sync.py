"""Plait for blocking code: the API of ``plait`` without await, safe to use from any thread.

``post`` returns a ticket whose ``result()`` waits for the receipt; a consumer is iterated with a plain ``for``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from plait.client.blocking.blocking_client import SyncAdmin as Admin
from plait.client.blocking.blocking_client import SyncClient as Client
from plait.client.blocking.blocking_consumer import SyncArrowBatch as ArrowBatch
from plait.client.blocking.blocking_consumer import SyncBatch as Batch
from plait.client.blocking.blocking_consumer import SyncConsumer as Consumer
from plait.client.blocking.blocking_consumer import SyncReader as Reader
from plait.client.blocking.blocking_transaction import SyncTransaction as Transaction
from plait.client.blocking.post_inbox import SyncTicket as Ticket
from plait.client.client import DEFAULT_ADDRESS
from plait.client.read.query import QueryResult
from plait.client.requests.requesting import DEFAULT_REPLY_SUBJECT
from plait.client.types import Message, MessageId, PartitionName, Receipt, Receipts
from plait.limits import ClientLimits

__all__ = [
    "Admin",
    "ArrowBatch",
    "Batch",
    "Client",
    "ClientLimits",
    "Consumer",
    "Message",
    "MessageId",
    "PartitionName",
    "QueryResult",
    "Reader",
    "Receipt",
    "Receipts",
    "Ticket",
    "Transaction",
    "connect",
]


def connect(
    address: str | Sequence[str] = DEFAULT_ADDRESS,
    *,
    client_id: str | None = None,
    compression: Literal["zstd", "lz4"] | None = None,
    limits: ClientLimits | None = None,
    spool: str | os.PathLike[str] | None = None,
    reply_subject: str = DEFAULT_REPLY_SUBJECT,
) -> Client:
    """A client for ``with``. The arguments are those of ``plait.connect``."""
    return Client(
        address,
        client_id=client_id,
        compression=compression,
        limits=limits,
        spool=spool,
        reply_subject=reply_subject,
    )
