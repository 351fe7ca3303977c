"""Open rows: the rows of one partition that were added after its last frame was sealed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from plait.client.send.encoding import encode_body, encode_group, encode_headers, encode_key, encode_tags
from plait.client.send.producer import Producer
from plait.client.send.resend_window import PendingBatch, ResendWindow, SentFrame
from plait.client.types import Ticket
from plait.errors import PlaitError
from plait.frame.builder import ONE_ROW_SIZE_MAX, SMALL_COUNT, FrameParts, build_frame, build_one

#: Bytes that a row costs in addition to its data, approximately.
ROW_SIZE = 16
#: ASCII keys and bodies below these sizes are within their limits: they need no further check.
SHORT_KEY_MAX = 256
SHORT_BODY_MAX = 1_000_000
#: A group of fewer rows is not sent in two halves.
AHEAD_COUNT = 64


def hash_keys(keys: Iterable[str], count: int) -> npt.NDArray[np.uint64]:
    """xxh3_64 of each key's UTF-8 text; the frozen rule that maps keys to logical partitions."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, keys)), np.uint64, count)


def _one_or_all(dues: list[int]) -> int | npt.NDArray[np.int64]:
    """One due time if all rows have the same, which is common; otherwise all of them."""
    first = dues[0]
    return first if len(dues) == 1 or dues.count(first) == len(dues) else np.array(dues, np.int64)


class RowExtras(NamedTuple):
    """What most rows do not have."""

    tags: Iterable[str] | None = None
    headers: Mapping[str, Any] | None = None
    #: Microseconds since 1970; None: the row is not delayed.
    due: int | None = None
    #: The only group that gets the row; None: every group.
    to_group: str | None = None
    priority: int = 0


NO_EXTRAS = RowExtras()


