"""Rows as columns, on their way into frames: chosen by partition, cut into pieces, or moved to other LPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.client.send.encoding import Dues, Priorities
from plait.frame.builder import FrameParts, build_frame
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.model.logical_partitions import Hashes

#: Numbers of rows.
Rows = npt.NDArray[np.int64]


class RowColumns(NamedTuple):
    """Rows that are to become frames, as columns; ``None`` if no row has a value. Tags and headers are encoded."""

    bodies: pa.Array
    keys: pa.Array | None = None
    hashes: Hashes | None = None
    tags: pa.Array | None = None
    headers: pa.Array | None = None
    #: Due times; None: the rows are not delayed.
    dues: Dues | None = None
    #: Send times, one for all rows or one for each; None: the time at which the frame is built.
    times: Dues | None = None
    #: The group that each row is addressed to; empty: every group.
    groups: pa.Array | None = None
    #: Priorities, one for all rows or one for each; None: all are 0.
    priorities: Priorities | None = None

    @classmethod
    def of(cls, frame: FrameView) -> RowColumns:
        """The rows of a frame."""

        def array(number: Column) -> pa.Array | None:
            return frame.binary(number) if frame.has(number) else None

        def fixed(number: Column) -> Any:
            values = frame.values(number) if frame.has(number) else None
            return int(values[0]) if values is not None and len(values) == 1 else values

        return cls(
            frame.binary(Column.BODY),
            array(Column.KEY),
            frame.key_hashes(),
            array(Column.TAGS),
            array(Column.HEADERS),
            fixed(Column.DELIVER_AT),
            fixed(Column.SEND_TIME),
            array(Column.TO_GROUP),
            fixed(Column.PRIORITY),
        )

    def take(self, rows: Rows | None) -> RowColumns:
        """The rows with these numbers; None: all."""
        if rows is None:
            return self
        index = pa.array(rows)
        return self._each(lambda column: column.take(index), lambda values: values[rows])

    def slice(self, start: int, stop: int) -> RowColumns:
        """The rows [start, stop), without a copy."""
        return self._each(lambda column: column.slice(start, stop - start), lambda values: values[start:stop])

    def _each(self, of_array: Callable[[pa.Array], pa.Array], of_values: Callable[[Any], Any]) -> RowColumns:
        """The rows with every column changed: Arrow arrays by one function, NumPy arrays by another."""

        def changed(column: Any) -> Any:
            if isinstance(column, pa.Array):
                return of_array(column)
            return of_values(column) if isinstance(column, np.ndarray) else column

        return RowColumns(*map(changed, self))

    def frames(self, size: int, count: int) -> Iterator[RowColumns]:
        """The rows in pieces of about ``size`` bytes and at most ``count`` rows."""
        found = (self.bodies, self.keys, self.tags, self.headers, self.groups)
        columns = [each for each in found if each is not None]
        if sum(each.nbytes for each in columns) <= size and len(self.bodies) <= count:
            yield self
            return
        ends = np.cumsum(np.sum([_lengths(each) for each in columns], axis=0))
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = min(max(start + 1, int(np.searchsorted(ends, before + size, "right"))), start + count)
            yield self.slice(start, stop)
            start = stop

    def build(
        self,
        producer: int,
        first: int,
        previous: int = 0,
        *,
        now: int | None = None,
        flags: int = 0,
        compression: str | None = None,
    ) -> FrameParts:
        """A frame of the rows. ``now`` is the send time of rows without one."""
        return build_frame(
            self.bodies,
            producer=producer,
            first=first,
            previous=previous,
            send_time=now if self.times is None else self.times,
            deliver_at=self.dues,
            keys=self.keys,
            key_hashes=self.hashes,
            groups=self.groups,
            tags=self.tags,
            headers=self.headers,
            priority=self.priorities,
            flags=flags,
            compression=compression,
        )


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """The bytes of each row of a column."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths: npt.NDArray[np.int64] = np.diff(offsets).astype(np.int64)
    return lengths


def groups_of(targets: npt.NDArray[np.int64]) -> list[tuple[int, Rows | None]]:
    """Each target with its rows in order; None instead of the rows if there is only one target."""
    first = int(targets[0])
    if (targets == first).all():
        return [(first, None)]
    order = np.argsort(targets, kind="stable")
    cuts = np.flatnonzero(np.diff(targets[order])) + 1
    return [(int(targets[rows[0]]), rows) for rows in np.split(order, cuts)]
