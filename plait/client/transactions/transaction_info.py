"""What users see of a transaction that is not decided: in checks, listings, and ``plait transactions show``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from plait.client.arguments import to_datetime
from plait.client.send.encoding import decode_tags
from plait.client.types import HeaderValue, MessageId
from plait.frame.columns import Column
from plait.frame.header_block import decode_headers
from plait.frame.view import FrameView
from plait.limits import HALF_MESSAGES_SHOWN_MAX
from plait.model.transaction_row import TransactionRow


class HalfMessage(msgspec.Struct, frozen=True):
    """A message of a transaction that is not committed; consumers do not get it."""

    subject: str
    body: bytes
    key: str | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    message_id: MessageId
    send_time: datetime | None
    #: The due time that the sender asked for; None: the message is not delayed.
    deliver_at: datetime | None


class TransactionInfo(msgspec.Struct, frozen=True):
    """A transaction that waits for its outcome."""

    #: ``Transaction.id`` of the producer that began it.
    id: str
    producer_group: str
    #: "open"; "parked": no producer is asked again; "committed": not all messages are published yet.
    state: str
    begun: datetime
    #: How often a producer was asked for the outcome.
    checks: int
    #: The number of its messages, and the bytes that they take.
    count: int
    size: int
    subjects: list[str]
    #: The broker group that has it.
    group: str
    #: Its first messages, in the order in which they were sent; empty in a listing.
    messages: list[HalfMessage] = []


def info_of(row: TransactionRow, group: str) -> TransactionInfo:
    """The transaction of a broker group."""
    messages = [message for subject, frame in row.frames for message in _messages(subject, FrameView(frame).verify())]
    return TransactionInfo(
        transaction_name(row.id),
        row.producer_group,
        row.state,
        to_datetime(row.begun),
        row.checks,
        row.rows,
        row.size,
        row.subjects,
        group,
        messages[:HALF_MESSAGES_SHOWN_MAX],
    )


def transaction_name(number: int) -> str:
    """The id of a transaction as text."""
    return f"{number:016x}"


def _messages(subject: str, frame: FrameView) -> Iterator[HalfMessage]:
    bodies = frame.binary(Column.BODY).to_pylist()
    nothing = [b""] * len(bodies)
    keys, tags, headers = (
        frame.binary(column).to_pylist() if frame.has(column) else nothing
        for column in (Column.KEY, Column.TAGS, Column.HEADERS)
    )
    sent, due = (
        frame.fixed(column).tolist() if frame.has(column) else [0] * len(bodies)
        for column in (Column.SEND_TIME, Column.DELIVER_AT)
    )
    for row, body in enumerate(bodies):
        yield HalfMessage(
            subject,
            body,
            keys[row].decode() or None,
            decode_tags(tags[row]),
            decode_headers(headers[row]),
            MessageId(frame.producer, frame.first + row),
            to_datetime(sent[row]) if sent[row] else None,
            to_datetime(due[row]) if due[row] else None,
        )
