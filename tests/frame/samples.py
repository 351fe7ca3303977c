"""Frames for tests: a model of rows in plain Python, frames built from it, and rows read back from a frame."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from plait.frame import header_packing
from plait.frame.builder import FrameParts, assemble, build_frame, pack_stamp
from plait.frame.columns import TAG_SEPARATOR, Codec, Column
from plait.frame.header import HEADER_SIZE, SEQUENCE_MAX, STAMP_CRC_OFFSET, STAMP_OFFSET, TIME_MAX
from plait.frame.view import FrameView

NOW = 1_700_000_000_000_000


@contextmanager
def small_blocks(count: int = 8) -> Iterator[None]:
    """Frames of this many rows have header blocks, so that small tests have them."""
    before, header_packing.BLOCK_COUNT_MIN = header_packing.BLOCK_COUNT_MIN, count  # type: ignore[misc]
    try:
        yield
    finally:
        header_packing.BLOCK_COUNT_MIN = before  # type: ignore[misc]


@dataclass(frozen=True)
class Row:
    """One row as a reader sees it; None if the frame does not have the column."""

    sequence: int
    producer: int
    number: int
    body: bytes
    key: bytes | None = None
    key_hash: int | None = None
    tags: bytes | None = None
    headers: bytes | None = None
    send_time: int | None = None
    deliver_at: int | None = None
    priority: int | None = None


@dataclass(frozen=True)
class Draft:
    """The rows of a frame to build. A single time or priority is stored once for all rows."""

    bodies: list[bytes]
    keys: list[bytes] | None = None
    key_hashes: list[int] | None = None
    tags: list[bytes] | None = None
    headers: list[bytes] | None = None
    send_time: int | list[int] | None = None
    deliver_at: int | list[int] | None = None
    priority: int | list[int] | None = None
    compression: str | None = None
    producer: int = 7
    first: int = 1
    previous: int = 0
    flags: int = 0
    base: int = 0

    @property
    def count(self) -> int:
        return len(self.bodies)

    def rows(self) -> list[Row]:
        """The rows that a reader of the frame must see."""
        return [
            Row(
                sequence=self.base + i,
                producer=self.producer,
                number=self.first + i,
                body=body,
                key=_at(self.keys, i),
                key_hash=_at(self.key_hashes, i),
                tags=_at(self.tags, i),
                headers=None if self.headers is None else in_order(self.headers[i]),
                send_time=_at(self.send_time, i),
                deliver_at=_at(self.deliver_at, i),
                priority=_at(self.priority, i),
            )
            for i, body in enumerate(self.bodies)
        ]

    def build(self) -> FrameParts:
        """The stamped frame."""
        hashes = self.key_hashes
        with small_blocks():
            frame = build_frame(
                self.bodies,
                producer=self.producer,
                first=self.first,
                previous=self.previous,
                send_time=_times(self.send_time),
                deliver_at=_times(self.deliver_at),
                keys=self.keys,
                key_hashes=None if hashes is None else np.array(hashes, np.uint64),
                tags=self.tags,
                headers=self.headers,
                flags=self.flags,
                compression=self.compression,
            )
        # The builder has no argument for it: it is in the format, but clients cannot set it yet.
        if self.priority is not None:
            frame = with_column(frame, Column.PRIORITY, *_fixed(self.priority, "u1"))
        frame.stamp_with(pack_stamp(3, self.base, NOW, 4096, 2))
        return frame

    def view(self) -> FrameView:
        return FrameView(self.build().tobytes())


def _times(times: int | list[int] | None) -> int | npt.NDArray[np.int64] | None:
    return np.array(times, np.int64) if isinstance(times, list) else times


def with_column(frame: FrameParts, number: int, codec: int, data: bytes) -> FrameParts:
    """The frame with a column added, or replaced."""
    view = FrameView(frame.tobytes())
    columns = [(n, codec, [bytes(view.stored(n))]) for n, (codec, _, _) in view.places.items() if n != number]
    columns.append((number, codec, [data]))
    return assemble(
        sorted(columns),  # type: ignore[arg-type]
        count=view.count,
        producer=view.producer,
        first=view.first,
        previous=view.previous,
        flags=view.flags,
        stamp=frame.stamp,
    )


def rows_of(frame: FrameView) -> list[Row]:
    """All rows of a frame."""
    producers, numbers = frame.message_ids()
    columns = [
        frame.sequences().tolist(),
        producers.tolist(),
        numbers.tolist(),
        frame.binary(Column.BODY).to_pylist(),
        _variable(frame, Column.KEY),
        _numbers(frame, Column.KEY_HASH),
        _variable(frame, Column.TAGS),
        [None if row is None else in_order(row) for row in _variable(frame, Column.HEADERS)],
        _numbers(frame, Column.SEND_TIME),
        _numbers(frame, Column.DELIVER_AT),
        _numbers(frame, Column.PRIORITY),
    ]
    return [Row(*values) for values in zip(*columns, strict=True)]


def resign(frame: bytes | bytearray) -> bytes:
    """The bytes with both checksums corrected, as a hostile sender would do."""
    changed = bytearray(frame)
    crc = crc32c(bytes(changed[HEADER_SIZE:]), crc32c(bytes(changed[:40])))
    changed[40:44] = struct.pack("<I", crc)
    changed[STAMP_CRC_OFFSET:HEADER_SIZE] = struct.pack("<I", crc32c(bytes(changed[STAMP_OFFSET:STAMP_CRC_OFFSET])))
    return bytes(changed)


def tag_row(*tags: str) -> bytes:
    """Tags as stored in a row."""
    return (TAG_SEPARATOR + TAG_SEPARATOR.join(tags) + TAG_SEPARATOR).encode() if tags else b""


def full_draft(count: int = 5, compression: str | None = None) -> Draft:
    """A frame with every column; some rows have no key, tags or headers."""
    return Draft(
        bodies=[b"body %d " % i * (i % 7) * (40 if compression else 1) for i in range(count)],
        keys=[f"kéy-{i}".encode() if i % 3 else b"" for i in range(count)],
        key_hashes=[(i * 0x9E3779B97F4A7C15) % (1 << 64) for i in range(count)],
        tags=[tag_row(*["new", "größe"][: i % 3]) for i in range(count)],
        headers=[b"\x81\xa1a%c" % (i % 128) if i % 2 else b"" for i in range(count)],
        send_time=[NOW + i for i in range(count)],
        deliver_at=[NOW + 1000 * i for i in range(count)],
        priority=[i % 10 for i in range(count)],
        compression=compression,
        producer=0xFEDCBA9876543210,
        first=1000,
        previous=990,
        base=1 << 40,
    )


def _at(values: list | int | None, index: int):  # type: ignore[type-arg]
    return values[index] if isinstance(values, list) else values


def _fixed(values: int | list[int], dtype: str) -> tuple[Codec, bytes]:
    codec = Codec.RAW if isinstance(values, list) else Codec.CONST
    return codec, np.array(values, dtype).tobytes()


def _variable(frame: FrameView, column: int) -> list[bytes | None]:
    return frame.binary(column).to_pylist() if frame.has(column) else [None] * frame.count


def in_order(headers: bytes) -> bytes:
    """Headers sorted by name: frames that store them as columns do not keep the order of the names."""
    try:
        found = msgspec.msgpack.decode(headers, type=dict[str, Any]) if headers else {}
    except ValueError:
        return headers
    return _encode(dict(sorted(found.items()))) if found else b""


def _numbers(frame: FrameView, column: int) -> list[int | None]:
    return frame.fixed(column).tolist() if frame.has(column) else [None] * frame.count


# --- strategies ----------------------------------------------------------------------------------

#: No deadline: the speed of these tests depends on the machine.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_BODIES = (b"", b"a", b"\0", b"some text", bytes(range(12)))
_KEYS = tuple(text.encode() for text in ("", "k", "order-1", "größe", "✓", "\U0001f600" * 3))
_TAG_ROWS = (b"", tag_row("a"), tag_row("a", "bé"), tag_row("✓", "two words", "c"))
_HEADERS = (b"", b"\x80", b"\x81\xa1a\x01", b"\xff\xfe")
_encode = msgspec.msgpack.Encoder().encode


def header_row(rng: Random) -> bytes:
    """Headers that frames of many rows store as columns; a few names are rare, or have values of several kinds."""
    if rng.random() < 0.1:
        return b""
    headers: dict[str, object] = {"city": rng.choice(["BJS", "größe", "x" * 30]), "region": "eu-central"}
    if rng.random() < 0.7:
        headers["amount"] = rng.choice([0, -1, rng.randint(-(1 << 15), 1 << 15)])
    if rng.random() < 0.7:
        headers |= {"price": rng.choice([0.0, -0.0, 1.5, -3e300]), "big": rng.choice([0, (1 << 64) - 1])}
    if rng.random() < 0.7:
        headers["vip"] = rng.random() < 0.5
    if rng.random() < 0.5:
        headers["mixed"] = rng.choice([True, 1, 1.0, "1"])
    if rng.random() < 0.1:
        headers["rare"] = rng.randint(0, 9)
    return _encode(headers)


def _numbers_up_to(rng: Random, count: int, limit: int) -> list[int]:
    return [rng.choice([0, 1, limit, rng.randint(0, limit)]) for _ in range(count)]


def _header_rows(rng: Random, count: int) -> list[bytes]:
    return rng.choices(_HEADERS, k=count) if rng.random() < 0.3 else [header_row(rng) for _ in range(count)]


@st.composite
def drafts(draw: st.DrawFn, count_max: int = 40, compressed: bool | None = None, plain: bool = False) -> Draft:
    """Frames with any set of columns; ``plain``: only frames that can be joined with each other.

    The number of rows and the set of columns shrink; the contents of the rows come from one seed.
    """
    count = draw(st.integers(1, count_max))
    compression = None if plain or compressed is False else draw(st.sampled_from([None, "zstd", "lz4"]))
    # Long and repetitive enough that compression makes them shorter.
    repeat = 100 if compression else 1
    keyed, hashed, tagged, headed = (draw(st.booleans()) for _ in range(4))
    rng = Random(draw(st.integers(0, 1 << 32)))

    def fixed(limit: int) -> int | list[int] | None:
        kind = draw(st.sampled_from(["absent", "constant", "each"]))
        if kind == "absent":
            return None
        values = _numbers_up_to(rng, count, limit)
        return values if kind == "each" else values[0]

    return Draft(
        bodies=[body * repeat for body in rng.choices(_BODIES, k=count)],
        keys=rng.choices(_KEYS, k=count) if keyed else None,
        key_hashes=_numbers_up_to(rng, count, (1 << 64) - 1) if keyed or hashed else None,
        tags=rng.choices(_TAG_ROWS, k=count) if tagged else None,
        headers=_header_rows(rng, count) if headed else None,
        send_time=fixed(TIME_MAX),
        deliver_at=fixed(TIME_MAX),
        priority=fixed(9),
        compression=compression,
        producer=draw(st.integers(0, (1 << 64) - 1)),
        first=draw(st.integers(0, SEQUENCE_MAX - count)),
        previous=draw(st.integers(0, (1 << 64) - 1)),
        flags=0 if plain else draw(st.integers(0, 1)),
        base=draw(st.integers(0, SEQUENCE_MAX - count)),
    )


@st.composite
def alike(draw: st.DrawFn, frames_max: int = 6) -> list[Draft]:
    """Frames of several producers with the same columns."""
    frames = draw(
        st.lists(drafts(count_max=draw(st.sampled_from([1, 8])), plain=True), min_size=1, max_size=frames_max)
    )
    head = frames[0]
    return [head, *(_with_columns_of(frame, head) for frame in frames[1:])]


def _with_columns_of(frame: Draft, head: Draft) -> Draft:
    count = frame.count
    return replace(
        frame,
        keys=None if head.keys is None else frame.keys or [b"k"] * count,
        key_hashes=None if head.key_hashes is None else frame.key_hashes or [9] * count,
        tags=None if head.tags is None else frame.tags or [b""] * count,
        headers=None if head.headers is None else frame.headers or [b"h"] * count,
        send_time=None if head.send_time is None else NOW if frame.send_time is None else frame.send_time,
        deliver_at=None if head.deliver_at is None else NOW if frame.deliver_at is None else frame.deliver_at,
        priority=None if head.priority is None else 5 if frame.priority is None else frame.priority,
    )


def arrow_bytes() -> int:
    """The memory that Arrow has allocated, including inflated columns."""
    return pa.default_memory_pool().bytes_allocated()
