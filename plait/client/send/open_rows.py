"""Open rows: the rows that were added to a queue after its last frame was sealed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from plait.client.send.encoding import encode_body, encode_headers, encode_key, encode_tags
from plait.client.types import PendingBatch, ScheduledBatch
from plait.frame.builder import ONE_ROW_SIZE_MAX, SMALL_COUNT, FrameParts, build_frame, build_one

#: Bytes that a row costs in addition to its data, approximately.
ROW_SIZE = 16
#: ASCII keys and bodies below these sizes are within their limits: they need no further check.
SHORT_KEY_MAX = 256
SHORT_BODY_MAX = 1_000_000


def hash_keys(keys: Iterable[str], count: int) -> npt.NDArray[np.uint64]:
    """xxh3_64 of each key's UTF-8 text; the frozen rule that maps keys to logical partitions."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, keys)), np.uint64, count)


def _one_or_all(dues: list[int]) -> int | npt.NDArray[np.int64]:
    """One due time if all rows have the same, which is common; otherwise all of them."""
    first = dues[0]
    return first if len(dues) == 1 or dues.count(first) == len(dues) else np.array(dues, np.int64)


class OpenRows:
    """Columns that grow row by row. A column is created with the first row that has a value for it."""

    __slots__ = ("batch", "bodies", "dues", "headers", "keys", "plain", "size", "tags")

    def __init__(self, dues: list[int] | None = None) -> None:
        self.bodies: list[bytes] = []
        self.keys: list[str] | None = None
        self.tags: list[bytes] | None = None
        self.headers: list[bytes] | None = None
        self.size = 0
        #: No row has tags or headers.
        self.plain = True
        #: The due time of each row; None: the rows are not delayed.
        self.dues = dues
        self.batch = PendingBatch() if dues is None else ScheduledBatch(dues)

    def add(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> int:
        """Append a row and return its size. An invalid row raises and is not added."""
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
        bodies.append(body)
        self.size += size
        return size

    def build(
        self, producer: int, first: int, previous: int, send_time: int, compression: str | None, flags: int = 0
    ) -> FrameParts:
        """Build a frame of the rows."""
        count = len(self.bodies)
        keys, dues = self.keys, self.dues
        batch = self.batch
        batch.producer, batch.first, batch.count = producer, first, count
        if (
            count == 1
            and keys is None
            and self.plain
            and dues is None
            and not compression
            and self.size < ONE_ROW_SIZE_MAX
        ):
            return build_one(
                self.bodies[0], producer=producer, first=first, previous=previous, send_time=send_time, flags=flags
            )
        return build_frame(
            self.bodies,
            producer=producer,
            first=first,
            previous=previous,
            send_time=send_time,
            deliver_at=None if dues is None else _one_or_all(dues),
            # Arrow converts many keys faster than Python does, and a few more slowly.
            keys=pa.array(keys, pa.string()) if keys is not None and count > SMALL_COUNT else keys,
            key_hashes=None if keys is None else hash_keys(keys, count),
            tags=self.tags,
            headers=self.headers,
            compression=compression,
            flags=flags,
        )
