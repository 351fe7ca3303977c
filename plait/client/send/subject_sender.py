"""Sends the rows of one subject: has its route, a queue for each partition, and changes from one route to the next.

When the route changes, every queue that loses LPs drains: it sends no new frames, and resends sent frames until they
are answered. New rows still enter the old queues. When every sent frame has a result, the frames that are not stored
are taken back and given to the queues of the new route, split where necessary, and new rows enter those queues as well.
All of this is one step, so no row overtakes another row of its key (R8).

A frame that a broker definitely refused moves to another partition, unless the subject is strict (R6) or the sender is
pinned. Rows of a pinned sender have numbers that a later process resends, and those are valid at one partition only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from plait import chance, tasks
from plait.client.net.router import SubjectRoute
from plait.client.send.delayed_queue import DelayedQueue
from plait.client.send.partition_queue import PartitionQueue
from plait.client.send.partition_sender import PartitionSender, SentFrame
from plait.client.send.partitioner import DelayedPartitioner, Partitioner
from plait.client.send.regroup import Rows, restamp, take_rows
from plait.client.types import PartitionName, PendingBatch, ScheduledBatch
from plait.errors import DiskFull, FlowControl, LimitExceeded, PlaitError, ReadOnly
from plait.frame.frame_lps import key_hashes
from plait.frame.view import FrameView
from plait.model.logical_partitions import Hashes

if TYPE_CHECKING:
    from plait.client.send.producer import Producer

#: Where rows enter: the only queue, or a partitioner that chooses among several.
Entry = PartitionQueue | Partitioner[PartitionQueue]
#: Queues, each with the numbers of its rows; None: all rows.
Pieces = list[tuple[PartitionQueue, Rows | None]]

#: The meta server cannot create the subject now: the rows fail without another attempt.
_FINAL: Final = (ReadOnly, DiskFull, FlowControl, LimitExceeded)


class SubjectSender:
    """Sends the rows of one subject, or with ``delayed`` its delayed rows."""

    __slots__ = (
        "_looking",
        "_next",
        "_queues",
        "_wanted",
        "closed",
        "delayed",
        "entry",
        "pinned",
        "producer",
        "route",
        "route_backoff",
        "route_error",
        "subject",
        "used_at",
    )

    def __init__(self, producer: Producer, subject: str, *, delayed: bool = False) -> None:
        self.producer = producer
        self.subject = subject
        self.delayed = delayed
        self.route: SubjectRoute | None = None
        #: The next route, while queues drain for it.
        self._next: SubjectRoute | None = None
        #: The newest route version that a broker has reported to a queue.
        self._wanted = 0
        #: The pause before the next request for the route; grows until a frame is stored.
        self.route_backoff = 0.0
        #: Why the last request for the route failed.
        self.route_error: PlaitError | None = None
        self._looking: asyncio.Task[None] | None = None
        self._queues: dict[PartitionName, PartitionQueue] = {}
        self.closed = False
        #: When rows were last added or stored (loop time).
        self.used_at = 0.0
        #: Rows keep their partition and their numbers, for every order strategy.
        self.pinned = False
        self.entry: Entry
        # Until the route is known, rows wait in a queue without a partition.
        self._enter(self._new_queue())

    def _new_queue(self) -> PartitionQueue:
        return DelayedQueue(self) if self.delayed else PartitionQueue(self)

    def _enter(self, entry: Entry) -> None:
        self.entry = entry
        registry = self.producer.delayed if self.delayed else self.producer.queues
        registry[self.subject] = entry  # type: ignore[assignment]

    def queues(self) -> list[PartitionQueue]:
        """All queues, including the one in which rows wait until the route is known."""
        found = list(self._queues.values())
        if isinstance(self.entry, PartitionQueue) and self.entry not in found:
            found.append(self.entry)
        return found

    def seal(self) -> None:
        """Seal the open rows of all queues."""
        for queue in self.queues():
            queue.seal()

    def spread(self, hashes: Hashes | None) -> Pieces:
        """The queues for rows with these key hashes, each with its rows."""
        return [(self.entry, None)] if isinstance(self.entry, PartitionQueue) else self.entry.spread(hashes)

    # --- the route ------------------------------------------------------------------------------

    async def ready(self) -> Entry:
        """Wait until the route is known; returns where rows enter."""
        if self.route is None:
            self.begin(await self.producer.router.route(self.subject))
        return self.entry

    def look(self) -> None:
        """Start a request for the route, unless one runs."""
        if self._looking is None and not self.closed:
            self._looking = tasks.start(self._look(), f"plait-route-{self.subject}", failed=self._defect)

    def stale(self, version: int) -> None:
        """A broker reported to a queue that the route has changed to this version or a later one."""
        self._wanted = max(self._wanted, version)
        self.look()

    def _defect(self, error: Exception) -> None:
        """The task that asks for the route failed: fail the rows that wait for it. The next send asks again."""
        self.abandon(tasks.error_of(error))

    async def _look(self) -> None:
        router, limits = self.producer.router, self.producer.limits
        pause = limits.send_retry_first_seconds
        try:
            if self.route_backoff:
                # The route of the last request was wrong as well.
                await self._sleep_about(self.route_backoff)
            if self.route is not None:
                self.route_backoff = min(2 * (self.route_backoff or pause), limits.send_retry_max_seconds)
            while True:
                try:
                    found = await (router.route if self.route is None else router.refresh)(self.subject)
                except _FINAL as error:
                    self.abandon(error)
                    return
                except PlaitError as error:
                    if not error.retryable:
                        self.abandon(error)
                        return
                    self.route_error = error
                else:
                    self.route_error = None
                    if found.version >= self._wanted:
                        break
                await self._sleep_about(pause)
                pause = min(pause * 2, limits.send_retry_max_seconds)
        finally:
            self._looking = None
        self.begin(found)

    @staticmethod
    async def _sleep_about(seconds: float) -> None:
        await asyncio.sleep(seconds * chance.uniform(0.5, 1.0))

    def begin(self, route: SubjectRoute) -> None:
        """Change to a route when the queues that it affects have drained."""
        if self.closed:
            return
        if self.route is None:
            self._first(route)
            return
        if self._next is not None and self._next.version > route.version:
            route = self._next
        if route.version < self.route.version:
            return
        if route.version == self.route.version and not any(queue.draining for queue in self.queues()):
            # The same version with changed broker states.
            self.route = route
            self.producer.health.changed()
            return
        losers = self._losers(self.route, route)
        for queue in losers:
            queue.drain()
        self._next = route
        self.resolved()

    @staticmethod
    def _names(route: SubjectRoute) -> dict[int, PartitionName]:
        return {index: route.partitions[index] for index in route.open()}

    def _losers(self, old: SubjectRoute, new: SubjectRoute) -> list[PartitionQueue]:
        """The queues of partitions that lose some LP."""
        if old is new or old.version == new.version:
            return []
        numbers = {name: number for number, name in enumerate(dict.fromkeys([*old.partitions, *new.partitions]))}
        before = np.array([numbers[name] for name in old.partitions])[old.table]
        after = np.array([numbers[name] for name in new.partitions])[new.table]
        lost = set(before[before != after].tolist())
        return [queue for name, queue in self._queues.items() if numbers.get(name) in lost]

    def _first(self, route: SubjectRoute) -> None:
        waiting = self.entry
        assert isinstance(waiting, PartitionQueue)
        self.route = route
        names = list(self._names(route).values())
        if len(names) == 1:
            self._queues[names[0]] = waiting
            waiting.bind(self.producer.router.node(route, names[0].group), names[0])
            return
        self._adopt(route)
        for frame in waiting.take_back():
            self._give(frame, None)

    def _adopt(self, route: SubjectRoute) -> None:
        """Use this route for all rows from now on."""
        self.route = route
        names = self._names(route)
        queues = {}
        for index, name in names.items():
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = self._new_queue()
                queue.bind(self.producer.router.node(route, name.group), name)
            queues[index] = queue
        if len(queues) == 1:
            self._enter(next(iter(queues.values())))
            return
        places = np.zeros(len(route.partitions), np.int64)
        places[list(queues)] = np.arange(len(queues))
        kind = DelayedPartitioner if self.delayed else Partitioner
        self._enter(kind(self, list(queues.values()), places[route.table]))  # type: ignore[arg-type]

    def resolved(self) -> None:
        """A draining queue has a result for every sent frame. When all draining queues have, change the route."""
        draining = [queue for queue in self._queues.values() if queue.draining]
        if self._next is None or not all(queue.resolved for queue in draining):
            return
        route, self._next = self._next, None
        taken = [(frame, queue) for queue in draining for frame in queue.take_back()]
        self._adopt(route)
        for frame, queue in taken:
            self._give(frame, queue)
        for queue in draining:
            queue.resume()

    # --- frames that move -----------------------------------------------------------------------

    def _give(self, frame: SentFrame, home: PartitionQueue | None) -> None:
        """Give a frame that is not stored to the queues of the current route."""
        entry = self.entry
        if isinstance(entry, PartitionQueue):
            entry.take_over(frame)
            return
        view = FrameView(frame.parts.tobytes())
        hashes = key_hashes(view)
        pieces = entry.spread(hashes, home)
        if len(pieces) == 1:
            pieces[0][0].take_over(frame)
        else:
            self._split(frame, view, hashes, pieces)

    def _split(
        self,
        frame: SentFrame,
        view: FrameView,
        hashes: Hashes | None,
        pieces: Pieces,
    ) -> None:
        batches = split_batch(frame.batch, [rows for _, rows in pieces])
        left = frame.size
        for (queue, rows), batch in zip(pieces, batches, strict=True):
            compression = self.producer.compression
            parts = take_rows(view, rows, hashes, compression, producer=self.producer.id, first=1)
            size = left if queue is pieces[-1][0] else frame.size * parts.count // view.count
            left -= size
            piece = SentFrame(parts, batch, size, frame.deadline)
            piece.tries, piece.refusal = frame.tries, frame.refusal
            queue.take_over(piece)

    @property
    def holds(self) -> bool:
        """A refused frame keeps its partition and its position."""
        return self.pinned or (self.route is not None and self.route.order == "strict")

    @property
    def movable(self) -> bool:
        """A refused frame may move to another partition."""
        return isinstance(self.entry, Partitioner) and not self.holds

    def patience(self, queue: PartitionSender) -> float:
        """Seconds to wait for a disconnected broker before frames move to another partition."""
        if queue.node is None or not self.writable(queue):
            return 0.0
        away = self.producer.loop.time() - queue.node.down_since
        return max(self.producer.limits.unreached_seconds - away, 0.0)

    def move(self, frame: SentFrame, queue: PartitionSender, error: PlaitError) -> bool:
        """Move a frame that a broker definitely refused to another partition.

        Its rows get LPs of the other partition (R6). Returns False if no partition takes it, or if it was moved
        ``send_attempts`` times.
        """
        entry, producer = self.entry, self.producer
        producer.health.failed(self.group_of(queue), producer.loop.time())
        frame.refusal = error
        if not isinstance(entry, Partitioner) or self.holds or frame.tries + 1 >= producer.limits.send_attempts:
            return False
        other = entry.pick(but=queue)
        if not self.writable(other):
            return False
        frame.tries += 1
        queue.remove(frame)
        view = FrameView(frame.parts.tobytes())
        hashes = key_hashes(view)
        if hashes is not None:
            stamped = restamp(hashes, entry.lps_of(other))
            frame.parts = take_rows(view, None, stamped, producer.compression, producer=producer.id, first=1)
        other.take_over(frame)
        return True

    # --- brokers --------------------------------------------------------------------------------

    @staticmethod
    def group_of(queue: PartitionSender) -> str:
        """The broker group of the queue's partition."""
        return queue.name.group if queue.name is not None else ""

    def writable(self, queue: PartitionSender) -> bool:
        """The route says that the queue's broker takes sends."""
        assert self.route is not None
        _, state = self.route.brokers.get(self.group_of(queue), ([], "NRW"))
        return "W" in state and state != "NRW"

    def stored(self, queue: PartitionSender, frame: SentFrame) -> None:
        """The broker has stored a frame."""
        self.route_backoff = 0.0
        self.used_at = frame.sent_at
        if isinstance(self.entry, Partitioner):
            now = self.producer.loop.time()
            self.producer.health.answered(self.group_of(queue), now - frame.sent_at, now)

    def idle(self, oldest: float) -> bool:
        """Nothing was sent after ``oldest``, no row waits, and no route change is pending."""
        if self.pinned or self.used_at > oldest or self._looking is not None or self._next is not None:
            return False
        return all(queue.empty for queue in self.queues())

    # --- the end --------------------------------------------------------------------------------

    def note(self, error: PlaitError) -> None:
        """Record the error of a posted frame; ``flush`` raises the first one."""
        if self.producer.error is None:
            self.producer.error = error

    def unsettled(self) -> list[PendingBatch]:
        """Seal the open rows; returns the batches that have no result yet."""
        self.seal()
        return [batch for queue in self.queues() for batch in queue.batches()]

    def abandon(self, error: PlaitError) -> None:
        """Fail all rows with ``error``."""
        if error.code == "closed":
            self.closed = True
            if self._looking is not None:
                self._looking.cancel()
        for queue in self.queues():
            queue.abandon(error)
            queue.draining = False
        self._next = None


def split_batch(batch: PendingBatch, pieces: list[Rows | None]) -> list[PendingBatch]:
    """A new batch for each piece of a batch's rows; ``batch`` has a result when all of them have."""
    batches: list[PendingBatch] = []
    count = 0
    for rows in pieces:
        assert rows is not None
        count += len(rows)
        if isinstance(batch, ScheduledBatch):
            dues = batch.dues if isinstance(batch.dues, int) else np.asarray(batch.dues, np.int64)[rows]
            part: PendingBatch = ScheduledBatch(dues)
        else:
            part = PendingBatch()
        part.count = len(rows)
        batches.append(part)
    which = np.zeros(count, np.int64)
    places = np.zeros(count, np.int64)
    for number, rows in enumerate(pieces):
        assert rows is not None
        which[rows] = number
        places[rows] = np.arange(len(rows))
    batch.split(batches, which, places)
    return batches
