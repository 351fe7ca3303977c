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
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from plait.client.client import Client
from plait.client.send.open_rows import hash_keys
from plait.client.send.subject_sender import Pieces, split_batch
from plait.client.types import PendingBatch
from plait.frame.builder import build_frame
from plait.model.logical_partitions import NO_KEY_HASH, Hashes


class SendPosition(msgspec.Struct, frozen=True):
    """The state of a resumable sender: the numbers of the next rows."""

    producer: int
    next: int
    #: The send time of the next rows. A broker recognizes a frame by its checksum, so a resend must be identical.
    send_time: int = 0
    #: Partition as ``name@group`` → the producer sequence of the last row sent to it.
    last: dict[str, int] = {}


class OutgoingRows(NamedTuple):
    """Rows to send, enough for a few frames, as columns of equal length."""

    bodies: pa.Array
    #: "" for a row without a key.
    keys: Sequence[str]
    #: Encoded; empty for a row without tags, and likewise for headers.
    tags: Sequence[bytes]
    headers: Sequence[bytes]
    #: Unique for each row; the id chooses the partition of a row without a key.
    ids: Sequence[str]


class Prepared(NamedTuple):
    """Rows and the partitions that they are to be sent to."""

    rows: OutgoingRows
    pieces: Pieces
    hashes: Hashes
    #: Equal for the same rows and the same partitions.
    digest: str


class ResumableSender:
    """Sends to one subject. Its client must not send anything else."""

    def __init__(self, client: Client, subject: str) -> None:
        self._node = client._node
        self._producer = client._producer
        self._sender = self._producer.subject_sender(subject)
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
        last = {str(queue.name): queue.last for queue in self._sender.queues() if queue.name is not None and queue.last}
        return SendPosition(self._producer.id, self._producer.next, self._send_time, last)

    def resume_at(self, position: SendPosition) -> None:
        """Restore a saved state. Call it before rows are sent."""
        self._producer.id, self._producer.next = position.producer, position.next
        self._send_time = position.send_time
        for queue in self._sender.queues():
            queue.last = position.last.get(str(queue.name), 0)

    def prepare(self, rows: OutgoingRows) -> Prepared:
        """Choose the partitions and the send time of rows, without sending them."""
        self._send_time = self._producer.now()
        count = len(rows.ids)
        hashes = hash_keys(rows.keys, count)
        # A row without a key could go to any partition, but a resend must choose the same one: hash its id.
        ways = np.where(hashes == NO_KEY_HASH, hash_keys(rows.ids, count), hashes)
        pieces = self._sender.spread(ways)
        parts = [f"{queue.name}:{count if chosen is None else len(chosen)}" for queue, chosen in pieces]
        digest = xxh3_64_intdigest("\n".join([*parts, *rows.ids]).encode())
        return Prepared(rows, pieces, hashes, f"{digest:016x}")

    async def send(self, prepared: Prepared) -> None:
        """Store the rows in order; raises the first error. The caller must not await between ``prepare`` and this."""
        batch = PendingBatch()
        batch.count = len(prepared.rows.ids)
        pieces = prepared.pieces
        batches = [batch] if len(pieces) == 1 else split_batch(batch, [chosen for _, chosen in pieces])
        for (queue, chosen), part in zip(pieces, batches, strict=True):
            rows, hashes = _take(prepared, chosen)
            keyed = any(rows.keys)
            count = len(rows.ids)
            parts = build_frame(
                rows.bodies,
                producer=self._producer.id,
                first=self._producer.take(count),
                previous=queue.last,
                send_time=self._send_time,
                keys=pa.array(rows.keys, pa.string()) if keyed else None,
                key_hashes=hashes if keyed else None,
                tags=rows.tags if any(rows.tags) else None,
                headers=rows.headers if any(rows.headers) else None,
                compression=self._producer.compression,
            )
            part.producer, part.first, part.count = parts.producer, parts.first, count
            self._producer.buffered += parts.size
            queue.push(parts, part, parts.size)
        await batch.wait()
        if batch.error is not None:
            raise batch.error


def _take(prepared: Prepared, chosen: np.ndarray[tuple[int], np.dtype[np.int64]] | None) -> tuple[OutgoingRows, Hashes]:
    rows = prepared.rows
    if chosen is None:
        return rows, prepared.hashes
    numbers = chosen.tolist()
    return (
        OutgoingRows(
            rows.bodies.take(pa.array(numbers, pa.int64())),
            [rows.keys[number] for number in numbers],
            [rows.tags[number] for number in numbers],
            [rows.headers[number] for number in numbers],
            [rows.ids[number] for number in numbers],
        ),
        prepared.hashes[chosen],
    )
