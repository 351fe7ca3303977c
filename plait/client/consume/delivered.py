"""The frames delivered to a consumer: their columns, decoded on demand, and the outcomes of their rows.

A row is open until it has an outcome. ``Deliveries`` has the open frames of one partition.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from itertools import pairwise, repeat
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from plait.client.arguments import to_datetime
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome
from plait.client.consume.row_runs import (
    RowMask,
    RowSelection,
    Run,
    attempts_of,
    first_outcomes,
    mask_runs,
    merged,
    rows_of,
    runs_by_number,
    runs_in,
)
from plait.client.send.encoding import decode_tags
from plait.client.types import ACKNOWLEDGED, Acknowledgement, HeaderValue, Message, MessageId, PartitionName, SendReply
from plait.errors import Closed, FrameError
from plait.frame.arrow import keys as key_column
from plait.frame.columns import SMALL_COUNT, Column
from plait.frame.header_block import HeaderBlock, decode_headers
from plait.frame.view import FrameView

#: Looked up once: Python 3.11 runs a function for each access to an enum member.
_BODY, _KEY, _SELECTION = int(Column.BODY), int(Column.KEY), int(Column.SELECTION)
#: ``rows_done`` of small frames with all rows done. They share it, because done rows stay done.
_ALL_DONE = np.ones(SMALL_COUNT, bool)
#: The failed rows of a frame by failure outcome.
FailedRuns = dict[FailureOutcome, list[Run]]


class DeliveredFrame:
    """One frame, or part of one, that was delivered in reply to a pull."""

    #: True: ``note`` only appends an ack to ``acking``, so ``report_row`` may do that. False in ``OrderedDelivered``.
    plain_acks: ClassVar = True

    def __init__(
        self,
        frame: FrameView,
        subject: str,
        partition: PartitionName,
        deliveries: Deliveries | None,
        attempts: list[tuple[int, int, int]],
    ) -> None:
        self.frame, self.subject, self.partition = frame, subject, partition
        #: None: the rows need no outcome.
        self.deliveries = deliveries
        self.count = self.open_count = frame.count
        #: Bytes of memory that the frame takes once its rows are decoded.
        self.size = frame.size + frame.inflated_size
        self.epoch = frame.epoch
        #: The broker's number for this delivery; 0: sequences identify its rows.
        self.tag = 0
        if len(attempts) > 1:
            number = attempts[0][2]
            attempts = attempts[:1] if all(a == number for _, _, a in attempts) else sorted(attempts)
        self._attempts = attempts
        #: ``attempt`` of every row, once one was read.
        self._numbers: list[int] | None = None
        #: The number of rows handed to the user; the rest is in the consumer's buffer.
        self.taken = 0
        #: The number of rows that the partition delivered before this frame.
        self.position = 0
        self.rows_done: RowMask | None = None
        self.acking: list[int | slice] = []
        #: For each failure: (the length of ``acking`` then, which shows the acks before it; rows; failure outcome).
        self.nacking: list[tuple[int, RowSelection, FailureOutcome]] = []
        self._ids: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None
        #: The encoded tags and headers of all rows, once one was read.
        self._tags: list[bytes] | None = None
        self._headers: HeaderBlock | list[bytes] | None = None

    # --- messages -------------------------------------------------------------------------------

    def messages(self, start: int, stop: int) -> list[Message]:
        frame = self.frame
        bodies = frame.rows(_BODY, start, stop)
        if frame.count == 1 and _KEY not in frame.places and _SELECTION not in frame.places:
            return [Message(bodies[0], None, frame.base, self, 0)] if bodies else []
        keys = self._keys(start, stop)
        sequences: Sequence[int] = range(frame.base + start, frame.base + stop)
        if _SELECTION in frame.places:
            sequences = frame.sequences()[start:stop].tolist()
        return list(map(Message, bodies, keys, sequences, repeat(self), range(start, stop)))

    def _keys(self, start: int, stop: int) -> list[str | None] | repeat[None]:
        if _KEY not in self.frame.places:
            return repeat(None)
        try:
            if self.frame.count <= SMALL_COUNT:
                return [key.decode() if key else None for key in self.frame.rows(_KEY, start, stop)]
            return cast("list[str | None]", key_column(self.frame).slice(start, stop - start).to_pylist())
        except UnicodeDecodeError as error:
            raise FrameError(f"an order key is not UTF-8: {error}") from None

    def tags(self, row: int) -> list[str]:
        if not self.frame.has(Column.TAGS):
            return []
        self._tags = self._tags or self.frame.binary(Column.TAGS).to_pylist()
        return decode_tags(self._tags[row])

    def headers(self, row: int) -> dict[str, HeaderValue]:
        if not self.frame.has(Column.HEADERS):
            return {}
        frame = self.frame
        found = self._headers = self._headers or frame.header_block() or frame.rows(Column.HEADERS, 0, frame.count)
        return found.map(row) if isinstance(found, HeaderBlock) else decode_headers(found[row])

    def message_id(self, row: int) -> MessageId:
        producers, numbers = self._ids = self._ids or self.frame.message_ids()
        return MessageId(int(producers[row]), int(numbers[row]))

    def time(self, column: Column, row: int) -> datetime | None:
        return to_datetime(int(self.frame.fixed(column)[row])) if self.frame.has(column) else None

    def attempt(self, row: int) -> int:
        if len(self._attempts) == 1:
            return self._attempts[0][2]
        self._numbers = self._numbers or attempts_of(self._attempts, self.frame.sequences()).tolist()
        return self._numbers[row]

    def epoch_of(self, row: int) -> int:
        return self.epoch

    def may_begin(self, rows: int | slice) -> bool:
        """True if the consumer still has the right to handle these rows."""
        return True

    # --- outcomes -------------------------------------------------------------------------------

    def report_row(self, row: int, failed: FailureOutcome | None) -> Acknowledgement:
        """Report the outcome of a row: how it failed; None: acked."""
        deliveries = self.deliveries
        if deliveries is None:
            return ACKNOWLEDGED
        if deliveries.any_thread:
            deliveries.from_thread(self, row, failed)
            return ACKNOWLEDGED
        if not self.acking:
            # Before the row is recorded: this raises if the consumer is closed.
            deliveries.collect_soon(self)
        if failed is None and self.plain_acks:
            self.acking.append(row)
        else:
            self.note(row, failed)
        return ACKNOWLEDGED

    def report_rows(self, rows: slice, failed: FailureOutcome | None, *, soon: bool = True) -> None:
        """Report one outcome for those of the rows that have none. Without ``soon`` the caller has to flush."""
        deliveries = self.deliveries
        if deliveries is None:
            return
        if deliveries.inbox:
            # Outcomes that other threads reported earlier take effect first.
            deliveries.absorb()
        deliveries.collect_soon(self, soon=soon)
        if failed is None:
            self.acking.append(rows)
        else:
            self.nack_rows(rows, failed)

    def note(self, row: int, failed: FailureOutcome | None) -> None:
        """Record an outcome, to be returned by ``collect``: how the row failed; None: acked."""
        if failed is None:
            self.acking.append(row)
        else:
            self.nack_rows(row, failed)

    def nack_rows(self, rows: RowSelection, failed: FailureOutcome = FAILED) -> None:
        """Record a failure, to be returned by ``collect``.

        Reasons that the broker does not need are dropped, so that more rows share one failure outcome.
        """
        wanted = 1 if self.deliveries is None else self.deliveries.reasons_from
        if isinstance(rows, np.ndarray) or failed.reason is None or failed.reject or wanted <= 1:
            self.nacking.append((len(self.acking), rows, failed))
            return
        plain = failed._replace(reason=None)
        if not isinstance(rows, slice) or len(self._attempts) == 1:
            first = rows.start if isinstance(rows, slice) else rows
            self.nacking.append((len(self.acking), rows, failed if self.attempt(first) >= wanted else plain))
            return
        start, stop, _ = rows.indices(self.count)
        late = attempts_of(self._attempts, self.frame.sequences())[start:stop] >= wanted
        edges = [start, *(np.flatnonzero(np.diff(late)) + start + 1).tolist(), stop]
        for left, right in pairwise(edges):
            self.nacking.append((len(self.acking), slice(left, right), failed if late[left - start] else plain))

    def collect(self) -> tuple[list[Run], FailedRuns]:
        """Close the rows that have an outcome; returns the acked and the failed rows, by the first outcome of each."""
        acking, self.acking = self.acking, []
        nacking, self.nacking = self.nacking, []
        if not nacking:
            return self._close_items(acking), {}
        kinds = {failed: number for number, failed in enumerate(dict.fromkeys(failed for _, _, failed in nacking))}
        if len(kinds) == 1 and not acking:
            return [], {nacking[0][2]: self._close_items([rows for _, rows, _ in nacking])}
        acked, nacked_by = first_outcomes(acking, nacking, self.count)
        acks = self.close_rows(acked)
        how = np.array([*(kinds[failed] for _, _, failed in nacking), -1])[nacked_by]
        failed_rows = ~acked & (how >= 0)
        if self.rows_done is not None:
            failed_rows &= ~self.rows_done
        self.close_rows(failed_rows)
        names = list(kinds)
        return acks, {names[number]: runs for number, runs in runs_by_number(how, failed_rows).items()}

    def _close_items(self, items: Sequence[RowSelection]) -> list[Run]:
        if not items:
            return []
        count = self.count
        if self.rows_done is None and (
            count == 1
            or (len(items) == 1 and isinstance(items[0], slice) and items[0] == slice(0, count))
            or (len(items) == count <= SMALL_COUNT and len({item for item in items if type(item) is int}) == count)
        ):
            self.rows_done = _ALL_DONE[:count] if count <= SMALL_COUNT else np.ones(count, bool)
            self._closed(count)
            return [(0, count)]
        marked = np.zeros(count, bool)
        rows = [item for item in items if type(item) is int]
        if rows:
            marked[rows] = True
        if len(rows) < len(items):
            for item in items:
                marked[item] = True
        return self.close_rows(marked)

    def close_rows(self, mask: RowMask) -> list[Run]:
        """Close rows; returns the runs of those that were open."""
        if self.rows_done is None:
            self.rows_done = np.zeros(self.count, bool)
        mask = mask & ~self.rows_done
        self.rows_done |= mask
        self._closed(int(np.count_nonzero(mask)))
        return mask_runs(mask)

    def _closed(self, count: int) -> None:
        self.open_count -= count
        deliveries = self.deliveries
        if deliveries is not None and self in deliveries.open:
            deliveries.held -= count
            if not self.open_count:
                del deliveries.open[self]
                deliveries.bytes -= self.size

    def ranges(self, runs: list[Run]) -> list[EpochRange]:
        """Runs of rows as sequence ranges that contain no other sequence."""
        base, epoch = self.frame.base, self.epoch
        if _SELECTION not in self.frame.places:
            return [(base + first, base + end, epoch) for first, end in runs]
        return [(start, end, epoch) for start, end in runs_in(self.frame.sequences()[rows_of(runs)])]

    def put(self, runs: list[Run], into: RangesByFrame) -> None:
        """Add the ranges of these runs to outcomes that are to be sent."""
        into.setdefault(None, []).extend(self.ranges(runs))

    def widened(self, ranges: list[EpochRange]) -> list[EpochRange]:
        """The ranges, or fewer ranges with the same effect."""
        return ranges

    def open_ranges(self) -> list[EpochRange]:
        return self.ranges([(0, self.count)] if self.rows_done is None else mask_runs(~self.rows_done))


#: Rows [start, stop) of a delivered frame.
Piece = tuple[DeliveredFrame, int, int]
#: Ranges by the frame that delivered the rows; under None: plain sequence ranges, valid without a frame's tag.
RangesByFrame = dict[DeliveredFrame | None, list[EpochRange]]


def flat(found: RangesByFrame) -> tuple[list[EpochRange], list[int]]:
    """All ranges, and the tag of each; no tags if all are 0."""
    ranges: list[EpochRange] = []
    tags: list[int] = []
    for frame, several in found.items():
        joined = merged(several) if len(several) > 1 else several
        if frame is not None:
            joined = frame.widened(joined)
        ranges += joined
        tags += [0 if frame is None else frame.tag] * len(joined)
    return ranges, tags if any(tags) else []


class Deliveries:
    """The open frames of one partition, and the outcomes that are not collected yet.

    Only ``from_thread`` may be called from another thread than the loop's.
    """

    def __init__(
        self,
        schedule: Callable[[DeliveredFrame], None],
        gather: Callable[[], None],
        flush: Callable[[], Awaitable[None]],
        *,
        any_thread: bool = False,
    ) -> None:
        self._schedule = schedule
        #: ``gather`` collects all outcomes now. ``flush`` waits until the broker has every outcome reported so far.
        self.gather = gather
        self.flush = flush
        #: True if messages are acked and nacked from any thread.
        self.any_thread = any_thread
        #: Frames with open rows, oldest first.
        self.open: dict[DeliveredFrame, None] = {}
        #: The number of open rows, the bytes of their frames, and the number of rows received in all.
        self.held = self.bytes = self._received = 0
        #: Frames with outcomes that are not collected yet, and whether these are about to be collected.
        self.unsent: dict[DeliveredFrame, None] = {}
        self.scheduled = False
        #: The first attempt whose failure reason the broker needs.
        self.reasons_from = 1
        #: The group's maximum number of attempts per message; 0: no limit.
        self.attempts = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        #: True: outcomes after the closing have no effect, instead of an error, because the subject was deleted.
        self.gone = False
        self.reply: SendReply | None = None
        #: Outcomes reported by other threads: a frame, a row, and its failure; None: acked.
        self.inbox: deque[tuple[DeliveredFrame, int, FailureOutcome | None]] = deque()
        self._inbox_scheduled = False

    def add(self, delivered: DeliveredFrame) -> None:
        delivered.position = self._received
        self._received += delivered.count
        self.open[delivered] = None
        self.held += delivered.count
        self.bytes += delivered.size

    def span(self) -> int:
        """Rows received from the first row of the oldest open frame on. At least one frame must be open."""
        return self._received - next(iter(self.open)).position

    def forget(self) -> None:
        """Stop tracking all frames: their messages no longer exist."""
        for delivered in self.open:
            delivered.deliveries = None
        self.open, self.held, self.bytes = {}, 0, 0

    def check_open(self) -> asyncio.AbstractEventLoop:
        """Raise ``Closed`` if no more outcomes are accepted."""
        if (self.closed and not self.gone) or self.loop is None:
            raise Closed("the consumer is closed; messages that were not acked by then were returned to the group")
        return self.loop

    def collect_soon(self, delivered: DeliveredFrame, *, soon: bool = True) -> None:
        """Note that rows of the frame get outcomes. Without ``soon`` the caller has to flush. May raise ``Closed``."""
        if self.closed or self.loop is None:
            self.check_open()
        self.unsent[delivered] = None
        if soon and not self.scheduled:
            self._schedule(delivered)

    def from_thread(self, delivered: DeliveredFrame, row: int, failed: FailureOutcome | None) -> None:
        """Report an outcome from any thread. It is queued; the loop is woken once for all queued outcomes."""
        loop = self.check_open()
        self.inbox.append((delivered, row, failed))
        if not self._inbox_scheduled:
            self._inbox_scheduled = True
            try:
                loop.call_soon_threadsafe(self.absorb)
            except RuntimeError:
                self.closed = True  # The loop has ended.
                self.check_open()

    def absorb(self) -> None:
        """Take the outcomes that other threads have queued."""
        self._inbox_scheduled = False
        while self.inbox:
            delivered, row, failed = self.inbox.popleft()
            delivered.note(row, failed)
            if not self.closed:
                self.collect_soon(delivered)
