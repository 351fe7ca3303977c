"""Plait for blocking code: the API of ``plait`` without await, safe to use from any thread.

``post`` returns a ticket whose ``result()`` waits for the receipt; a consumer is iterated with a plain ``for``.
"""

from plait.client.blocking.blocking_admin import Admin
from plait.client.blocking.blocking_client import Client, connect
from plait.client.blocking.blocking_consumer import ArrowBatch, Batch, Consumer
from plait.client.blocking.blocking_reader import Reader
from plait.client.send.post_inbox import Ticket
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
    "Reader",
    "Receipt",
    "Receipts",
    "Ticket",
    "connect",
]
