"""What all sends of a client share: the producer id, the numbers of its rows, the buffer, the clock, and group health.

Producer sequences count over all subjects of one producer id. The frames of a partition are sent in order, each with
the producer sequence of its predecessor, so that a resend after a lost connection stores nothing twice (R7).

Rows that may go to any partition avoid slow or failing broker groups for a while. The answer time of a group is
smoothed, so one slow answer changes little, and a slow broker is detected after a few answers. The slower a group, the
longer it is avoided. After that time the group gets its share of rows again, and the measurement starts again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final

from plait import chance
from plait.clock import SystemClock
from plait.errors import BufferFull, PlaitError, Timeout
from plait.limits import ClientLimits

#: The weight of the newest answer in the smoothed time.
SMOOTHING: Final = 0.25
#: (minimum smoothed answer time in seconds, seconds for which the group is avoided); the last matching pair applies.
SLOW: Final = ((0.5, 2.0), (1.0, 5.0), (3.0, 15.0), (15.0, 60.0))
#: A failed send counts as an answer after this time.
FAILURE_SECONDS: Final = 3.0


class _GroupRecord:
    __slots__ = ("avoided_until", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.avoided_until = 0.0


class GroupHealth:
    """The answer time of each broker group, and until when it is avoided."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupRecord] = {}
        #: Grows when the set of usable groups changes, except when the time of an avoided group ends.
        self.changes = 0

    def answered(self, group: str, seconds: float, now: float) -> None:
        """Record that a send was answered after ``seconds``."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _GroupRecord()
            known.seconds = seconds
        elif known.avoided_until and known.avoided_until <= now:
            # The group was avoided for a while, so its earlier answer time is no longer used.
            known.seconds, known.avoided_until = seconds, 0.0
        else:
            known.seconds += SMOOTHING * (seconds - known.seconds)
        if known.seconds >= SLOW[0][0]:
            self._avoid(known, now)
        elif known.avoided_until:
            # The group is fast again before its time is over.
            known.avoided_until = 0.0
            self.changes += 1

    def failed(self, group: str, now: float) -> None:
        """Record that a send was refused, or that the broker could not be reached."""
        known = self._groups.setdefault(group, _GroupRecord())
        known.seconds = max(known.seconds, FAILURE_SECONDS)
        self._avoid(known, now)

    def _avoid(self, known: _GroupRecord, now: float) -> None:
        pause = [seconds for limit, seconds in SLOW if known.seconds >= limit][-1]
        known.avoided_until = max(known.avoided_until, now + pause)
        self.changes += 1

    def changed(self) -> None:
        """Record that the connected brokers or the route have changed."""
        self.changes += 1

    def avoided_until(self, group: str) -> float:
        """Until when rows that may go to any partition avoid the group."""
        known = self._groups.get(group)
        return known.avoided_until if known is not None else 0.0

    def seconds(self, group: str) -> float:
        """The smoothed answer time."""
        known = self._groups.get(group)
        return known.seconds if known is not None else 0.0


#: The number of callers that are woken together when the buffer has room.
WAKE_MAX = 500


def new_producer_id() -> int:
    """A unique number: 63 random bits, never 0."""
    return chance.bits(63) | 1


class Producer:
    """Numbers the rows of one client, and bounds the buffer."""

    def __init__(self, limits: ClientLimits, compression: str | None) -> None:
        self.limits = limits
        #: The limit of the buffer; 0 while callers wait for room, so that later callers wait after them.
        self.buffer_bytes = limits.buffer_bytes
        self.now: Callable[[], int] = SystemClock().now
        #: The current time rounded up to a microsecond. Delays count from it, so that none ends early.
        self.next_now: Callable[[], int] = lambda: -(-time.time_ns() // 1000)
        self.compression = compression
        self.id = new_producer_id()
        self.next = 1
        #: Oneway rows have a separate id, so that a lost oneway row leaves no hole in the sequences of other rows.
        self.oneway_id = new_producer_id()
        self.oneway_next = 1
        #: Bytes of rows that are buffered or sent and not yet answered.
        self.buffered = 0
        self.closed: PlaitError | None = None
        #: The first error of a posted frame since the last flush.
        self.error: PlaitError | None = None
        #: How fast each broker group answers.
        self.health = GroupHealth()
        #: Callers that wait for room in the buffer, in the order of arrival.
        self.waiting: dict[object, asyncio.Future[None]] = {}

    def open(self) -> None:
        self.loop = asyncio.get_running_loop()

    def take(self, count: int) -> int:
        """Reserve ``count`` producer sequences; returns the first."""
        first = self.next
        self.next += count
        return first

    def renew(self) -> None:
        """Take a new producer id, because the broker no longer knows this one (R9)."""
        self.id = new_producer_id()
        self.next = 1

    # --- room -----------------------------------------------------------------------------------

    def refuse_when_full(self) -> None:
        """Raise ``BufferFull`` if the buffer is full: ``post`` does not wait."""
        if self.closed is not None:
            raise self.closed
        if self.buffered >= self.buffer_bytes:
            raise BufferFull(
                f"{self.buffered} bytes wait to be stored (limit {self.limits.buffer_bytes}); "
                "await client.flush() or use send()",
                limit="buffer_bytes",
                value=self.limits.buffer_bytes,
            )

    async def room(self) -> None:
        """Wait until the buffer has room and all earlier callers are served. The caller must add its rows at once."""
        if self.closed is not None:
            raise self.closed
        limit = self.limits.buffer_bytes
        if not self.waiting and self.buffered < limit:
            return
        self.buffer_bytes = 0
        me = object()
        try:
            async with asyncio.timeout(self.limits.send_seconds):
                while True:
                    # A dict keeps the position of a key, so a caller that waits again keeps its turn.
                    future = self.waiting[me] = self.loop.create_future()
                    await future
                    if self.closed is not None:
                        raise self.closed
                    if self.buffered < limit and next(iter(self.waiting)) is me:
                        return
        except TimeoutError:
            raise Timeout(
                f"the send buffer was full for {self.limits.send_seconds:g} s (limit `buffer_bytes`); "
                "the server stores less than this client sends: send more slowly"
            ) from None
        finally:
            self.waiting.pop(me, None)
            if not self.waiting:
                self.buffer_bytes = limit
            else:
                self.wake_waiting()

    def released(self, size: int) -> None:
        """Free the bytes of rows that have a result in the buffer."""
        self.buffered -= size
        if self.waiting:
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """If the buffer has room, wake waiting callers in order: many at a time, so that their rows share a frame."""
        if self.buffered >= self.limits.buffer_bytes or next(iter(self.waiting.values())).done():
            # Callers that were woken before have not run yet.
            return
        for future in list(itertools.islice(self.waiting.values(), WAKE_MAX)):
            if not future.done():
                future.set_result(None)

    def note(self, error: PlaitError) -> None:
        """Record the error of a posted frame; ``flush`` raises the first one."""
        if self.error is None:
            self.error = error

    def close(self, error: PlaitError) -> None:
        """Refuse more rows with ``error``."""
        self.closed = error
        for future in self.waiting.values():
            if not future.done():
                future.set_result(None)
