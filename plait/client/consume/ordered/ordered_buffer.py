"""Rows that an ordered consumer has and that nobody has got yet: one key strictly in order, different keys at will.

A row is handed out when no earlier row of its key is in the user's hands, but for those of its own batch, and when the
lock of its logical partition is ours at that moment. Rows without a key are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from plait.client.consume.ack_collector import Piece
from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.ordered.lock_rights import LockRights
from plait.client.consume.ordered.ordered_delivered import (
    ALONE,
    BATCHED,
    BROKEN,
    DONE,
    WAITS,
    OrderedDelivered,
    RowMask,
)
from plait.client.types import Message, PartitionName
from plait.model.logical_partitions import Hashes, LpSet


class OrderedBuffer:
    """See the module. ``freed`` is called when rows may be handed out that could not be before."""

    def __init__(self, freed: Callable[[], None]) -> None:
        self._freed = freed
        #: A row that fails holds its key.
        self.strict = False
        #: Frames with rows that wait, in the order of their arrival.
        self._frames: dict[OrderedDelivered, None] = {}
        self._arrivals = 0
        #: Rows that wait.
        self.count = 0
        #: Keys in the user's hands, one message at a time: how many rows.
        self._alone: dict[int, int] = {}
        #: Frames with rows in the user's hands; in batches, which may be many.
        self._handed: dict[OrderedDelivered, None] = {}
        self._busy: Hashes | None = None
        #: Iteration: frames that it has not looked at (None: at none), messages that it has made, the next one last,
        #: those that wait for their key, and those whose key is free again.
        self._scan: deque[OrderedDelivered] | None = None
        self._ready: list[tuple[Message, int | None]] = []
        self._blocked: dict[int, deque[Message]] = {}
        self._runnable: deque[tuple[Message, int]] = deque()
        #: Partitions whose lease was over when iteration came to them.
        self._stalled: set[LockRights] = set()

    # --- in and out -----------------------------------------------------------------------------

    def append(self, delivered: DeliveredFrame) -> None:
        """A frame came, some of whose rows may be done already."""
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
        """How many rows can be handed out now."""
        self._gather()
        if self._nothing_in_hands() and all(rights.valid() for rights in self._rights()):
            return self.count
        return sum(int(mask.sum()) for _, mask in self._free())

    def take(self, count: int) -> list[Piece]:
        """Up to so many rows, which are the user's now; those of one key in their order.

        In a strict group these are of one partition: what is behind a row that failed comes again by itself, and may be
        left as it is; another partition's would not.
        """
        self._start_over()
        pieces: list[Piece] = []
        several = self._have_several()
        given: dict[LockRights, list[Hashes]] = {}
        for delivered, mask in self._free():
            if several and delivered.keys is not None and delivered.keyed is not None:
                for keys in [
                    keys for rights, parts in given.items() if rights is not delivered.rights for keys in parts
                ]:
                    mask &= ~(np.isin(delivered.keys, keys) & delivered.keyed)
            rows = np.flatnonzero(mask)[:count]
            if not len(rows):
                continue
            if several and delivered.keys is not None and delivered.keyed is not None:
                given.setdefault(delivered.rights, []).append(delivered.keys[rows][delivered.keyed[rows]])
            breaks = np.flatnonzero(np.diff(rows) != 1) + 1
            pieces += [(delivered, int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks)]
            self._hand(delivered, rows, BATCHED)
            count -= len(rows)
            if count <= 0:
                break
        return pieces

    def take_apart(self, count: int) -> list[Piece]:
        """The same, and no two rows of one key: any of them may be handled by itself."""
        self._start_over()
        pieces: list[Piece] = []
        for delivered, mask in list(self._free()):
            if delivered.keys is not None and delivered.keyed is not None:
                # What the frames before gave is in hands now.
                mask &= ~(np.isin(delivered.keys, self._busy_keys()) & delivered.keyed)
                rows = np.flatnonzero(mask & delivered.keyed)
                _, first = np.unique(delivered.keys[rows], return_index=True)
                mask[np.delete(rows, first)] = False
            rows = np.flatnonzero(mask)[:count]
            pieces += [(delivered, row, row + 1) for row in rows.tolist()]
            if len(rows):
                self._hand(delivered, rows, BATCHED)
            count -= len(rows)
            if count <= 0:
                break
        return pieces

    def next(self) -> Message | None:
        """One row as a message, which is the user's now; None: there is none."""
        message = self._next()
        if message is None and any(rights.valid() for rights in self._stalled):
            # Renewed meanwhile: all of its rows are looked at again, in their order.
            self._start_over()
            message = self._next()
        return message

    def _next(self) -> Message | None:
        while self._runnable:
            message, key = self._runnable.popleft()
            if self._may_go(message):
                if not self._is_busy(key):
                    return self._hand_alone(message, key)
                self._blocked.setdefault(key, deque()).appendleft(message)
            elif _frame_of(message).rights not in self._stalled:
                # It was given back; those behind it may be others.
                self._unblock(key)
        while self._ready or self._scan_on():
            message, found = self._ready.pop()
            if self._may_go(message):
                if found is None or not self._is_busy(found):
                    return self._hand_alone(message, found)
                self._blocked.setdefault(found, deque()).append(message)
        return None

    def _scan_on(self) -> bool:
        """Look at the next frame that iteration has not looked at; whether there is one."""
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
        """The row waits, and its lock is ours; if not, none of its partition's go until all are looked at again."""
        delivered = _frame_of(message)
        rights = delivered.rights
        if rights in self._stalled:
            return False
        if not rights.valid():
            self._stalled.add(rights)
            return False
        return bool(delivered.states[message._row] == WAITS)

    def _is_busy(self, key: int) -> bool:
        if key in self._alone:
            return True
        busy = self._busy_batched()
        if not len(busy):
            return False
        at = int(np.searchsorted(busy, np.uint64(key)))
        return at < len(busy) and int(busy[at]) == key

    def _hand_alone(self, message: Message, key: int | None) -> Message:
        if key is not None:
            self._alone[key] = self._alone.get(key, 0) + 1
        self._hand(_frame_of(message), message._row, ALONE)
        return message

    def _hand(self, delivered: OrderedDelivered, rows: int | npt.NDArray[np.int64], how: int) -> None:
        count = 1 if isinstance(rows, int) else len(rows)
        delivered.states[rows] = how
        delivered.lock_epochs[rows] = delivered.rights.epochs[delivered.lps[rows]]
        delivered.handed_at[rows] = delivered.rights.now()
        self._handed[delivered] = None
        if how == BATCHED:
            self._busy = None
        self._took(delivered, count)

    def _took(self, delivered: OrderedDelivered, count: int) -> None:
        """So many of its rows wait no more."""
        self.count -= count
        delivered.waiting -= count
        if not delivered.waiting:
            self._frames.pop(delivered, None)

    # --- which ones -----------------------------------------------------------------------------

    def _free(self) -> Iterator[tuple[OrderedDelivered, RowMask]]:
        """The rows of each frame that can be handed out; those of one key together."""
        busy = self._busy_keys()
        # Once for all frames: a lease that is renewed in between must not let later rows go before earlier ones.
        valid = {rights for rights in self._rights() if rights.valid()}
        for delivered in list(self._frames):
            if delivered.rights not in valid:
                continue
            mask = delivered.states == WAITS
            if len(busy) and delivered.keys is not None and delivered.keyed is not None:
                mask &= ~(np.isin(delivered.keys, busy) & delivered.keyed)
            yield delivered, mask

    def _rights(self) -> set[LockRights]:
        return {delivered.rights for delivered in self._frames}

    def _have_several(self) -> bool:
        """Some key's rows may be here from several partitions: where an older one has rows left, or again."""
        rights = self._rights() if self.strict else ()
        return len(rights) > 1 and bool((np.sum([each.open for each in rights], axis=0) > 1).any())

    def _nothing_in_hands(self) -> bool:
        return not self._alone and not len(self._busy_batched())

    def _busy_keys(self) -> Hashes:
        """Keys that are in the user's hands."""
        batched = self._busy_batched()
        if not self._alone:
            return batched
        return np.concatenate([batched, np.fromiter(self._alone, np.uint64, len(self._alone))])

    def _busy_batched(self) -> Hashes:
        """Those of batches, ascending."""
        if self._busy is None:
            parts = [
                delivered.keys[(delivered.states & BATCHED > 0) & delivered.keyed]
                for delivered in self._handed
                if delivered.keys is not None and delivered.keyed is not None
            ]
            self._busy = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
        return self._busy

    def _gather(self) -> None:
        """What was said counts, even if it has not left for the broker."""
        if self._handed:
            for owner in {d.owner: None for d in self._handed}:
                if owner is not None:
                    owner.gather()

    def oldest(self) -> float | None:
        """Since when the user has had the row that it has had longest; None: it has none. From any thread."""
        times = [
            float(d.handed_at[held].min())
            for d in list(self._handed)
            if (held := d.states & (ALONE | BATCHED) > 0).any()
        ]
        return min(times, default=None)

    # --- what became of them --------------------------------------------------------------------

    def acked(self, delivered: OrderedDelivered, row: int) -> None:
        """The row is done, so that the next one of its key may follow."""
        state = delivered.states[row]
        if state == ALONE:
            delivered.states[row] = DONE
            self._release(delivered.key(row))
        elif state == BATCHED:
            delivered.states[row] = DONE
            self._busy = None

    def _release(self, key: int | None) -> None:
        if key is None:
            return
        left = self._alone.get(key, 0) - 1
        if left > 0:
            self._alone[key] = left
            return
        self._alone.pop(key, None)
        if self._unblock(key):
            self._freed()

    def _unblock(self, key: int) -> bool:
        """The next row of a key that nobody has in hands may go; whether there is one."""
        blocked = self._blocked.get(key)
        while blocked:
            message = blocked.popleft()
            if not blocked:
                del self._blocked[key]
            if _frame_of(message).states[message._row] == WAITS:
                self._runnable.append((message, key))
                return True
        return False

    def settled(self, delivered: OrderedDelivered) -> None:
        """What was said of rows of the frame is noted."""
        done, states = delivered.rows_done, delivered.states
        if done is None:
            return
        fresh = done & (states != DONE)
        if fresh.any():
            was = states[fresh]
            self._took(delivered, int((was == WAITS).sum()))
            alone = np.flatnonzero(fresh & (states & ALONE > 0)).tolist()
            states[fresh] = DONE
            for row in alone:
                self._release(delivered.key(row))
            if (was & BATCHED > 0).any():
                self._busy = None
                self._start_over()
                self._freed()
        if not (states & (ALONE | BATCHED) > 0).any():
            self._handed.pop(delivered, None)

    # --- what is not ours any more --------------------------------------------------------------

    def take_back(self, partition: PartitionName | None = None, lps: LpSet | None = None) -> list[Piece]:
        """Rows that nobody began with, of a partition and of some of its logical partitions, which nobody gets now."""
        self._start_over()
        pieces: list[Piece] = []
        for delivered in list(self._frames):
            if partition is not None and delivered.partition != partition:
                continue
            mask = delivered.states == WAITS
            if lps is not None:
                mask &= lps[delivered.lps]
            runs = delivered.runs(mask)
            if runs:
                pieces += [(delivered, first, end) for first, end, _ in runs]
                delivered.states[mask] = BROKEN
                self._took(delivered, int(mask.sum()))
        return pieces

    def put_back(self, pieces: list[Piece]) -> None:
        """Rows that were taken and that nobody began with wait again."""
        self._start_over()
        for delivered, start, stop in pieces:
            assert isinstance(delivered, OrderedDelivered)
            rows = np.arange(start, stop)
            rows = rows[delivered.states[rows] == BATCHED]
            delivered.states[rows] = WAITS
            self.count += len(rows)
            delivered.waiting += len(rows)
            if len(rows):
                self._frames[delivered] = None
        self._busy = None
        self._frames = dict.fromkeys(sorted(self._frames, key=lambda delivered: delivered.number))

    def renewed(self) -> None:
        """Locks were won, or a lease goes on: what could not be handed out perhaps can."""
        self._start_over()

    def _start_over(self) -> None:
        """Iteration looks at all rows that wait again."""
        self._scan = None
        self._ready = []
        self._blocked.clear()
        self._runnable.clear()
        self._stalled.clear()


def _frame_of(message: Message) -> OrderedDelivered:
    delivered = message._delivered
    assert isinstance(delivered, OrderedDelivered)
    return delivered
