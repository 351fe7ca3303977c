"""``send_many``: builds frames from columns, and builds the next frame while the broker stores the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from plait.client.send.encoding import (
    Dues,
    body_too_large,
    encode_body,
    encode_group,
    encode_headers,
    encode_key,
    encode_tags,
    priorities_of,
)
from plait.client.send.open_rows import hash_keys
from plait.client.send.partitioner import Pieces
from plait.client.send.producer import Producer
from plait.client.send.resend_window import PendingBatch
from plait.client.send.row_columns import RowColumns
from plait.client.send.subject_sender import Senders, SubjectSender
from plait.client.types import Receipts
from plait.errors import InvalidArgument
from plait.limits import BODY_SIZE_MAX

#: One value for all rows, or one for each.
Tags = str | Iterable[str] | Sequence[Iterable[str] | None]
Headers = Mapping[str, str | int | float | bool] | Sequence[Mapping[str, str | int | float | bool] | None]

#: Returns the encoded values of ``count`` rows from ``start``; None if no row has any.
Encoder = Callable[[int, int], list[bytes] | None]

#: Rows that are measured first, to estimate the size of a row.
SAMPLE_COUNT = 256
#: If rows are spread over partitions, one step takes rows for this many frames: all may go to the same partition.
SPREAD_MAX = 4


async def send_many(
    senders: Senders,
    subject: str,
    bodies: Sequence[Any] | pa.Array,
    keys: Sequence[str | int | None] | None,
    when: Callable[[int], Dues] | None = None,
    tags: Tags | None = None,
    headers: Headers | None = None,
    to_group: str | Sequence[str | None] | None = None,
    priority: int | Sequence[int] = 0,
) -> Receipts:
    """Store all bodies in order; returns the receipts when the broker has stored them.

    ``tags``, ``headers``, ``to_group`` and ``priority`` are one value for all rows, or one for each. ``when`` returns
    the due times of that many rows. Raises the first error; other bodies may be stored.
    """
    if isinstance(bodies, pa.ChunkedArray):
        bodies = bodies.combine_chunks()
    if isinstance(bodies, str | bytes | bytearray):
        raise InvalidArgument("send_many takes a list of bodies; use send for one")
    total = len(bodies)
    if keys is not None and len(keys) != total:
        raise InvalidArgument(f"{len(keys)} keys for {total} bodies; give one for each, or None")
    encoders = _encoders(tags, headers, to_group, total)
    dues = None if when is None else when(total)
    ranks = priorities_of(priority, total)
    sender = senders.sender(subject, delayed=dues is not None)
    if ranks is not None:
        sender.refuse_priorities()
    producer, limits = senders.producer, senders.producer.limits
    sender.seal()
    batches: list[PendingBatch] = []
    pieces: Pieces = []
    position = 0
    step = _rows_for(sender, _column(bodies, 0, min(total, SAMPLE_COUNT))) if total else 0
    while position < total:
        array = _column(bodies, position, min(position + step, total))
        count = len(array)
        extras = [encoded(position, count) for encoded in encoders]
        size = _size(array) + sum(sum(map(len, each)) for each in extras if each is not None)
        step_bytes = limits.many_frame_bytes * _frames_per_step(sender)
        if size > 2 * step_bytes and count > 1:
            step = max(1, count // (1 + size // step_bytes))
            continue
        await _room(producer, pieces)
        texts = None if keys is None else [_key(key) for key in keys[position : position + count]]
        hashes = None if texts is None else hash_keys(texts, count)
        pieces = sender.spread(hashes)
        due = _part(dues, position, count)
        batch = PendingBatch(dues=due)
        texts_column = None if texts is None else pa.array(texts, pa.string())
        tagged, described, groups = map(_bytes_column, extras)
        columns = RowColumns(array, texts_column, hashes, tagged, described, due, groups=groups)
        columns = columns._replace(priorities=_part(ranks, position, count))
        batches.append(batch)
        sender.push(pieces, columns, batch, producer.now())
        position += count
        step = _rows_for(sender, array, size)
        await asyncio.sleep(0)  # Lets the loop serve the socket between frames.
    return await _receipts(batches)


async def _receipts(batches: list[PendingBatch]) -> Receipts:
    for batch in batches:
        await batch.wait()
    for batch in batches:
        if batch.error is not None:
            raise batch.error
    return Receipts(batches)


def _part(values: Any, start: int, count: int) -> Any:
    """The values of ``count`` rows; one value is the same for all rows."""
    return values if values is None or isinstance(values, int) else values[start : start + count]


def _encoders(tags: Any, headers: Any, to_group: Any, total: int) -> list[Encoder]:
    """The encoders of the tags, headers and groups of all rows."""
    one = isinstance(tags, str) or (isinstance(tags, Sequence) and all(isinstance(each, str) for each in tags))
    return [
        _encoder(tags, encode_tags, "tags", total, one=one),
        _encoder(headers, encode_headers, "headers", total, one=isinstance(headers, Mapping)),
        _encoder(to_group, encode_group, "to_group", total, one=isinstance(to_group, str)),
    ]


def _encoder(given: Any, encode: Callable[[Any], bytes], name: str, total: int, *, one: bool) -> Encoder:
    """Returns the encoded tags, headers or groups of ``count`` rows from ``start``; None if no row has any.

    ``one``: ``given`` is the value of all rows. Otherwise it has one for each.
    """
    if given is None:
        return lambda start, count: None
    if one:
        value = encode(given)
        return lambda start, count: [value] * count
    if not isinstance(given, Sequence) or len(given) != total:
        found = f"{len(given)}" if isinstance(given, Sequence) else f"a {type(given).__name__}"
        raise InvalidArgument(f"{name} for {total} bodies: give one for all, or one for each, not {found}")

    def rows(start: int, count: int) -> list[bytes]:
        try:
            return [encode(each) for each in given[start : start + count]]
        except (AttributeError, TypeError) as error:
            raise InvalidArgument(f"{name} of rows {start} to {start + count - 1}: {error}") from None

    return rows


def _bytes_column(rows: list[bytes] | None) -> pa.Array | None:
    return None if rows is None else pa.array(rows, pa.binary())


async def _room(producer: Producer, pieces: Pieces) -> None:
    """Wait until the windows of the frames before, and then the buffer, have room.

    The first rows of a call wait for the buffer only, in the order of the calls: a later send of their keys must not
    overtake them.
    """
    for sender, _ in pieces:
        await sender.window.wait_for_room()
    if producer.closed is not None:
        raise producer.closed
    if producer.buffered >= producer.buffer_bytes:
        await producer.room()


def _frames_per_step(sender: SubjectSender) -> int:
    """How many frames one step makes: one for each partition, at most ``SPREAD_MAX``."""
    return 1 if sender.partitioner is None else min(len(sender.partitioner.senders), SPREAD_MAX)


def _rows_for(sender: SubjectSender, sample: pa.Array, size: int | None = None) -> int:
    """How many rows like those of ``sample`` one step takes."""
    limits, frames = sender.producer.limits, _frames_per_step(sender)
    count = len(sample) * limits.many_frame_bytes // max(_size(sample) if size is None else size, 1)
    return max(1, min(limits.many_frame_count, count) * frames)


def _column(bodies: Sequence[Any] | pa.Array, start: int, stop: int) -> pa.Array:
    if isinstance(bodies, pa.Array):
        array = bodies.slice(start, stop - start)
    else:
        rows = bodies[start:stop]
        try:
            array = pa.array(rows, pa.binary())
        except (pa.ArrowException, TypeError):
            array = pa.array([encode_body(row) for row in rows], pa.binary())
    if len(array) == 1 and (size := _size(array)) > BODY_SIZE_MAX:
        raise body_too_large(size)
    return array


def _size(array: pa.Array) -> int:
    """The bytes of the rows. A slice of a larger array counts only its own rows."""
    if array.type not in (pa.binary(), pa.string()):
        return int(array.nbytes)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return int(offsets[-1] - offsets[0]) + 4 * len(array)


def _key(key: str | int | None) -> str:
    if type(key) is str and 0 < len(key) < 256 and key.isascii():
        return key
    return "" if key is None else encode_key(key)
