"""Builds the frames of firings. A frame is built once and kept as bytes, so that a resend is identical."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.recurring.definition import Definition
from plait.model.logical_partitions import NO_KEY_HASH, Numbers


class Firing(NamedTuple):
    """One message of a recurrence."""

    name: str
    definition: Definition
    number: int
    due: int


def frame_of(firings: Sequence[Firing], *, producer: int, previous: int, now: int) -> bytes:
    """The frame of firings, as delayed rows: their broker delivers none of them before its due time."""
    keys = [firing.definition.key or "" for firing in firings]
    tags = [firing.definition.tag_column() for firing in firings]
    return build_frame(
        [firing.definition.body for firing in firings],
        producer=producer,
        first=previous + 1,
        previous=previous,
        send_time=now,
        deliver_at=np.array([firing.due for firing in firings], np.int64),
        keys=keys if any(keys) else None,
        key_hashes=np.array([xxh3_64_intdigest(key.encode()) for key in keys], np.uint64) if any(keys) else None,
        tags=tags if any(tags) else None,
        headers=[firing.definition.header_column(firing.name, firing.number, firing.due) for firing in firings],
    ).tobytes()


def targets_of(frame: bytes, table: Numbers, keyless: int) -> Numbers:
    """The partition of each row: by the logical partition of its key, or ``keyless``."""
    view = FrameView(frame)
    hashes = view.key_hashes()
    if hashes is None:
        return np.full(view.count, keyless, np.int64)
    lps = (hashes % np.uint64(LOGICAL_PARTITIONS)).astype(np.int64)
    return np.where(hashes == NO_KEY_HASH, keyless, table[lps])


def part_of(frame: bytes, rows: Numbers, producer: int) -> bytes:
    """Rows of a frame, as the first rows of another producer."""
    view = FrameView(frame)

    def chosen(column: Column) -> pa.Array | None:
        return view.binary(column).take(pa.array(rows)) if view.has(column) else None

    hashes = view.key_hashes()
    return build_frame(
        view.binary(Column.BODY).take(pa.array(rows)),
        producer=producer,
        first=1,
        send_time=int(view.values(Column.SEND_TIME)[0]),
        deliver_at=view.fixed(Column.DELIVER_AT)[rows],
        keys=chosen(Column.KEY),
        key_hashes=None if hashes is None else hashes[rows],
        tags=chosen(Column.TAGS),
        headers=chosen(Column.HEADERS),
    ).tobytes()
