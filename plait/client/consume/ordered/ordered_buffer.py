"""The buffer of an ordered consumer: hands out the rows of one key in order, and different keys independently.

A row is handed out when the user holds no earlier row of its key, except in the same batch, and when the consumer has
the lock of the row's LP at that moment. Rows without a key have no order.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from plait.client.consume.delivered import DeliveredFrame, Piece
from plait.client.consume.ordered.ordered_delivered import (
    ALONE,
    BATCHED,
    BROKEN,
    DONE,
    WAITS,
    LockRights,
    OrderedDelivered,
)
from plait.client.consume.row_runs import RowMask, mask_runs, runs_in
from plait.client.types import Message, PartitionName
from plait.model.logical_partitions import Hashes, LpSet

NO_KEYS: Final[Hashes] = np.empty(0, np.uint64)

_rights = operator.attrgetter("rights")


class HandedOutRows:
    """The rows that the user of one consumer holds, and their keys."""

    def __init__(self) -> None:
        #: Frames with held rows.
        self.frames: dict[OrderedDelivered, None] = {}
        #: Keys of rows handed out as single messages, and the number of rows held of each.
        self._alone: dict[int, int] = {}
        #: Keys of rows handed out in batches, ascending; None: to be computed again.
        self.batched: Hashes | None = None

    def add(self, delivered: OrderedDelivered, rows: int | npt.NDArray[np.int64], how: int) -> None:
        rights = delivered.rights
        delivered.states[rows] = how
        delivered.lock_epochs[rows] = rights.epochs[delivered.lps[rows]]
        delivered.handed_at[rows] = rights.clock.monotonic()
        self.frames[delivered] = None
        if how == BATCHED:
            self.batched = None

    def add_alone(self, delivered: OrderedDelivered, row: int, key: int | None) -> None:
        if key is not None:
            self._alone[key] = self._alone.get(key, 0) + 1
        self.add(delivered, row, ALONE)

    def release(self, key: int) -> bool:
        """Record that a single message of the key is closed; returns True if it was the last one."""
        left = self._alone.get(key, 0) - 1
        if left > 0:
            self._alone[key] = left
        else:
            self._alone.pop(key, None)
        return left <= 0

    def keys(self) -> Hashes:
        if not self.frames:
            return NO_KEYS
        batched = self._batched_keys() if self.batched is None else self.batched
        if not self._alone:
            return batched
        return np.concatenate([batched, np.fromiter(self._alone, np.uint64, len(self._alone))])

    def has_key(self, key: int) -> bool:
        """True if the user holds a row of the key."""
        if key in self._alone:
            return True
        batched = self._batched_keys() if self.batched is None else self.batched
        at = int(np.searchsorted(batched, np.uint64(key))) if len(batched) else 0
        return at < len(batched) and int(batched[at]) == key

    def _batched_keys(self) -> Hashes:
        parts = [
            delivered.keys[(delivered.states & BATCHED > 0) & delivered.keyed]
            for delivered in self.frames
            if delivered.keys is not None and delivered.keyed is not None
        ]
        self.batched = np.unique(np.concatenate(parts)) if parts else NO_KEYS
        return self.batched

    def gather(self) -> None:
        """Collect the outcomes that were reported for held rows."""
        for deliveries in {delivered.deliveries for delivered in self.frames}:
            if deliveries is not None:
                deliveries.gather()

    def oldest(self) -> float | None:
        """The time at which the longest-held row was handed out; None: none is held. May be called from any thread."""
        times = [
            float(d.handed_at[held].min())
            for d in list(self.frames)
            if (held := d.states & (ALONE | BATCHED) > 0).any()
        ]
        return min(times, default=None)


class OrderedBuffer:
    """The buffer of one consumer.

    It calls ``freed`` when rows can be handed out that could not be before and there are ``waiting`` callers.
    """

    def __init__(self, freed: Callable[[], None], waiting: Collection[object]) -> None:
        self._freed = freed
        self._waiting = waiting
        #: True if a failed row holds back its key.
        self.strict = False
        #: Frames with waiting rows, in the order of their arrival.
        self._frames: dict[OrderedDelivered, None] = {}
        self._arrivals = 0
        #: The number of waiting rows.
        self.count = 0
        #: The rows that were handed out.
        self.held = HandedOutRows()
        #: State of iteration: frames not scanned yet (None: no scan has begun), converted messages in reverse order,
        #: messages blocked by a held row of their key, and messages whose key is free again.
        self._scan: deque[OrderedDelivered] | None = None
        self._ready: list[tuple[Message, int | None]] = []
        self._blocked: dict[int, deque[Message]] = {}
        self._runnable: deque[tuple[Message, int]] = deque()
        #: Partitions whose lease had expired when iteration reached their rows.
        self._stalled: set[LockRights] = set()

    # --- in and out -----------------------------------------------------------------------------

    def append(self, delivered: DeliveredFrame) -> None:
        """Add a delivered frame; some of its rows may be closed already."""
        assert isinstance(delivered, OrderedDelivered)
        self._arrivals += 1
        delivered.number = self._arrivals
        delivered.waiting = int((delivered.states == WAITS).sum())
        if delivered.waiting:
            self._frames[delivered] = None
            self.count += delivered.waiting
            if self._scan is not None:
                self._scan.append(delivered)

    def available(self) -> int:
        held = self.held
        if held.frames:
            # Use reported outcomes too, although they are not sent to the broker yet.
            held.gather()
        if not len(held.keys()):
            for rights in set(map(_rights, self._frames)):
                if not rights.valid():
                    break
            else:
                return self.count
        return sum(int(mask.sum()) for _, mask in self._free())

    def take(self, count: int, *, apart: bool = False) -> list[Piece]:
        """Hand up to ``count`` rows to the user; the rows of one key are in order.

        ``apart``: no two rows have the same key, so that each may be handled by itself. In a strict group the rows of
        one key in a batch are from one partition: if one fails, its partition's broker redelivers the later ones after
        it. Rows of another partition would not be redelivered.
        """
        self.start_over()
        pieces: list[Piece] = []
        several = self.strict and not apart and self._have_several()
        given: list[tuple[LockRights, Hashes]] = []
        for delivered, mask in self._free():
            for rights, keys in given:
                if rights is not delivered.rights:
                    mask &= ~delivered.has_key(keys)
            if apart and delivered.keys is not None and delivered.keyed is not None:
                # Keys that were taken from earlier frames are held now.
                mask &= ~delivered.has_key(self.held.keys())
                rows = np.flatnonzero(mask & delivered.keyed)
                _, first = np.unique(delivered.keys[rows], return_index=True)
                mask[np.delete(rows, first)] = False
            rows = np.flatnonzero(mask)[:count]
            if not len(rows):
                continue
            if several and delivered.keys is not None and delivered.keyed is not None:
                given.append((delivered.rights, delivered.keys[rows][delivered.keyed[rows]]))
            if apart or len(rows) == 1:
                pieces += zip(repeat(delivered), rows.tolist(), (rows + 1).tolist(), strict=False)
            else:
                pieces += [(delivered, start, stop) for start, stop in runs_in(rows)]
            self.held.add(delivered, rows, BATCHED)
            self._took(delivered, len(rows))
            count -= len(rows)
            if count <= 0:
                break
        return pieces

    def next(self) -> Message | None:
        message = self._next()
        if message is None and any(rights.valid() for rights in self._stalled):
            # A lease was renewed meanwhile: scan all waiting rows again, in order.
            self.start_over()
            message = self._next()
        return message

    def _next(self) -> Message | None:
        while self._runnable:
            message, key = self._runnable.popleft()
            if self._may_go(message):
                if not self.held.has_key(key):
                    return self._hand_out_alone(message, key)
                self._blocked.setdefault(key, deque()).appendleft(message)
            elif _frame_of(message).rights not in self._stalled:
                # This row was returned; a later row of the key may be waiting.
                self._unblock(key)
        while self._ready or self._scan_on():
            message, found = self._ready.pop()
            if self._may_go(message):
                if found is None or not self.held.has_key(found):
                    return self._hand_out_alone(message, found)
                self._blocked.setdefault(found, deque()).append(message)
        return None

    def _scan_on(self) -> bool:
        """Convert the waiting rows of the next unscanned frame; returns False if there is none."""
        if self._scan is None:
            self._scan = deque(self._frames)
        while self._scan and not self._ready:
            delivered = self._scan.popleft()
            if not delivered.waiting:
                continue
            waiting = np.flatnonzero(delivered.states == WAITS)
            first, last = int(waiting[0]), int(waiting[-1]) + 1
            pairs = zip(delivered.messages(first, last), delivered.key_list(first, last), strict=True)
            if last - first == len(waiting):
                self._ready = list(pairs)
            else:
                rows = list(pairs)
                self._ready = [rows[row - first] for row in waiting.tolist()]
            self._ready.reverse()
        return bool(self._ready)

    def _may_go(self, message: Message) -> bool:
        """True if the row waits and its lease is valid. After an expired lease, the rows wait for the next scan."""
        delivered = _frame_of(message)
        rights = delivered.rights
        if rights in self._stalled:
            return False
        if not rights.valid():
            self._stalled.add(rights)
            return False
        return bool(delivered.states[message._row] == WAITS)

    def _hand_out_alone(self, message: Message, key: int | None) -> Message:
        delivered = _frame_of(message)
        self.held.add_alone(delivered, message._row, key)
        self._took(delivered, 1)
        return message

    def _took(self, delivered: OrderedDelivered, count: int) -> None:
        self.count -= count
        delivered.waiting -= count
        if not delivered.waiting:
            self._frames.pop(delivered, None)

    # --- which ones -----------------------------------------------------------------------------

    def _free(self) -> Iterator[tuple[OrderedDelivered, RowMask]]:
        """For each frame the mask of rows that can be handed out, in one batch if they have the same key."""
        busy = self.held.keys()
        # Checked once for all frames: a lease renewed in between must not let later rows pass earlier ones.
        valid: set[LockRights] = set()
        for rights in set(map(_rights, self._frames)):
            if rights.valid():
                valid.add(rights)
        for delivered in list(self._frames):
            if delivered.rights not in valid:
                continue
            mask = delivered.states == WAITS
            if len(busy):
                mask &= ~delivered.has_key(busy)
            yield delivered, mask

    def _have_several(self) -> bool:
        """Rows of one key may be buffered from several partitions, as an older one has unfinished rows."""
        rights = set(map(_rights, self._frames))
        return len(rights) > 1 and bool((np.sum([each.open for each in rights], axis=0) > 1).any())

    # --- outcomes -------------------------------------------------------------------------------

    def acked(self, delivered: OrderedDelivered, row: int) -> None:
        """Free the key of an acked row, so that the next row of the key can be handed out."""
        state = delivered.states[row]
        if state == ALONE:
            delivered.states[row] = DONE
            self._release(delivered.key(row))
        elif state == BATCHED:
            delivered.states[row] = DONE
            self.held.batched = None

    def _release(self, key: int | None) -> None:
        if key is not None and self.held.release(key) and self._unblock(key) and self._waiting:
            self._freed()

    def _unblock(self, key: int) -> bool:
        """Make the next blocked row of a free key runnable; returns False if there is none."""
        blocked = self._blocked.get(key)
        while blocked:
            message = blocked.popleft()
            if not blocked:
                del self._blocked[key]
            if _frame_of(message).states[message._row] == WAITS:
                self._runnable.append((message, key))
                return True
        return False

    def collected(self, delivered: OrderedDelivered) -> None:
        """Free the keys of the frame's closed rows, after its outcomes were collected."""
        done, states = delivered.rows_done, delivered.states
        if done is None:
            return
        closed = done & (states != DONE)
        if closed.any():
            was = states[closed]
            self._took(delivered, int((was == WAITS).sum()))
            alone = np.flatnonzero(closed & (states & ALONE > 0)).tolist()
            states[closed] = DONE
            for row in alone:
                self._release(delivered.key(row))
            if (was & BATCHED > 0).any():
                self.held.batched = None
                self.start_over()
                if self._waiting:
                    self._freed()
        if not (states & (ALONE | BATCHED) > 0).any():
            self.held.frames.pop(delivered, None)

    # --- taking rows back -----------------------------------------------------------------------

    def take_back(self, partition: PartitionName | None = None, lps: LpSet | None = None) -> list[Piece]:
        """Remove and return the waiting rows of a partition and of some LPs (None: of all)."""
        self.start_over()
        pieces: list[Piece] = []
        for delivered in list(self._frames):
            if partition is not None and delivered.partition != partition:
                continue
            mask = delivered.states == WAITS
            if lps is not None:
                mask &= lps[delivered.lps]
            runs = mask_runs(mask)
            if runs:
                pieces += [(delivered, first, end) for first, end in runs]
                delivered.states[mask] = BROKEN
                self._took(delivered, int(mask.sum()))
        return pieces

    def put_back(self, pieces: list[Piece]) -> None:
        self.start_over()
        for delivered, start, stop in pieces:
            assert isinstance(delivered, OrderedDelivered)
            rows = np.arange(start, stop)
            rows = rows[delivered.states[rows] == BATCHED]
            delivered.states[rows] = WAITS
            self.count += len(rows)
            delivered.waiting += len(rows)
            if len(rows):
                self._frames[delivered] = None
        self.held.batched = None
        self._frames = dict.fromkeys(sorted(self._frames, key=lambda delivered: delivered.number))

    def start_over(self) -> None:
        """Restart the scan of iteration over all waiting rows: more of them may be free to hand out."""
        self._scan = None
        self._ready = []
        self._blocked.clear()
        self._runnable.clear()
        self._stalled.clear()


def _frame_of(message: Message) -> OrderedDelivered:
    delivered = message._delivered
    assert isinstance(delivered, OrderedDelivered)
    return delivered
