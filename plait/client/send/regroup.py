"""Rebuilds a frame that is not stored: splits it over partitions, or moves its rows to other LPs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.frame.builder import FrameParts, build_frame
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes

Rows = npt.NDArray[np.int64]

_LP_BITS = np.uint64(LOGICAL_PARTITIONS.bit_length() - 1)


def take_rows(
    frame: FrameView,
    rows: Rows | None,
    hashes: Hashes | None,
    compression: str | None,
    *,
    producer: int,
    first: int,
    flags: int = 0,
) -> FrameParts:
    """A new frame of some rows of ``frame`` (None: all). ``hashes`` are the key hashes of all its rows."""
    index = None if rows is None else pa.array(rows)

    def column(number: Column) -> pa.Array | None:
        if not frame.has(number):
            return None
        array = frame.binary(number)
        return array if index is None else array.take(index)

    def times(number: Column) -> int | npt.NDArray[np.int64] | None:
        if not frame.has(number):
            return None
        values = frame.values(number)
        if len(values) == 1:
            return int(values[0])
        return values if rows is None else values[rows]

    return build_frame(
        column(Column.BODY),
        producer=producer,
        first=first,
        send_time=times(Column.SEND_TIME),
        deliver_at=times(Column.DELIVER_AT),
        keys=column(Column.KEY),
        key_hashes=hashes if hashes is None or rows is None else hashes[rows],
        tags=column(Column.TAGS),
        headers=column(Column.HEADERS),
        compression=compression,
        flags=flags,
    )


def restamp(hashes: Hashes, lps: npt.NDArray[np.uint64]) -> Hashes:
    """Replace the LP in each hash by one of ``lps`` (R6). The upper bits, which distinguish keys, do not change."""
    keys = hashes >> _LP_BITS
    stamped = keys << _LP_BITS | lps[(keys % np.uint64(len(lps))).astype(np.int64)]
    return np.where(hashes == NO_KEY_HASH, hashes, stamped)


def groups_of(targets: npt.NDArray[np.int64]) -> list[tuple[int, Rows | None]]:
    """Each target with its rows in order; None instead of the rows if there is only one target."""
    first = int(targets[0])
    if (targets == first).all():
        return [(first, None)]
    order = np.argsort(targets, kind="stable")
    cuts = np.flatnonzero(np.diff(targets[order])) + 1
    return [(int(targets[rows[0]]), rows) for rows in np.split(order, cuts)]
