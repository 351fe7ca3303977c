"""A frame in a consumer's hands: its columns, read when asked for, and which of its rows are done."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.client.encoding import decode_headers, decode_tags
from plait.client.types import ACKNOWLEDGED, Acknowledgement, HeaderValue, Message, MessageId, PartitionName
from plait.errors import FrameError
from plait.frame.arrow import keys as key_column
from plait.frame.columns import Column
from plait.frame.view import FrameView

#: Looked up once: Python 3.11 runs a function for each look at a member.
_BODY, _KEY, _SELECTION = int(Column.BODY), int(Column.KEY), int(Column.SELECTION)

#: (start, end, epoch) of sequences.
EpochRange = tuple[int, int, int]
#: What failed, by the seconds that it is to wait (None: as the group retries).
Nacks = dict[float | None, list[EpochRange]]


def to_datetime(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1_000_000, UTC)


class Owner(Protocol):
    """Who collects acks and nacks."""

    def settle_soon(self, delivered: Delivered) -> None:
        """There is something to collect."""

    def settle_now(self, delivered: Delivered) -> None:
        """Collect what there is before anything else is said."""

    def from_thread(self, delivered: Delivered, row: int, *, acked: bool, delay: float | None = None) -> None:
        """A word from another thread."""


class Delivered:
    """One frame, or part of one, that a pull brought."""

    __slots__ = (
        "_attempts",
        "_bodies",
        "_headers",
        "_ids",
        "_tags",
        "acking",
        "count",
        "epoch",
        "frame",
        "nacking",
        "open_count",
        "owner",
        "partition",
        "position",
        "rows_done",
        "size",
        "subject",
        "taken",
    )

    def __init__(
        self,
        frame: FrameView,
        subject: str,
        partition: PartitionName,
        owner: Owner | None,
        attempts: list[tuple[int, int, int]],
    ) -> None:
        self.frame = frame
        self.subject = subject
        self.partition = partition
        self.owner = owner
        self.count = frame.count
        self.size = frame.size
        self.epoch = frame.epoch
        self._attempts = attempts
        #: Rows handed to the user; the rest waits in the consumer's buffer.
        self.taken = 0
        #: Rows pulled before this frame's first, counted over the consumer's life: what the span is measured in.
        self.position = 0
        self.open_count = frame.count
        self.rows_done: npt.NDArray[np.bool_] | None = None
        self.acking: list[int | slice] = []
        #: Seconds to wait (None: as the group retries) → rows.
        self.nacking: dict[float | None, list[int | slice]] = {}
        self._ids: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None
        self._tags: list[bytes] | None = None
        self._headers: list[bytes] | None = None
        self._bodies: list[bytes] | None = None

    # --- messages -------------------------------------------------------------------------------

    def messages(self, start: int, stop: int) -> list[Message]:
        """Rows [start, stop) as messages."""
        frame = self.frame
        bodies = frame.rows(_BODY, start, stop)
        keys = self._keys(start, stop)
        if _SELECTION in frame.places:
            sequences = frame.sequences()[start:stop].tolist()
        else:
            sequences = range(frame.base + start, frame.base + stop)
        return list(map(Message, bodies, keys, sequences, repeat(self), range(start, stop)))

    def _keys(self, start: int, stop: int) -> list[str | None] | repeat[None]:
        if _KEY not in self.frame.places:
            return repeat(None)
        try:
            texts: list[str | None] = key_column(self.frame).slice(start, stop - start).to_pylist()
        except UnicodeDecodeError as error:
            raise FrameError(f"an order key is not UTF-8: {error}") from None
        return texts

    def tags(self, row: int) -> list[str]:
        if not self.frame.has(Column.TAGS):
            return []
        if self._tags is None:
            self._tags = self.frame.binary(Column.TAGS).to_pylist()
        return decode_tags(self._tags[row])

    def headers(self, row: int) -> dict[str, HeaderValue]:
        if not self.frame.has(Column.HEADERS):
            return {}
        if self._headers is None:
            self._headers = self.frame.binary(Column.HEADERS).to_pylist()
        return decode_headers(self._headers[row])

    def message_id(self, row: int) -> MessageId:
        if self._ids is None:
            self._ids = self.frame.message_ids()
        producers, numbers = self._ids
        return MessageId(int(producers[row]), int(numbers[row]))

    def send_time(self, row: int) -> datetime | None:
        if not self.frame.has(Column.SEND_TIME):
            return None
        return to_datetime(int(self.frame.fixed(Column.SEND_TIME)[row]))

    @property
    def store_time(self) -> datetime:
        return to_datetime(self.frame.store_time)

    def attempt(self, row: int) -> int:
        if len(self._attempts) == 1:
            return self._attempts[0][2]
        sequence = int(self.frame.sequences()[row])
        for start, end, attempt in self._attempts:
            if start <= sequence < end:
                return attempt
        return 1

    # --- settling -------------------------------------------------------------------------------

    def ack_row(self, row: int) -> Acknowledgement:
        acking = self.acking
        if acking:
            # The owner knows already that there is something to collect.
            acking.append(row)
        elif self.owner is not None:
            # Before the row is noted: it raises when there is nobody left to collect it.
            self.owner.settle_soon(self)
            acking.append(row)
        return ACKNOWLEDGED

    def nack_row(self, row: int, delay: float | None = None) -> Acknowledgement:
        owner = self.owner
        if owner is not None:
            owner.settle_soon(self)
            if self.acking:
                owner.settle_now(self)
            self.nack_rows(row, delay)
        return ACKNOWLEDGED

    def nack_rows(self, rows: int | slice, delay: float | None = None) -> None:
        """Note a failure; ``collect`` tells of it."""
        self.nacking.setdefault(delay, []).append(rows)

    def collect(self) -> tuple[list[EpochRange], Nacks]:
        """(acks, nacks) as sequence ranges of rows that were open, which they no longer are."""
        nacks = {delay: self._settle(rows) for delay, rows in self.nacking.items()}
        acks = self._settle(self.acking)
        self.nacking, self.acking = {}, []
        return acks, nacks

    def _settle(self, items: list[int | slice]) -> list[EpochRange]:
        if not items:
            return []
        if self.rows_done is None:
            whole = items[0]
            if self.count == 1 or (
                isinstance(whole, slice) and whole.start == 0 and whole.stop == self.count and len(items) == 1
            ):
                self.rows_done = np.ones(self.count, bool)
                self.open_count = 0
                return self._ranges(None)
            self.rows_done = np.zeros(self.count, bool)
        marked = np.zeros(self.count, bool)
        rows = [item for item in items if not isinstance(item, slice)]
        if rows:
            marked[rows] = True
        for item in items:
            if isinstance(item, slice):
                marked[item] = True
        marked &= ~self.rows_done
        self.rows_done |= marked
        self.open_count = self.count - int(self.rows_done.sum())
        return self._ranges(marked)

    def _ranges(self, mask: npt.NDArray[np.bool_] | None) -> list[EpochRange]:
        base, epoch = self.frame.base, self.epoch
        if _SELECTION not in self.frame.places:
            if mask is None:
                return [(base, base + self.count, epoch)]
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + base
            return [(start, end, epoch) for start, end in edges.reshape(-1, 2).tolist()]
        sequences = self.frame.sequences()
        if mask is not None:
            sequences = sequences[mask]
        if not len(sequences):
            return []
        breaks = np.flatnonzero(np.diff(sequences) != 1) + 1
        starts = sequences[np.concatenate([[0], breaks])]
        ends = sequences[np.concatenate([breaks - 1, [len(sequences) - 1]])] + 1
        return [(start, end, epoch) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def open_ranges(self) -> list[EpochRange]:
        """The rows that are neither acked nor nacked, or whose ack has not been collected."""
        if self.rows_done is None:
            return self._ranges(None)
        return self._ranges(~self.rows_done)


class SharedDelivered(Delivered):
    """A frame whose messages are acked and nacked from any thread."""

    __slots__ = ()

    def ack_row(self, row: int) -> Acknowledgement:
        if self.owner is not None:
            self.owner.from_thread(self, row, acked=True)
        return ACKNOWLEDGED

    def nack_row(self, row: int, delay: float | None = None) -> Acknowledgement:
        if self.owner is not None:
            self.owner.from_thread(self, row, acked=False, delay=delay)
        return ACKNOWLEDGED
