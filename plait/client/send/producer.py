"""Sending: rows into frames, frames to the broker, and every frame's fate back to who asked.

Sequences count over all subjects of one producer id; each partition of a subject has a queue that sends its frames in
order and names each one's predecessor, so that a resend after a lost connection stores nothing twice (R7).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from plait import chance
from plait.client.net.group_health import GroupHealth
from plait.client.net.router import Router, SubjectRoute
from plait.client.send.delayed_queue import DelayedQueue
from plait.client.send.partitioner import DelayedPartitioner
from plait.client.send.subject_sender import Entry, SubjectSender
from plait.errors import BufferFull, Closed, PlaitError, Timeout
from plait.limits import ClientLimits
from plait.model import names
from plait.wire.link import Link

if TYPE_CHECKING:
    from plait.client.net.node import Node
    from plait.client.send.partition_queue import PartitionQueue
    from plait.client.send.partition_sender import PartitionSender


#: Senders that look again at a time when the buffer has room.
WAKE_MAX = 500


def new_producer_id() -> int:
    """A number nobody else has: 63 random bits, never 0."""
    return chance.bits(63) | 1


class Producer:
    """All sending of one client."""

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        clock_now: Callable[[], int],
        clock_next: Callable[[], int],
        compression: str | None,
    ) -> None:
        self.router = router
        self.limits = limits
        #: What may be buffered; 0 while senders wait for room, so that those that come later wait behind them.
        self.buffer_bytes = limits.buffer_bytes
        self.now = clock_now
        #: The first microsecond that is not over: what delays are counted from, so that none ends early.
        self.next_now = clock_next
        self.compression = compression
        self.id = new_producer_id()
        self.next = 1
        #: Oneway rows have an id of their own: a lost one must not break the order of the others.
        self.oneway_id = new_producer_id()
        self.oneway_next = 1
        #: Bytes of rows that are buffered or under way.
        self.buffered = 0
        self.closed: PlaitError | None = None
        #: The first error of a posted frame since the last flush.
        self.error: PlaitError | None = None
        #: What a subject's rows are given to at present: its one queue, or who chooses among several...
        self.queues: dict[str, Entry] = {}
        #: ...and its delayed rows.
        self.delayed: dict[str, DelayedQueue | DelayedPartitioner] = {}
        #: By subject, and whether it is for delayed rows.
        self._outlets: dict[tuple[str, bool], SubjectSender] = {}
        #: Which broker groups answer well.
        self.health = GroupHealth()
        self._lanes: dict[Node, list[PartitionSender]] = {}
        #: Senders that wait for room in the buffer, the one that came first first.
        self._room: dict[object, asyncio.Future[None]] = {}
        self._urgent: list[PartitionQueue] = []
        router.on_route.append(self._new_route)
        router.users.append(self._uses)
        router.on_deleted.append(self._drop_idle)

    def open(self) -> None:
        self.loop = asyncio.get_running_loop()

    def outlet(self, subject: str, *, delayed: bool = False) -> SubjectSender:
        """A subject's way out."""
        outlet = self._outlets.get((subject, delayed))
        if outlet is None:
            names.check("subject", subject)
            outlet = self._outlets[subject, delayed] = SubjectSender(self, subject, delayed=delayed)
        outlet.used_at = self.loop.time()
        return outlet

    def _uses(self, subject: str) -> bool:
        """Something was sent to the subject of late; what is kept for one that is idle is dropped."""
        self._drop_idle(subject, self.loop.time() - self.limits.sender_idle_seconds)
        return any((subject, delayed) in self._outlets for delayed in (False, True))

    def _drop_idle(self, subject: str, oldest: float = math.inf) -> None:
        """Drop what is kept for a subject, unless rows wait there or were sent after ``oldest`` (loop time)."""
        for delayed in (False, True):
            outlet = self._outlets.get((subject, delayed))
            if outlet is not None and outlet.idle(oldest):
                self._drop(outlet)

    def _drop(self, outlet: SubjectSender) -> None:
        """The next send finds its way again: the broker says which row of this producer it had last."""
        del self._outlets[outlet.subject, outlet.delayed]
        (self.delayed if outlet.delayed else self.queues).pop(outlet.subject, None)
        for queue in outlet.queues():
            if queue.node is not None:
                self._lanes[queue.node].remove(queue)
            queue.stop()

    def queue(self, subject: str) -> Entry:
        """What a subject's rows are given to."""
        return self.queues.get(subject) or self.outlet(subject).entry

    def delayed_queue(self, subject: str) -> DelayedQueue | DelayedPartitioner:
        """What a subject's delayed rows are given to."""
        if subject not in self.delayed:
            self.outlet(subject, delayed=True)
        return self.delayed[subject]

    def _new_route(self, route: SubjectRoute) -> None:
        for delayed in (False, True):
            outlet = self._outlets.get((route.subject, delayed))
            if outlet is not None:
                outlet.begin(route)

    def take(self, count: int) -> int:
        """The next ``count`` producer sequences; the first of them."""
        first = self.next
        self.next += count
        return first

    def take_oneway(self, count: int) -> int:
        first = self.oneway_next
        self.oneway_next += count
        return first

    def renew(self) -> None:
        """Another producer id: the broker does not know this one any more (R9)."""
        self.id = new_producer_id()
        self.next = 1
        for lanes in self._lanes.values():
            for lane in lanes:
                lane.last = 0

    # --- the turn -------------------------------------------------------------------------------

    def soon(self, queue: PartitionQueue) -> None:
        """Send the queue's open rows at the end of this loop turn."""
        if not self._urgent:
            self.loop.call_soon(self._end_turn)
        self._urgent.append(queue)

    def _end_turn(self) -> None:
        queues, self._urgent = self._urgent, []
        for queue in queues:
            queue.urgent = False
            queue.seal()

    # --- room -----------------------------------------------------------------------------------

    def refuse_when_full(self) -> None:
        """For ``post``, which does not wait."""
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
        """Wait until the buffer takes more and those that came before have gone; the caller adds its rows at once."""
        if self.closed is not None:
            raise self.closed
        limit = self.limits.buffer_bytes
        if not self._room and self.buffered < limit:
            return
        self.buffer_bytes = 0
        me = object()
        try:
            async with asyncio.timeout(self.limits.send_seconds):
                while True:
                    # In its place, also when it waits again.
                    future = self._room[me] = self.loop.create_future()
                    await future
                    if self.closed is not None:
                        raise self.closed
                    if self.buffered < limit and next(iter(self._room)) is me:
                        return
        except TimeoutError:
            raise Timeout(
                f"the send buffer stayed full for {self.limits.send_seconds:g} s; the server takes less than is sent"
            ) from None
        finally:
            self._room.pop(me, None)
            if not self._room:
                self.buffer_bytes = limit
            elif self.buffered < limit:
                self._wake_waiting()

    def released(self, size: int) -> None:
        """Rows are settled: their bytes are free."""
        self.buffered -= size
        if self._room and self.buffered < self.limits.buffer_bytes:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Let those that wait look again, in their order: many at a time, so that their rows leave in one frame."""
        if next(iter(self._room.values())).done():
            # They have not looked yet.
            return
        for future in list(itertools.islice(self._room.values(), WAKE_MAX)):
            if not future.done():
                future.set_result(None)

    # --- connection -----------------------------------------------------------------------------

    def attach(self, lane: PartitionSender, node: Node) -> None:
        """The lane's frames go over this node's links."""
        lanes = self._lanes.get(node)
        if lanes is None:
            lanes = self._lanes[node] = []
            node.on_link.append(lambda link: self._new_link(node, link))
            node.on_lost.append(lambda: self._link_lost(node))
        lanes.append(lane)

    def _new_link(self, node: Node, link: Link) -> None:
        self.health.news()
        for lane in list(self._lanes[node]):
            lane.new_link(link)

    def _link_lost(self, node: Node) -> None:
        self.health.news()
        for lane in list(self._lanes[node]):
            lane.link_lost()

    async def flush(self) -> None:
        """Until the fate of everything posted so far is known; raises the first error since the last flush."""
        batches = [batch for outlet in list(self._outlets.values()) for batch in outlet.unsettled()]
        for batch in batches:
            await batch.wait()
        # In one step with raising it: a flush that is cancelled while it waits leaves the error to the next one.
        error, self.error = self.error, None
        if error is not None:
            raise error

    async def close(self) -> PlaitError | None:
        """Send what is buffered, then refuse more; what went wrong with posted messages since the last flush."""
        error: PlaitError | None = None
        try:
            async with asyncio.timeout(self.limits.send_seconds):
                await self.flush()
        except PlaitError as failure:
            error = failure
        except TimeoutError:
            error = Timeout(
                f"{self.buffered} bytes of messages had no answer within {self.limits.send_seconds:g} s; "
                "they may or may not be stored"
            )
        self.abandon(Closed("the client is closed"))
        return error

    def abandon(self, error: PlaitError) -> None:
        """Settle everything that is open with an error."""
        self.closed = error
        for outlet in self._outlets.values():
            outlet.abandon(error)
        for future in self._room.values():
            if not future.done():
                future.set_result(None)
