"""How much a consumer pulls ahead of need, and each partition's part of it.

The limits are of the consumer as a whole. With several partitions half of them is shared out evenly: that much each may
use whatever the others do, so that a busy one does not starve another. The other half is for those that have more.

Sums over all partitions are kept, not computed: a partition reports its own use when it changes, so that a pull costs
the same on a thousand partitions as on two. A partition that gets nothing because the others use the common half is
starved: it is listed, and asked again once there is room.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from plait.limits import PREFETCH_SHARE_MIN, PREFETCH_SHARES_MAX, ClientLimits


class Puller(Protocol):
    """What a partition uses of it."""

    #: The last pull left rows at the broker.
    more: bool
    #: Rows that the pulls under way ask for.
    asked: int
    #: Bytes of frames with rows that are not settled.
    open_bytes: int

    def held(self) -> int:
        """Rows in the user's hands, and those that wait for it."""

    def span(self) -> int:
        """Rows pulled since the oldest one that is still open."""


P = TypeVar("P", bound=Puller)


class Prefetch(Generic[P]):
    """The limits of one consumer."""

    def __init__(self, limits: ClientLimits, *, spans: bool = True) -> None:
        self._limits = limits
        #: One stuck row does not let the rest run away.
        self._spans = spans
        #: Rows.
        self.ahead = limits.prefetch_count
        #: Each partition's rows beyond its own share, and its bytes, as last reported.
        self._used: dict[P, tuple[int, int]] = {}
        #: The sums of both.
        self._over = 0
        self._bytes = 0
        #: Each partition's own share, in rows and bytes; 0: to be computed again.
        self._own = 0
        self._size = 0
        #: Partitions that wait for room, the one that has waited longest first.
        self._starved: dict[P, None] = {}
        #: Partitions that could pull a few rows, and wait until they are more: half of their share.
        self._patient: dict[P, None] = {}

    @property
    def large(self) -> bool:
        """Large fetches made it more than what is usual."""
        return self.ahead > self._limits.prefetch_count

    def enlarge(self, ahead: int) -> bool:
        """Pull so many rows ahead at least; whether that is more than before."""
        if ahead <= self.ahead:
            return False
        self.ahead, self._own = ahead, 0
        return True

    def add(self, puller: P) -> None:
        """Another partition shares the limits."""
        self._used[puller] = (0, 0)
        self._own = 0

    def remove(self, puller: P) -> None:
        """A partition uses nothing any more."""
        del self._used[puller]
        self._starved.pop(puller, None)
        self._patient.pop(puller, None)
        self._own = 0

    def report(self, puller: P) -> None:
        """What a partition uses has changed."""
        before = self._used.get(puller)
        if before is None or len(self._used) == 1:
            return
        if not self._own:
            self._count()
            before = self._used[puller]
        self._note(puller, puller.held() + puller.asked, before)

    def _note(self, puller: P, rows: int, before: tuple[int, int]) -> None:
        used = (max(rows - self._own, 0), puller.open_bytes)
        if used != before:
            self._over += used[0] - before[0]
            self._bytes += used[1] - before[1]
            self._used[puller] = used

    def _count(self) -> None:
        """The shares, and what is used: when there are more or fewer partitions, or larger limits."""
        count = len(self._used)
        smallest = min(self.ahead // PREFETCH_SHARES_MAX, PREFETCH_SHARE_MIN)
        self._own = max(self.ahead // (2 * count), smallest, 1)
        self._size = self._limits.prefetch_bytes // (2 * count)
        self._used = {p: (max(p.held() + p.asked - self._own, 0), p.open_bytes) for p in self._used}
        self._over = sum(over for over, _ in self._used.values())
        self._bytes = sum(size for _, size in self._used.values())

    def wanted(self, puller: P, *, patient: bool = True) -> int:
        """How many rows the next pull of one partition asks for, which it uses from now on; 0: none now.

        ``patient``: none rather than few.
        """
        limits, count = self._limits, len(self._used)
        held = puller.held() + puller.asked
        if not held and count == 1:
            return self.ahead
        if self._spans and puller.span() >= max(limits.prefetch_span, 2 * self.ahead):
            return 0
        if count == 1:
            return 0 if puller.open_bytes >= limits.prefetch_bytes else self._whole(self.ahead - held, 1)
        if not self._own:
            self._count()
        before = self._used[puller]
        self._note(puller, held, before)
        wanted = self._share(puller, held, count, patient=patient)
        if wanted:
            self._note(puller, held + wanted, self._used[puller])
        return wanted

    def _share(self, puller: P, held: int, count: int, *, patient: bool) -> int:
        self._starved.pop(puller, None)
        self._patient.pop(puller, None)
        if puller.open_bytes >= self._size and not self._bytes_left:
            self._starved[puller] = None
            return 0
        room = self._own - held
        if puller.more:
            over = max(held - self._own, 0)
            room += max(self._rows_left + over, 0)
            if room <= 0:
                self._starved[puller] = None
        if patient and held and 0 < 2 * room < self._own:
            self._patient[puller] = None
            return 0
        return self._whole(room, count)

    @property
    def _rows_left(self) -> int:
        """Of the common half."""
        return self.ahead - len(self._used) * self._own - self._over

    @property
    def _bytes_left(self) -> bool:
        return self._bytes < self._limits.prefetch_bytes - (len(self._used) - 1) * self._size

    def relieved(self) -> P | None:
        """A starved partition that may have room now; None: there is none. It is not listed any more."""
        if self._starved and self._rows_left > 0 and self._bytes_left:
            puller = next(iter(self._starved))
            del self._starved[puller]
            return puller
        return None

    def patient(self) -> list[P]:
        """Partitions that could pull a few rows."""
        return list(self._patient)

    @property
    def starved(self) -> bool:
        """Partitions wait for room."""
        return bool(self._starved)

    def _whole(self, wanted: int, count: int) -> int:
        """The bytes of a large pull limit it, not a number that ends inside a frame."""
        if wanted <= 0:
            return 0
        return max(wanted, self.ahead // (2 * count)) if self.large else wanted

    def wanted_now(self, demand: int, puller: P) -> int:
        """The same where nothing is pulled ahead of ``demand``: the partitions share it."""
        return -(-demand // len(self._used)) - puller.asked if demand > 0 else 0
