"""``send_many``: columns straight into frames, a frame at a time, with the broker working meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from plait.client.delay import Dues
from plait.client.encoding import encode_body, encode_key
from plait.client.rows import hash_keys
from plait.client.types import PendingBatch, Receipts, ScheduledBatch
from plait.errors import InvalidArgument, TooLarge
from plait.frame.builder import build_frame
from plait.limits import BODY_SIZE_MAX, ClientLimits

if TYPE_CHECKING:
    from plait.client.producer import Producer

#: Rows looked at first, to learn how large they are.
SAMPLE_COUNT = 256


async def send_many(
    producer: Producer,
    subject: str,
    bodies: Sequence[Any] | pa.Array,
    keys: Sequence[str | int | None] | None,
    when: Callable[[int], Dues] | None = None,
) -> Receipts:
    """Store all bodies in order; the receipts once the broker has them.

    ``when`` says for so many rows when they are to be delivered. Raises the first error; the bodies before the one it
    is about may be stored.
    """
    if isinstance(bodies, pa.ChunkedArray):
        bodies = bodies.combine_chunks()
    if isinstance(bodies, str | bytes | bytearray):
        raise InvalidArgument("send_many takes a list of bodies; use send for one")
    total = len(bodies)
    if keys is not None and len(keys) != total:
        raise InvalidArgument(f"{len(keys)} keys do not fit {total} bodies")
    dues = None if when is None else when(total)
    queue = producer.queue(subject) if dues is None else producer.delayed_queue(subject)
    limits = producer.limits
    queue.seal()
    batches: list[PendingBatch] = []
    position = 0
    step = _rows_for(limits, _column(bodies, 0, min(total, SAMPLE_COUNT))) if total else 0
    while position < total:
        array = _column(bodies, position, min(position + step, total))
        count = len(array)
        size = _size(array)
        if size > 2 * limits.many_frame_bytes and count > 1:
            step = max(1, count // (1 + size // limits.many_frame_bytes))
            continue
        _refuse_large(array, size)
        if producer.buffered >= limits.buffer_bytes:
            await producer.room()
        if queue.full:
            await queue.wait_for_room()
        if producer.closed is not None:
            raise producer.closed
        texts = None if keys is None else [_key(key) for key in keys[position : position + count]]
        due = dues if dues is None or isinstance(dues, int) else dues[position : position + count]
        batch = PendingBatch() if due is None else ScheduledBatch(due)
        parts = build_frame(
            array,
            producer=producer.id,
            first=producer.take(count),
            previous=queue.last,
            send_time=producer.now(),
            deliver_at=due,
            keys=None if texts is None else pa.array(texts, pa.string()),
            key_hashes=None if texts is None else hash_keys(texts, count),
            compression=producer.compression,
        )
        batch.producer, batch.first, batch.count = parts.producer, parts.first, count
        batches.append(batch)
        producer.buffered += parts.size
        queue.push(parts, batch, parts.size)
        position += count
        step = _rows_for(limits, array)
        # The socket is served between frames.
        await asyncio.sleep(0)
    for batch in batches:
        await batch.wait()
    failed = next((batch for batch in batches if batch.error is not None), None)
    if failed is not None:
        assert failed.error is not None
        raise failed.error
    return Receipts(batches)


def _rows_for(limits: ClientLimits, sample: pa.Array) -> int:
    """Rows like these that make a frame."""
    return max(1, min(limits.many_frame_count, len(sample) * limits.many_frame_bytes // max(_size(sample), 1)))


def _column(bodies: Sequence[Any] | pa.Array, start: int, stop: int) -> pa.Array:
    if isinstance(bodies, pa.Array):
        return bodies.slice(start, stop - start)
    rows = bodies[start:stop]
    try:
        return pa.array(rows, pa.binary())
    except (pa.ArrowException, TypeError):
        return pa.array([encode_body(row) for row in rows], pa.binary())


def _size(array: pa.Array) -> int:
    """Bytes of the rows themselves; an array cut out of a larger one counts only its own."""
    if array.type not in (pa.binary(), pa.string()):
        return int(array.nbytes)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return int(offsets[-1] - offsets[0]) + 4 * len(array)


def _refuse_large(array: pa.Array, size: int) -> None:
    if size > BODY_SIZE_MAX and len(array) == 1:
        raise TooLarge(f"a body of {size} bytes is over the limit of {BODY_SIZE_MAX}; store it elsewhere")


def _key(key: str | int | None) -> str:
    if type(key) is str and 0 < len(key) < 256 and key.isascii():
        return key
    return "" if key is None else encode_key(key)
