"""How many rows a consumer prefetches, the share of each partition, and the buffer of a shared consumer.

The limits apply to the consumer as a whole. With several partitions one half is divided evenly: each partition may
always use its own share, so a busy partition cannot starve another. The other half is common: partitions that have more
rows take from it.

Sums over all partitions are maintained incrementally: a partition reports its use when it changes, so a pull costs the
same with a thousand partitions as with two. A partition that may not pull because the others use up the common half is
*starved*: it is listed, and pulls once there is room.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from plait.client.consume.delivered import DeliveredFrame, Deliveries, Piece
from plait.client.types import Message, PartitionName, priority_of
from plait.frame.columns import Column
from plait.limits import PREFETCH_SHARE_MIN, PREFETCH_SHARES_MAX, RANKED_PREFETCH_COUNT, ClientLimits

#: Rows that iteration converts to messages at a time, and pulls at a time where nothing is prefetched.
ITERATION_COUNT = 100


_PRIORITY_BIT = 1 << Column.PRIORITY


class Puller(Protocol):
    """A partition, and its use of the limits."""

    #: True if the last pull left rows at the broker.
    more: bool
    #: Rows that the pulls in flight request.
    asked: int
    #: The rows that the user holds and those in the buffer.
    deliveries: Deliveries


P = TypeVar("P", bound=Puller)


class Prefetch(Generic[P]):
    """The limits of one consumer."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        #: Rows to prefetch, over all partitions.
        self.ahead = limits.prefetch_count
        #: The number of partitions.
        self.partitions = 0
        #: True if rows may overtake others: they must not wait for a large pull, or for a row without an outcome.
        self.ranked = False
        #: How many rows to receive after one without an outcome.
        self.span = limits.prefetch_span
        #: True if large fetches have raised ``ahead`` above the configured limit.
        self.large = False
        #: Each partition's rows beyond its own share, and its bytes, as last reported.
        self._used: dict[P, tuple[int, int]] = {}
        #: The sums of both over all partitions.
        self._over = 0
        self._bytes = 0
        #: Each partition's own share, in rows and bytes; ``_own`` is 0 when they must be computed again.
        self._own = 0
        self._size = 0
        #: Starved partitions, longest wait first.
        self.starved: dict[P, None] = {}
        #: Partitions that could pull a few rows, and wait until they can pull half of their share.
        self._patient: dict[P, None] = {}

    def enlarge(self, ahead: int) -> bool:
        """Prefetch at least ``ahead`` rows; returns True if that is more than before."""
        if ahead <= self.ahead:
            return False
        self.ahead, self._own = ahead, 0
        self.large = ahead > self._limits.prefetch_count
        return True

    def note_ranked(self, ranked: bool = True) -> None:
        """Note whether rows may overtake others: then prefetch few, unless a large fetch needs more."""
        if ranked and not self.ranked:
            self.ranked, self.span = True, sys.maxsize
            self.ahead, self._own = min(self.ahead, RANKED_PREFETCH_COUNT), 0

    def add(self, puller: P) -> None:
        self._used[puller] = (0, 0)
        self.partitions += 1
        self._own = 0

    def remove(self, puller: P) -> None:
        del self._used[puller]
        self.partitions -= 1
        self.starved.pop(puller, None)
        self._patient.pop(puller, None)
        self._own = 0

    def report(self, puller: P) -> None:
        before = self._used.get(puller)
        if before is None or len(self._used) == 1:
            return
        if not self._own:
            self._count()
            before = self._used[puller]
        self._note(puller, puller.deliveries.held + puller.asked, before)

    def _note(self, puller: P, rows: int, before: tuple[int, int]) -> None:
        used = (max(rows - self._own, 0), puller.deliveries.bytes)
        if used != before:
            self._over += used[0] - before[0]
            self._bytes += used[1] - before[1]
            self._used[puller] = used

    def _count(self) -> None:
        """Compute the shares and the sums again, after a change of the partitions or the limits."""
        count = len(self._used)
        smallest = min(self.ahead // PREFETCH_SHARES_MAX, PREFETCH_SHARE_MIN)
        self._own = max(self.ahead // (2 * count), smallest, 1)
        self._size = self._limits.prefetch_bytes // (2 * count)
        self._used = {p: (max(p.deliveries.held + p.asked - self._own, 0), p.deliveries.bytes) for p in self._used}
        self._over = sum(over for over, _ in self._used.values())
        self._bytes = sum(size for _, size in self._used.values())

    def wanted(self, puller: P, *, patient: bool = True) -> int:
        """The number of rows that the next pull of one of several partitions requests; they are in use at once.

        0: do not pull; ``patient``: 0 rather than a few rows.
        """
        count = len(self._used)
        held = puller.deliveries.held + puller.asked
        if not self._own:
            self._count()
        before = self._used[puller]
        self._note(puller, held, before)
        wanted = self._share(puller, held, count, patient=patient and not self.ranked)
        if wanted:
            self._note(puller, held + wanted, self._used[puller])
        return wanted

    def _share(self, puller: P, held: int, count: int, *, patient: bool) -> int:
        self.starved.pop(puller, None)
        self._patient.pop(puller, None)
        if puller.deliveries.bytes >= self._size and not self._bytes_left:
            self.starved[puller] = None
            return 0
        room = self._own - held
        if puller.more:
            over = max(held - self._own, 0)
            room += max(self._rows_left + over, 0)
            if room <= 0:
                self.starved[puller] = None
        if patient and held and 0 < 2 * room < self._own:
            self._patient[puller] = None
            return 0
        return self.whole(room, count)

    @property
    def _rows_left(self) -> int:
        return self.ahead - len(self._used) * self._own - self._over

    @property
    def _bytes_left(self) -> bool:
        return self._bytes < self._limits.prefetch_bytes - (len(self._used) - 1) * self._size

    def relieved(self) -> P | None:
        """Remove and return a starved partition that may have room now; None: there is none."""
        if self.starved and self._rows_left > 0 and self._bytes_left:
            puller = next(iter(self.starved))
            del self.starved[puller]
            return puller
        return None

    def patient(self) -> list[P]:
        """Partitions that could pull a few rows and wait for more room."""
        return list(self._patient)

    def whole(self, wanted: int, count: int) -> int:
        """Raise a large pull to at least half a share: its bytes limit it, not a count that ends inside a frame."""
        if wanted <= 0:
            return 0
        return max(wanted, self.ahead // (2 * count)) if self.large else wanted


class RowBuffer:
    """The buffer of a shared consumer: rows of all its partitions. Any row may be handed out at any time.

    A broker delivers rows of different priorities in different frames. The frames of the highest priority come first.
    """

    def __init__(self, on_priority: Callable[[], None] = lambda: None) -> None:
        #: Called when rows with priorities arrive.
        self._on_priority = on_priority
        #: Frames with rows that are not handed out yet.
        self._frames: deque[DeliveredFrame] = deque()
        #: Messages of the first frame that iteration has converted already, in reverse order.
        self._ready: list[Message] = []
        #: The number of rows in the buffer.
        self.count = 0

    def append(self, delivered: DeliveredFrame) -> None:
        frames = self._frames
        frames.append(delivered)
        self.count += delivered.count
        if delivered.frame.column_bits & _PRIORITY_BIT:
            self._on_priority()
            rank, at = priority_of(delivered.frame, 0), len(frames) - 1
            while at and priority_of(frames[at - 1].frame, 0) < rank:
                at -= 1
            if at < len(frames) - 1:
                del frames[-1]
                frames.insert(at, delivered)
                self._ready = []

    def available(self) -> int:
        return self.count

    def take(self, count: int, *, apart: bool = False) -> list[Piece]:
        """Hand up to ``count`` rows to the user."""
        pieces: list[Piece] = []
        self._ready = []
        while count > 0 and self._frames:
            delivered = self._frames[0]
            start = delivered.taken
            stop = min(delivered.count, start + count)
            delivered.taken = stop
            pieces.append((delivered, start, stop))
            count -= stop - start
            self.count -= stop - start
            if stop == delivered.count:
                self._frames.popleft()
        return pieces

    def next(self) -> Message | None:
        """Hand one row to the user, as a message; None: there is none."""
        if not self._frames:
            return None
        delivered = self._frames[0]
        if not self._ready:
            self._ready = delivered.messages(delivered.taken, min(delivered.count, delivered.taken + ITERATION_COUNT))
            self._ready.reverse()
        message = self._ready.pop()
        delivered.taken += 1
        self.count -= 1
        if delivered.taken == delivered.count:
            self._frames.popleft()
        return message

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """Remove and return all rows of a partition (None: of all partitions)."""
        chosen = [d for d in self._frames if partition is None or d.partition == partition]
        pieces = [(d, d.taken, d.count) for d in chosen]
        for delivered in chosen:
            self.count -= delivered.count - delivered.taken
            delivered.taken = delivered.count
        if partition is None:
            self._frames.clear()
        else:
            self._frames = deque(d for d in self._frames if d.partition != partition)
        self._ready = []
        return pieces
