"""A sender whose state is saved, so that another process can resend without storing anything twice.

A client numbers its rows, and brokers recognize a number that they have stored; normally the numbers are lost with the
process. This sender returns its numbers to the caller (``position``), which saves them before rows are sent. After a
crash the next process sends the same rows with the same numbers, and a broker that has them stores nothing.

This works only if the same rows go to the same partitions, which the caller checks with ``Prepared.digest``, and only
while brokers remember an idle producer, which is a week. Rows therefore never move to another partition because their
broker is down or refuses them: they wait, and fail after ``send_seconds``, for every order strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from plait.client.client import Client
from plait.client.send.open_rows import hash_keys
from plait.client.send.partitioner import Pieces
from plait.client.send.resend_window import PendingBatch
from plait.client.send.row_columns import RowColumns
from plait.model.logical_partitions import NO_KEY_HASH


class SendPosition(msgspec.Struct, frozen=True):
    """The state of a resumable sender: the numbers of the next rows."""

    producer: int
    next: int
    #: The send time of the next rows. A broker recognizes a frame by its checksum, so a resend must be identical.
    send_time: int = 0
    #: Partition as ``name@group`` → the producer sequence of the last row sent to it.
    last: dict[str, int] = {}


class Prepared(NamedTuple):
    """Rows and the partitions that they are to be sent to."""

    rows: RowColumns
    pieces: Pieces
    #: Equal for the same rows and the same partitions.
    digest: str


class ResumableSender:
    """Sends to one subject. Its client must not send anything else."""

    def __init__(self, client: Client, subject: str) -> None:
        self._node = client._node
        self._producer = client._producer
        self._sender = client._senders.sender(subject)
        self._sender.pinned = True
        self._send_time = 0

    async def open(self) -> None:
        """Get the route of the subject."""
        await self._sender.ready()

    @property
    def servers(self) -> list[str]:
        """The addresses that the client was given, and the other addresses of the cluster that it knows."""
        return list(self._node.addresses)

    @property
    def position(self) -> SendPosition:
        """The state to save before rows are sent."""
        last = {str(each.target.name): each.window.last for each in self._sender.senders() if each.window.last}
        return SendPosition(self._producer.id, self._producer.next, self._send_time, last)

    def resume_at(self, position: SendPosition) -> None:
        """Restore a saved state. Call it before rows are sent."""
        self._producer.id, self._producer.next = position.producer, position.next
        self._send_time = position.send_time
        for each in self._sender.senders():
            each.window.last = position.last.get(str(each.target.name), 0)

    def prepare(self, rows: RowColumns, ids: Sequence[str]) -> Prepared:
        """Choose the partitions and the send time of rows, enough for a few frames, without sending them.

        ``ids`` are unique for each row; the id chooses the partition of a row without a key.
        """
        self._send_time = self._producer.now()
        # A row without a key could go to any partition, but a resend must choose the same one: hash its id.
        ways = hash_keys(ids, len(ids))
        if rows.hashes is not None:
            ways = np.where(rows.hashes == NO_KEY_HASH, ways, rows.hashes)
        pieces = self._sender.spread(ways)
        parts = [f"{each.target.name}:{len(ids) if chosen is None else len(chosen)}" for each, chosen in pieces]
        digest = xxh3_64_intdigest("\n".join([*parts, *ids]).encode())
        return Prepared(rows, pieces, f"{digest:016x}")

    async def send(self, prepared: Prepared) -> None:
        """Store the rows in order; raises the first error. The caller must not await between ``prepare`` and this."""
        batch = PendingBatch()
        self._sender.push(prepared.pieces, prepared.rows, batch, self._send_time)
        await batch.wait()
        if batch.error is not None:
            raise batch.error
