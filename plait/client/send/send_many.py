"""``send_many``: columns straight into frames, a frame at a time, with the broker working meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from plait.client.send.due_time import Dues
from plait.client.send.encoding import encode_body, encode_headers, encode_key, encode_tags
from plait.client.send.open_rows import hash_keys
from plait.client.send.partitioner import Partitioner
from plait.client.send.regroup import Rows
from plait.client.send.subject_sender import Pieces, SubjectSender, split_batch
from plait.client.types import PendingBatch, Receipts, ScheduledBatch
from plait.errors import InvalidArgument, TooLarge
from plait.frame.builder import build_frame
from plait.limits import BODY_SIZE_MAX
from plait.model.logical_partitions import Hashes

if TYPE_CHECKING:
    from plait.client.send.producer import Producer

#: Of all rows, or of each.
Tags = str | Iterable[str] | Sequence[Iterable[str] | None]
Headers = Mapping[str, str | int | float | bool] | Sequence[Mapping[str, str | int | float | bool] | None]

#: Rows looked at first, to learn how large they are.
SAMPLE_COUNT = 256
#: Frames' worth of rows that are taken together, where they are spread over partitions: all may go to the same one.
SPREAD_MAX = 4


async def send_many(
    producer: Producer,
    subject: str,
    bodies: Sequence[Any] | pa.Array,
    keys: Sequence[str | int | None] | None,
    when: Callable[[int], Dues] | None = None,
    tags: Tags | None = None,
    headers: Headers | None = None,
) -> Receipts:
    """Store all bodies in order; the receipts once the broker has them.

    ``tags`` and ``headers`` are for all rows, or one a row. ``when`` says for so many rows when they are to be
    delivered. Raises the first error; the bodies before the one it is about may be stored.
    """
    if isinstance(bodies, pa.ChunkedArray):
        bodies = bodies.combine_chunks()
    if isinstance(bodies, str | bytes | bytearray):
        raise InvalidArgument("send_many takes a list of bodies; use send for one")
    total = len(bodies)
    if keys is not None and len(keys) != total:
        raise InvalidArgument(f"{len(keys)} keys do not fit {total} bodies")
    labels = _Encoded(tags, encode_tags, _is_one_tags, "tags", total)
    properties = _Encoded(headers, encode_headers, lambda given: isinstance(given, Mapping), "headers", total)
    dues = None if when is None else when(total)
    outlet = producer.outlet(subject, delayed=dues is not None)
    limits = producer.limits
    outlet.seal()
    batches: list[PendingBatch] = []
    position = 0
    step = _rows_for(outlet, _column(bodies, 0, min(total, SAMPLE_COUNT))) if total else 0
    while position < total:
        array = _column(bodies, position, min(position + step, total))
        count = len(array)
        tagged, described = labels.rows(position, count), properties.rows(position, count)
        size = _size(array) + sum(map(len, tagged or ())) + sum(map(len, described or ()))
        if size > 2 * limits.many_frame_bytes * _lanes(outlet) and count > 1:
            step = max(1, count // (1 + size // (limits.many_frame_bytes * _lanes(outlet))))
            continue
        _refuse_large(array, _size(array))
        if producer.buffered >= producer.buffer_bytes:
            await producer.room()
        texts = None if keys is None else [_key(key) for key in keys[position : position + count]]
        hashes = None if texts is None else hash_keys(texts, count)
        pieces = await _room(producer, outlet, hashes)
        due = dues if dues is None or isinstance(dues, int) else dues[position : position + count]
        batch = PendingBatch() if due is None else ScheduledBatch(due)
        texts_column = None if texts is None else pa.array(texts, pa.string())
        columns = Columns(array, texts_column, hashes, due, _bytes_column(tagged), _bytes_column(described))
        batches.append(batch)
        _push(producer, pieces, columns, batch)
        position += count
        step = _rows_for(outlet, array, size)
        # The socket is served between frames.
        await asyncio.sleep(0)
    for batch in batches:
        await batch.wait()
    failed = next((batch for batch in batches if batch.error is not None), None)
    if failed is not None:
        assert failed.error is not None
        raise failed.error
    return Receipts(batches)


class Columns(NamedTuple):
    """Rows on their way into frames."""

    bodies: pa.Array
    keys: pa.Array | None
    hashes: Hashes | None
    dues: Dues | None
    tags: pa.Array | None = None
    headers: pa.Array | None = None

    def take(self, rows: Rows) -> Columns:
        """Some of them."""
        index = pa.array(rows)
        return Columns(
            self.bodies.take(index),
            None if self.keys is None else self.keys.take(index),
            None if self.hashes is None else self.hashes[rows],
            self.dues if self.dues is None or isinstance(self.dues, int) else self.dues[rows],
            None if self.tags is None else self.tags.take(index),
            None if self.headers is None else self.headers.take(index),
        )


class _Encoded:
    """Tags or headers of rows: one for all of them, or one a row."""

    def __init__(
        self,
        given: Any,
        encode: Callable[[Any], bytes],
        is_one: Callable[[Any], bool],
        name: str,
        total: int,
    ) -> None:
        self._encode, self._name = encode, name
        self._one: bytes | None = None
        self._each: Sequence[Any] | None = None
        if given is None:
            return
        if is_one(given):
            self._one = encode(given)
        elif not isinstance(given, Sequence) or len(given) != total:
            found = f"{len(given)}" if isinstance(given, Sequence) else f"a {type(given).__name__}"
            raise InvalidArgument(f"{name} for {total} bodies: give one for all, or a list of one a row, not {found}")
        else:
            self._each = given

    def rows(self, start: int, count: int) -> list[bytes] | None:
        """The encoded values of some rows; None: none has any."""
        if self._one is not None:
            return [self._one] * count
        if self._each is None:
            return None
        try:
            return [self._encode(each) for each in self._each[start : start + count]]
        except (AttributeError, TypeError) as error:
            raise InvalidArgument(f"{self._name} of rows {start} to {start + count - 1}: {error}") from None


def _is_one_tags(given: Any) -> bool:
    """Text, or texts: the tags of every row. Lists of texts are one a row."""
    return isinstance(given, str) or (isinstance(given, Sequence) and all(isinstance(each, str) for each in given))


def _bytes_column(rows: list[bytes] | None) -> pa.Array | None:
    return None if rows is None else pa.array(rows, pa.binary())


async def _room(producer: Producer, outlet: SubjectSender, hashes: Hashes | None) -> Pieces:
    """Where rows with these hashes go, once there is room in all of those queues."""
    while True:
        if producer.closed is not None:
            raise producer.closed
        pieces = outlet.spread(hashes)
        full = next((queue for queue, _ in pieces if queue.full), None)
        if full is None:
            return pieces
        await full.wait_for_room()


def _push(producer: Producer, pieces: Pieces, columns: Columns, batch: PendingBatch) -> None:
    """A frame for each piece."""
    batch.count = len(columns.bodies)
    batches = [batch] if len(pieces) == 1 else split_batch(batch, [rows for _, rows in pieces])
    for (queue, rows), part in zip(pieces, batches, strict=True):
        # Rows that were added while this call waited for room come first, as their calls did.
        queue.seal()
        bodies, keys, hashes, dues, tags, headers = columns if rows is None else columns.take(rows)
        count = len(bodies)
        parts = build_frame(
            bodies,
            producer=producer.id,
            first=producer.take(count),
            previous=queue.last,
            send_time=producer.now(),
            deliver_at=dues,
            keys=keys,
            key_hashes=hashes,
            tags=tags,
            headers=headers,
            compression=producer.compression,
        )
        part.producer, part.first, part.count = parts.producer, parts.first, count
        producer.buffered += parts.size
        queue.push(parts, part, parts.size)


def _lanes(outlet: SubjectSender) -> int:
    """Frames that rows are spread over, about; more than a few do not make one step larger."""
    return min(len(outlet.entry.queues), SPREAD_MAX) if isinstance(outlet.entry, Partitioner) else 1


def _rows_for(outlet: SubjectSender, sample: pa.Array, size: int | None = None) -> int:
    """Rows like these that make a frame, or one for each of the partitions."""
    limits, lanes = outlet.producer.limits, _lanes(outlet)
    count = len(sample) * limits.many_frame_bytes // max(_size(sample) if size is None else size, 1)
    return max(1, min(limits.many_frame_count, count) * lanes)


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
        raise TooLarge(
            f"a body of {size} bytes is over the limit of {BODY_SIZE_MAX}; store it elsewhere",
            limit="BODY_SIZE_MAX",
            value=BODY_SIZE_MAX,
            size=size,
        )


def _key(key: str | int | None) -> str:
    if type(key) is str and 0 < len(key) < 256 and key.isascii():
        return key
    return "" if key is None else encode_key(key)
