"""The sending side of a client: numbers rows, bounds the buffer, and gives each subject a sender.

Producer sequences count over all subjects of one producer id. Each partition has a queue that sends its frames in
order, each with the producer sequence of its predecessor, so that a resend after a lost connection stores nothing
twice (R7).
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


#: Callers that are woken at a time when the buffer has room.
WAKE_MAX = 500


def new_producer_id() -> int:
    """A unique number: 63 random bits, never 0."""
    return chance.bits(63) | 1


class Producer:
    """Sends everything that one client sends."""

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
        #: The limit of the buffer; 0 while callers wait for room, so that later callers queue behind them.
        self.buffer_bytes = limits.buffer_bytes
        self.now = clock_now
        #: The current time rounded up to a microsecond. Delays count from it, so that none ends early.
        self.next_now = clock_next
        self.compression = compression
        self.id = new_producer_id()
        self.next = 1
        #: Oneway rows have a separate id: a lost one must not leave a hole in the sequences of the others.
        self.oneway_id = new_producer_id()
        self.oneway_next = 1
        #: Bytes of rows that are buffered or sent and not yet answered.
        self.buffered = 0
        self.closed: PlaitError | None = None
        #: The first error of a posted frame since the last flush.
        self.error: PlaitError | None = None
        #: Where the rows of a subject enter: its only queue, or a partitioner...
        self.queues: dict[str, Entry] = {}
        #: ...and where its delayed rows enter.
        self.delayed: dict[str, DelayedQueue | DelayedPartitioner] = {}
        #: (subject, delayed) → its sender; delayed rows have a separate one.
        self._subject_senders: dict[tuple[str, bool], SubjectSender] = {}
        #: How fast each broker group answers.
        self.health = GroupHealth()
        self._partition_senders: dict[Node, list[PartitionSender]] = {}
        #: Callers that wait for room in the buffer, in the order of arrival.
        self._room: dict[object, asyncio.Future[None]] = {}
        self._urgent: list[PartitionQueue] = []
        router.on_route.append(self._new_route)
        router.users.append(self._uses)
        router.on_deleted.append(self._drop_idle)

    def open(self) -> None:
        self.loop = asyncio.get_running_loop()

    def subject_sender(self, subject: str, *, delayed: bool = False) -> SubjectSender:
        """The sender of a subject, made on first use."""
        sender = self._subject_senders.get((subject, delayed))
        if sender is None:
            names.check("subject", subject)
            sender = self._subject_senders[subject, delayed] = SubjectSender(self, subject, delayed=delayed)
        sender.used_at = self.loop.time()
        return sender

    def _uses(self, subject: str) -> bool:
        """Whether the subject still needs its route. Drops its senders if they are idle."""
        self._drop_idle(subject, self.loop.time() - self.limits.sender_idle_seconds)
        return any((subject, delayed) in self._subject_senders for delayed in (False, True))

    def _drop_idle(self, subject: str, oldest: float = math.inf) -> None:
        """Drop the senders of a subject, unless they have rows or sent some after ``oldest`` (loop time)."""
        for delayed in (False, True):
            sender = self._subject_senders.get((subject, delayed))
            if sender is not None and sender.idle(oldest):
                self._drop(sender)

    def _drop(self, sender: SubjectSender) -> None:
        """Forget a sender. The next send makes a new one; the broker then reports the last row that it has stored."""
        del self._subject_senders[sender.subject, sender.delayed]
        (self.delayed if sender.delayed else self.queues).pop(sender.subject, None)
        for queue in sender.queues():
            if queue.node is not None:
                self._partition_senders[queue.node].remove(queue)
            queue.stop()

    def queue(self, subject: str) -> Entry:
        """Where the rows of a subject enter."""
        return self.queues.get(subject) or self.subject_sender(subject).entry

    def delayed_queue(self, subject: str) -> DelayedQueue | DelayedPartitioner:
        """Where the delayed rows of a subject enter."""
        if subject not in self.delayed:
            self.subject_sender(subject, delayed=True)
        return self.delayed[subject]

    def _new_route(self, route: SubjectRoute) -> None:
        for delayed in (False, True):
            sender = self._subject_senders.get((route.subject, delayed))
            if sender is not None:
                sender.begin(route)

    def take(self, count: int) -> int:
        """Reserve ``count`` producer sequences; returns the first."""
        first = self.next
        self.next += count
        return first

    def take_oneway(self, count: int) -> int:
        first = self.oneway_next
        self.oneway_next += count
        return first

    def renew(self) -> None:
        """Take a new producer id, because the broker no longer knows this one (R9)."""
        self.id = new_producer_id()
        self.next = 1
        for senders in self._partition_senders.values():
            for sender in senders:
                sender.last = 0

    # --- the turn -------------------------------------------------------------------------------

    def soon(self, queue: PartitionQueue) -> None:
        """Seal the queue's open rows at the end of this loop turn."""
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
        if not self._room and self.buffered < limit:
            return
        self.buffer_bytes = 0
        me = object()
        try:
            async with asyncio.timeout(self.limits.send_seconds):
                while True:
                    # A dict keeps the position of a key, so a caller that waits again keeps its turn.
                    future = self._room[me] = self.loop.create_future()
                    await future
                    if self.closed is not None:
                        raise self.closed
                    if self.buffered < limit and next(iter(self._room)) is me:
                        return
        except TimeoutError:
            raise Timeout(
                f"the send buffer was full for {self.limits.send_seconds:g} s (limit `buffer_bytes`); "
                "the server stores less than this client sends: send more slowly"
            ) from None
        finally:
            self._room.pop(me, None)
            if not self._room:
                self.buffer_bytes = limit
            elif self.buffered < limit:
                self._wake_waiting()

    def released(self, size: int) -> None:
        """Rows have a result: free their bytes in the buffer."""
        self.buffered -= size
        if self._room and self.buffered < self.limits.buffer_bytes:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Wake waiting callers in order: many at a time, so that their rows share a frame."""
        if next(iter(self._room.values())).done():
            # Callers that were woken before have not run yet.
            return
        for future in list(itertools.islice(self._room.values(), WAKE_MAX)):
            if not future.done():
                future.set_result(None)

    # --- connection -----------------------------------------------------------------------------

    def attach(self, sender: PartitionSender, node: Node) -> None:
        """Notify the sender of this node's new and lost links."""
        senders = self._partition_senders.get(node)
        if senders is None:
            senders = self._partition_senders[node] = []
            node.on_link.append(lambda link: self._new_link(node, link))
            node.on_lost.append(lambda: self._link_lost(node))
        senders.append(sender)

    def _new_link(self, node: Node, link: Link) -> None:
        self.health.changed()
        for sender in list(self._partition_senders[node]):
            sender.new_link(link)

    def _link_lost(self, node: Node) -> None:
        self.health.changed()
        for sender in list(self._partition_senders[node]):
            sender.link_lost()

    async def flush(self) -> None:
        """Wait until every posted row has a result; raises the first error since the last flush."""
        batches = [batch for sender in list(self._subject_senders.values()) for batch in sender.unsettled()]
        for batch in batches:
            await batch.wait()
        # No await before the raise: a flush that is cancelled while it waits leaves the error to the next flush.
        error, self.error = self.error, None
        if error is not None:
            raise error

    async def close(self) -> PlaitError | None:
        """Send the buffered rows, then refuse more. Returns the first error of posted messages since the last flush."""
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
        self.abandon(Closed("the client is closed; connect again"))
        return error

    def abandon(self, error: PlaitError) -> None:
        """Fail everything that has no result yet, and refuse more."""
        self.closed = error
        for sender in self._subject_senders.values():
            sender.abandon(error)
        for future in self._room.values():
            if not future.done():
                future.set_result(None)
