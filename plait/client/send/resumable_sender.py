"""Sending that another process can go on with, so that a resend after its end stores nothing twice.

A client numbers what it sends, and brokers know a number again; the numbers die with the process. Here they are the
caller's: he is told them before rows leave, writes them down, and whoever comes after him sends the same rows under the
same numbers. A broker that has them says so and stores nothing.

That holds as long as the same rows go to the same partitions, which ``Prepared.digest`` shows, and as long as brokers
remember a producer that is silent, which is a week. So no row goes elsewhere because its broker is away or takes
nothing: it waits, and fails when its time is over, whatever the subject's order.
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
    """The numbers that the next rows get."""

    producer: int
    next: int
    #: The send time of the next rows: a broker knows a frame again by its checksum, so a resend has to be the same.
    send_time: int = 0
    #: Partition, as ``name@group`` → the number of the last row that is stored there.
    last: dict[str, int] = {}


class OutgoingRows(NamedTuple):
    """Rows to be sent, a few frames' worth; columns of equal length."""

    bodies: pa.Array
    #: "": none.
    keys: Sequence[str]
    #: Encoded, empty where there are none.
    tags: Sequence[bytes]
    headers: Sequence[bytes]
    #: What tells each row apart; one without a key goes to a partition by it.
    ids: Sequence[str]


class Prepared(NamedTuple):
    """Rows and where they are about to go."""

    rows: OutgoingRows
    pieces: Pieces
    hashes: Hashes
    #: The same for the same rows on the same ways.
    digest: str


class ResumableSender:
    """Sends to one subject; the client sends nothing else meanwhile."""

    def __init__(self, client: Client, subject: str) -> None:
        self._node = client._node
        self._producer = client._producer
        self._outlet = self._producer.outlet(subject)
        self._outlet.pinned = True
        self._send_time = 0

    async def open(self) -> None:
        """Find out where the subject's rows go."""
        await self._outlet.ready()

    @property
    def servers(self) -> list[str]:
        """The addresses that its client was given, and those of the same cluster that it has learned of."""
        return list(self._node.addresses)

    @property
    def position(self) -> SendPosition:
        """To be written down before rows leave."""
        last = {str(queue.name): queue.last for queue in self._outlet.queues() if queue.name is not None and queue.last}
        return SendPosition(self._producer.id, self._producer.next, self._send_time, last)

    def go_on(self, position: SendPosition) -> None:
        """The next rows get these numbers; before any were sent."""
        self._producer.id, self._producer.next = position.producer, position.next
        self._send_time = position.send_time
        for queue in self._outlet.queues():
            queue.last = position.last.get(str(queue.name), 0)

    def prepare(self, rows: OutgoingRows) -> Prepared:
        """Decide where rows go, and when they are sent; nothing is sent yet."""
        self._send_time = self._producer.now()
        count = len(rows.ids)
        hashes = hash_keys(rows.keys, count)
        # By chance would do for rows without keys, if it fell twice the same way.
        ways = np.where(hashes == NO_KEY_HASH, hash_keys(rows.ids, count), hashes)
        pieces = self._outlet.spread(ways)
        parts = [f"{queue.name}:{count if chosen is None else len(chosen)}" for queue, chosen in pieces]
        digest = xxh3_64_intdigest("\n".join([*parts, *rows.ids]).encode())
        return Prepared(rows, pieces, hashes, f"{digest:016x}")

    async def send(self, prepared: Prepared) -> None:
        """Store the rows, in order; raises the first error. Nothing may be awaited between ``prepare`` and this."""
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
