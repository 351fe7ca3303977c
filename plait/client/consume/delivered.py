"""A frame delivered to a consumer: its columns, decoded on demand, and the outcomes of its rows.

A row is open until it has an outcome.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.client.arguments import to_datetime
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome, Nacks
from plait.client.send.encoding import decode_headers, decode_tags
from plait.client.types import ACKNOWLEDGED, Acknowledgement, HeaderValue, Message, MessageId, PartitionName
from plait.errors import FrameError
from plait.frame.arrow import keys as key_column
from plait.frame.columns import Column
from plait.frame.validation import SMALL_COUNT
from plait.frame.view import FrameView

#: Looked up once: Python 3.11 runs a function for each access to an enum member.
_BODY, _KEY, _SELECTION = int(Column.BODY), int(Column.KEY), int(Column.SELECTION)

#: One row, a slice of rows, or a mask over all rows.
RowSelection = int | slice | npt.NDArray[np.bool_]
_SEVERAL = (slice, np.ndarray)

#: Later than any outcome.
NEVER = np.iinfo(np.int64).max


class OutcomeCollector(Protocol):
    """Collects the outcomes of frames: an ``AckCollector``."""

    async def ack(self, delivered: DeliveredFrame, rows: slice) -> None:
        """Ack rows of a frame, and wait until the broker has every outcome reported so far."""

    def collect_soon(self, delivered: DeliveredFrame) -> None:
        """The frame has outcomes to collect."""

    def from_thread(self, delivered: DeliveredFrame, row: int, failed: FailureOutcome | None) -> None:
        """Another thread reports an outcome: how the row failed; None: acked."""

    def absorb(self) -> None:
        """Take the outcomes that other threads have reported."""

    def gather(self) -> None:
        """Collect the outcomes of all frames."""

    async def flush(self) -> None:
        """Wait until the broker has every ack and nack reported so far."""

    #: The first attempt whose failure reason the broker needs.
    reasons_from: int
    #: The group's maximum number of attempts per message; 0: no limit.
    attempts: int


class DeliveredFrame:
    """One frame, or part of one, that was delivered in reply to a pull."""

    __slots__ = (
        "_attempts",
        "_bodies",
        "_headers",
        "_ids",
        "_rows",
        "_tags",
        "acking",
        "collector",
        "count",
        "epoch",
        "frame",
        "nacking",
        "open_count",
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
        collector: OutcomeCollector | None,
        attempts: list[tuple[int, int, int]],
    ) -> None:
        self.frame = frame
        self.subject = subject
        self.partition = partition
        self.collector = collector
        self.count = frame.count
        #: Bytes of memory that the frame takes once its rows are decoded.
        self.size = frame.size + frame.inflated_size
        self.epoch = frame.epoch
        if len(attempts) > 1:
            number = attempts[0][2]
            attempts = attempts[:1] if all(a == number for _, _, a in attempts) else sorted(attempts)
        self._attempts = attempts
        self._rows: list[int] | None = None
        #: The number of rows handed to the user; the rest is in the consumer's buffer.
        self.taken = 0
        #: The number of rows that the pull client received before this frame; ``PullClient.span`` is computed from it.
        self.position = 0
        self.open_count = frame.count
        self.rows_done: npt.NDArray[np.bool_] | None = None
        self.acking: list[int | slice] = []
        #: (number of entries of ``acking`` at that time, rows, failure outcome).
        self.nacking: list[tuple[int, RowSelection, FailureOutcome]] = []
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
            if self.frame.count <= SMALL_COUNT:
                return [key.decode() if key else None for key in self.frame.rows(_KEY, start, stop)]
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

    def deliver_at(self, row: int) -> datetime | None:
        if not self.frame.has(Column.DELIVER_AT):
            return None
        return to_datetime(int(self.frame.fixed(Column.DELIVER_AT)[row]))

    @property
    def store_time(self) -> datetime:
        return to_datetime(self.frame.store_time)

    def attempt(self, row: int) -> int:
        attempts = self._attempts
        if len(attempts) == 1:
            return attempts[0][2]
        if self._rows is None:
            self._rows = self.frame.sequences().tolist()
        sequence = self._rows[row]
        at = bisect_right(attempts, sequence, key=itemgetter(0)) - 1
        return attempts[at][2] if at >= 0 and sequence < attempts[at][1] else 1

    def epoch_of(self, row: int) -> int:
        """The epoch under which a row is handled."""
        return self.epoch

    def may_begin(self, rows: int | slice) -> bool:
        """The consumer still holds the right to handle these rows."""
        return True

    # --- outcomes -------------------------------------------------------------------------------

    def ack_row(self, row: int) -> Acknowledgement:
        acking = self.acking
        if acking:
            # The collector has been notified already.
            acking.append(row)
        elif self.collector is not None:
            # Before the row is recorded: this raises if the consumer is closed.
            self.collector.collect_soon(self)
            acking.append(row)
        return ACKNOWLEDGED

    def nack_row(self, row: int, failed: FailureOutcome = FAILED) -> Acknowledgement:
        collector = self.collector
        if collector is not None:
            collector.collect_soon(self)
            self.nack_rows(row, failed)
        return ACKNOWLEDGED

    def note(self, row: int, failed: FailureOutcome | None) -> None:
        """Record an outcome that another thread reported: how the row failed; None: acked."""
        if failed is None:
            self.acking.append(row)
        else:
            self.nack_rows(row, failed)

    def nack_rows(self, rows: RowSelection, failed: FailureOutcome = FAILED) -> None:
        """Record a failure, to be returned by ``collect``.

        Reasons that the broker does not need are dropped, so that more rows share one failure outcome.
        """
        wanted = 1 if self.collector is None else self.collector.reasons_from
        if isinstance(rows, np.ndarray) or failed.reason is None or failed.reject or wanted <= 1:
            self.nacking.append((len(self.acking), rows, failed))
            return
        plain = failed._replace(reason=None)
        if not isinstance(rows, slice) or len(self._attempts) == 1:
            first = rows.start if isinstance(rows, slice) else rows
            self.nacking.append((len(self.acking), rows, failed if self.attempt(first) >= wanted else plain))
            return
        start, stop, _ = rows.indices(self.count)
        late = self._attempt_numbers()[start:stop] >= wanted
        edges = [start, *(np.flatnonzero(np.diff(late)) + start + 1).tolist(), stop]
        for left, right in pairwise(edges):
            if left < right:
                self.nacking.append((len(self.acking), slice(left, right), failed if late[left - start] else plain))

    def _attempt_numbers(self) -> npt.NDArray[np.int64]:
        """``attempt`` of every row."""
        starts, ends, numbers = np.array(self._attempts).T
        sequences = self.frame.sequences()
        at = np.maximum(np.searchsorted(starts, sequences, "right") - 1, 0)
        within = (starts[at] <= sequences) & (sequences < ends[at])
        return np.where(within, numbers[at], 1)

    def collect(self) -> tuple[list[EpochRange], Nacks]:
        """Close the rows that have an outcome; returns (acks, nacks) as sequence ranges. The first outcome counts."""
        acking, self.acking = self.acking, []
        nacking, self.nacking = self.nacking, []
        if not nacking:
            return self._close_items(acking), {}
        kinds = {failed: number for number, failed in enumerate(dict.fromkeys(failed for _, _, failed in nacking))}
        if len(kinds) == 1 and not acking:
            return [], {nacking[0][2]: self._close_items([rows for _, rows, _ in nacking])}
        return self._close_mixed(acking, nacking, kinds)

    def _close_mixed(
        self,
        acking: Sequence[RowSelection],
        nacking: list[tuple[int, RowSelection, FailureOutcome]],
        kinds: dict[FailureOutcome, int],
    ) -> tuple[list[EpochRange], Nacks]:
        acked_by = self._first_indexes(acking)
        nacked_by = np.minimum(self._first_indexes([rows for _, rows, _ in nacking]), len(nacking))
        # The element after the last one is for rows that were not nacked.
        before = np.array([*(count for count, _, _ in nacking), NEVER])[nacked_by]
        how = np.array([*(kinds[failed] for _, _, failed in nacking), -1])[nacked_by]
        acked = acked_by < before
        if self.rows_done is None:
            self.rows_done = np.zeros(self.count, bool)
        failed_rows = ~acked & (how >= 0) & ~self.rows_done
        acks = self._close(acked)
        self._close(failed_rows)
        # Split by failure outcome in one pass: each row may have its own.
        rows = np.flatnonzero(failed_rows)
        rows = rows[np.argsort(how[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(how[rows])) + 1) if len(rows) else []
        names = list(kinds)
        return acks, {names[how[part[0]]]: self._row_ranges(part) for part in parts}

    def _first_indexes(self, items: Sequence[RowSelection]) -> npt.NDArray[np.int64]:
        """For each row the index of the first item that contains it; ``NEVER``: none does."""
        first = np.full(self.count, NEVER)
        # Reversed: the earlier index overwrites the later one.
        rows = [(row, number) for number, row in enumerate(items) if not isinstance(row, _SEVERAL)][::-1]
        if rows:
            at, numbers = np.array(rows).T
            first[at] = numbers
        for number, row in enumerate(items):
            if isinstance(row, _SEVERAL):
                first[row] = np.minimum(first[row], number)
        return first

    def _close(self, marked: npt.NDArray[np.bool_]) -> list[EpochRange]:
        """Close the marked rows that are open; returns their sequences."""
        assert self.rows_done is not None
        marked &= ~self.rows_done
        self.rows_done |= marked
        self.open_count = self.count - int(np.count_nonzero(self.rows_done))
        return self._ranges(marked)

    def _close_items(self, items: Sequence[RowSelection]) -> list[EpochRange]:
        if not items:
            return []
        if self.rows_done is None:
            whole = items[0]
            if (
                self.count == 1
                or (isinstance(whole, slice) and whole.start == 0 and whole.stop == self.count and len(items) == 1)
                or (len(items) == self.count <= SMALL_COUNT and self._names_all(items))
            ):
                self.rows_done = np.ones(self.count, bool)
                self.open_count = 0
                return self._ranges(None)
            self.rows_done = np.zeros(self.count, bool)
        marked = np.zeros(self.count, bool)
        rows = [item for item in items if not isinstance(item, _SEVERAL)]
        if rows:
            marked[rows] = True
        for item in items:
            if isinstance(item, _SEVERAL):
                marked[item] = True
        return self._close(marked)

    def _names_all(self, items: Sequence[RowSelection]) -> bool:
        """The items, one per row, are single rows and name every row once."""
        return all(type(item) is int for item in items) and len({*items}) == self.count

    def _ranges(self, mask: npt.NDArray[np.bool_] | None) -> list[EpochRange]:
        base, epoch = self.frame.base, self.epoch
        if _SELECTION not in self.frame.places:
            if mask is None:
                return [(base, base + self.count, epoch)]
            rows = np.flatnonzero(mask)
            if not len(rows):
                return []
            first, last = int(rows[0]), int(rows[-1])
            if last - first < len(rows):
                return [(base + first, base + last + 1, epoch)]
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + base
            return [(start, end, epoch) for start, end in edges.reshape(-1, 2).tolist()]
        rows = np.arange(self.count) if mask is None else np.flatnonzero(mask)
        return self._row_ranges(rows)

    def _row_ranges(self, rows: npt.NDArray[np.int64]) -> list[EpochRange]:
        """The sequence ranges of some rows, given in ascending order."""
        if not len(rows):
            return []
        epoch = self.epoch
        selected = _SELECTION in self.frame.places
        sequences = self.frame.sequences()[rows] if selected else rows + self.frame.base
        if len(sequences) == 1:
            # A fast path: if every row has its own reason there are many single rows.
            return [(int(sequences[0]), int(sequences[0]) + 1, epoch)]
        breaks = np.flatnonzero(np.diff(sequences) != 1) + 1
        starts = sequences[np.concatenate([[0], breaks])]
        ends = sequences[np.concatenate([breaks - 1, [len(sequences) - 1]])] + 1
        return [(start, end, epoch) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def open_ranges(self) -> list[EpochRange]:
        """The rows without an outcome, or whose outcome is not collected yet."""
        if self.rows_done is None:
            return self._ranges(None)
        return self._ranges(~self.rows_done)


class SharedDeliveredFrame(DeliveredFrame):
    """A frame whose messages are acked and nacked from any thread."""

    __slots__ = ()

    def ack_row(self, row: int) -> Acknowledgement:
        if self.collector is not None:
            self.collector.from_thread(self, row, None)
        return ACKNOWLEDGED

    def nack_row(self, row: int, failed: FailureOutcome = FAILED) -> Acknowledgement:
        if self.collector is not None:
            self.collector.from_thread(self, row, failed)
        return ACKNOWLEDGED