class OpenRows:
    """Columns that grow row by row, and decide when they become a frame.

    A column is created with the first row that has a value for it.
    """

    def __init__(
        self,
        producer: Producer,
        window: ResendWindow,
        push: Callable[[SentFrame], None],
        *,
        delayed: bool = False,
    ) -> None:
        self._producer = producer
        self._window = window
        #: Sends a frame.
        self._push = push
        self._delayed = delayed
        self._frame_bytes = producer.limits.frame_bytes
        #: The number of the last row of a full frame.
        self._last_row = producer.limits.frame_count - 1
        #: True if the rows are to be sealed at the end of this loop turn.
        self._urgent = False
        #: If no frame waits, open rows are sealed early when the row with this number is added. The number is half the
        #: row count of the last frame. After a frame of one row it is the number of the first row, because the sender
        #: probably awaits each of its sends.
        self._ahead = AHEAD_COUNT // 2 - 1
        self._linger: asyncio.TimerHandle | None = None
        self.start()

    def start(self) -> None:
        """Start with no rows."""
        self.bodies: list[bytes] = []
        self.keys: list[str] | None = None
        self.tags: list[bytes] | None = None
        self.headers: list[bytes] | None = None
        #: The group that each row is addressed to; empty: every group.
        self.groups: list[bytes] | None = None
        self.priorities: list[int] | None = None
        self.size = 0
        #: The due time of each row; None: the rows are not delayed.
        self.dues: list[int] | None = [] if self._delayed else None
        #: True while no row has tags, headers, a priority, a due time or a group.
        self.plain = not self._delayed
        self.batch = PendingBatch(dues=self.dues)

    def post(
        self,
        body: Any,
        key: str | int | None,
        extras: RowExtras | None = None,
    ) -> Ticket:
        """Add a row. It is sent when the frame is full, or after ``linger_seconds``."""
        bodies, keys = self.bodies, self.keys
        row = len(bodies)
        # The fast path for most rows: a bytes body and a short text key, and no row here has more than that.
        if (
            extras is None
            and self.plain
            and keys is not None
            and type(key) is str
            and type(body) is bytes
            and 0 < len(key) < SHORT_KEY_MAX
            and key.isascii()
            and len(body) <= SHORT_BODY_MAX
        ):
            bodies.append(body)
            keys.append(key)
            size = len(body) + len(key) + ROW_SIZE
            total = self.size = self.size + size
        else:
            size = self.add(body, key, extras)
            total = self.size
        producer, batch = self._producer, self.batch
        producer.buffered += size
        if not batch.posted:
            batch.posted = True
        if total >= self._frame_bytes or row >= self._last_row:
            self.seal()
        elif not row and self._linger is None:
            self._linger = producer.loop.call_later(producer.limits.linger_seconds, self.seal)
        return Ticket(batch, row)

    def send(
        self,
        body: Any,
        key: str | int | None,
        extras: RowExtras | None = None,
    ) -> tuple[PendingBatch, int]:
        """Add a row that is sent at the end of this loop turn, with the other rows of the turn.

        Returns the batch that gets the result, and the row's number in it. When no frame waits, the first half of many
        rows, or a single row, is sent early, so that the broker works on these rows while the client adds the rest.
        """
        bodies, batch = self.bodies, self.batch
        row = len(bodies)
        if (
            key is None
            and extras is None
            and self.plain
            and self.keys is None
            and type(body) is bytes
            and len(body) <= SHORT_BODY_MAX
        ):
            bodies.append(body)
            size = len(body) + ROW_SIZE
            self.size += size
        else:
            size = self.add(body, key, extras)
        self._producer.buffered += size
        if self.size >= self._frame_bytes or row >= self._last_row or (row >= self._ahead and not self._window.frames):
            self.seal()
        elif not self._urgent:
            self._urgent = True
            self._producer.loop.call_soon(self._end_turn)
        return batch, row

    def _end_turn(self) -> None:
        self._urgent = False
        self.seal()

    def add(
        self,
        body: Any,
        key: str | int | None,
        extras: RowExtras | None = None,
    ) -> int:
        """Append a row and return its size. An invalid row raises and is not added."""
        tags, headers, due, to_group, priority = extras or NO_EXTRAS
        if type(body) is not bytes or len(body) > SHORT_BODY_MAX:
            body = encode_body(body)
        if key is not None and (type(key) is not str or not 0 < len(key) < SHORT_KEY_MAX or not key.isascii()):
            key = encode_key(key)
        bodies = self.bodies
        row = len(bodies)
        size = len(body) + ROW_SIZE
        if tags is not None:
            encoded = encode_tags(tags)
            size += len(encoded)
            if self.tags is None:
                self.tags = [b""] * row
                self.plain = False
        if headers is not None:
            encoded_headers = encode_headers(headers)
            size += len(encoded_headers)
            if self.headers is None:
                self.headers = [b""] * row
                self.plain = False
        if to_group is not None:
            group = encode_group(to_group)
            size += len(group)
            if self.groups is None:
                self.groups = [b""] * row
                self.plain = False
        if self.groups is not None:
            self.groups.append(group if to_group is not None else b"")
        if self.tags is not None:
            self.tags.append(encoded if tags is not None else b"")
        if self.headers is not None:
            self.headers.append(encoded_headers if headers is not None else b"")
        if key is not None:
            if self.keys is None:
                self.keys = [""] * row
            self.keys.append(key)
            size += len(key)
        elif self.keys is not None:
            self.keys.append("")
        if self.dues is not None:
            assert due is not None
            self.dues.append(due)
        if priority and self.priorities is None:
            self.priorities = [0] * row
            self.plain = False
        if self.priorities is not None:
            self.priorities.append(priority)
        bodies.append(body)
        self.size += size
        return size

    def seal(self) -> None:
        """Make a frame of the rows; it is sent as soon as the window allows."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        count = len(self.bodies)
        if not count:
            return
        self._ahead = max(AHEAD_COUNT, count) // 2 - 1 if count > 1 else 0
        producer, batch, size = self._producer, self.batch, self.size
        first = producer.next
        producer.next = first + count
        try:
            parts = self.build(producer.id, first, self._window.last)
        except PlaitError as error:
            self.fail(error)
            return
        self.start()
        self._push(SentFrame(parts, batch, size, producer.loop.time() + producer.limits.send_seconds))

    def fail(self, error: PlaitError) -> None:
        """Remove all rows; the calls that sent them raise ``error``."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        producer, batch, size = self._producer, self.batch, self.size
        if not self.bodies:
            return
        self.start()
        if batch.posted:
            producer.note(error)
        batch.settle(None, error)
        producer.released(size)

    def build(self, producer: int, first: int, previous: int, flags: int = 0) -> FrameParts:
        """Build a frame of the rows."""
        bodies, keys, dues = self.bodies, self.keys, self.dues
        count = len(bodies)
        batch = self.batch
        batch.producer, batch.first, batch.count = producer, first, count
        send_time, compression = self._producer.now(), self._producer.compression
        if count == 1 and self.plain and not compression and self.size < ONE_ROW_SIZE_MAX:
            key = None if keys is None else keys[0].encode()
            return build_one(
                bodies[0],
                key,
                0 if key is None else xxh3_64_intdigest(key),
                producer=producer,
                first=first,
                previous=previous,
                send_time=send_time,
                flags=flags,
            )
        return build_frame(
            bodies,
            producer=producer,
            first=first,
            previous=previous,
            send_time=send_time,
            deliver_at=None if dues is None else _one_or_all(dues),
            # Arrow converts many keys faster than Python does, and a few more slowly.
            keys=pa.array(keys, pa.string()) if keys is not None and count > SMALL_COUNT else keys,
            key_hashes=None if keys is None else hash_keys(keys, count),
            groups=self.groups,
            tags=self.tags,
            headers=self.headers,
            priority=None if self.priorities is None else np.array(self.priorities, np.uint8),
            compression=compression,
            flags=flags,
        )
