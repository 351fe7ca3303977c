"""One subject's way out: its route, a queue for each partition, and the change from one route to the next.

When the route changes, every queue that loses logical partitions drains: it sends nothing new, and what it has sent is
answered or sent again until it is. Rows that come meanwhile still join the old queues. Once the fate of everything is
known, what is not stored is taken back and goes where the new route leads, split where it has to be, and from then on
so does what is new: in one step, so no row overtakes another of its key (R8).

What a broker definitely refused goes to another partition, unless the subject is strict (R6), or the outlet is pinned:
then its rows have numbers that a later process goes by, and those mean something at one partition only.
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
from plait.frame.view import FrameView
from plait.model.logical_partitions import Hashes, key_hashes

if TYPE_CHECKING:
    from plait.client.send.producer import Producer

#: What rows are given to: the one queue, or who chooses among several.
Entry = PartitionQueue | Partitioner[PartitionQueue]
#: Queues, and which rows each gets; None: all.
Pieces = list[tuple[PartitionQueue, Rows | None]]

#: A meta server that cannot make the subject now: it is not asked again, the rows fail.
_FINAL: Final = (ReadOnly, DiskFull, FlowControl, LimitExceeded)


class SubjectSender:
    """See the module; ``delayed``: for rows that are delivered at a time of their own."""

    __slots__ = (
        "_looking",
        "_next",
        "_queues",
        "_wanted",
        "astray",
        "closed",
        "delayed",
        "entry",
        "pinned",
        "producer",
        "route",
        "subject",
        "trouble",
        "used_at",
    )

    def __init__(self, producer: Producer, subject: str, *, delayed: bool = False) -> None:
        self.producer = producer
        self.subject = subject
        self.delayed = delayed
        self.route: SubjectRoute | None = None
        #: The route that is to come, once what drains has drained.
        self._next: SubjectRoute | None = None
        #: A queue was told that there is a route of this version.
        self._wanted = 0
        #: How long the next look at the route waits first: looks since something was stored did not help.
        self.astray = 0.0
        #: Why the route cannot be had at present.
        self.trouble: PlaitError | None = None
        self._looking: asyncio.Task[None] | None = None
        self._queues: dict[PartitionName, PartitionQueue] = {}
        self.closed = False
        #: When rows were last added or stored (loop time).
        self.used_at = 0.0
        #: Rows keep their partition and their numbers, whatever the subject's order.
        self.pinned = False
        self.entry: Entry
        # Until the route is known, rows wait in a queue of no partition.
        self._enter(self._new_queue())

    def _new_queue(self) -> PartitionQueue:
        return DelayedQueue(self) if self.delayed else PartitionQueue(self)

    def _enter(self, entry: Entry) -> None:
        self.entry = entry
        registry = self.producer.delayed if self.delayed else self.producer.queues
        registry[self.subject] = entry  # type: ignore[assignment]

    def queues(self) -> list[PartitionQueue]:
        """All there are; those that rows wait in until the route is known among them."""
        found = list(self._queues.values())
        if isinstance(self.entry, PartitionQueue) and self.entry not in found:
            found.append(self.entry)
        return found

    def seal(self) -> None:
        """What was added so far leaves."""
        for queue in self.queues():
            queue.seal()

    def spread(self, hashes: Hashes | None) -> Pieces:
        """Where rows with these key hashes go."""
        return [(self.entry, None)] if isinstance(self.entry, PartitionQueue) else self.entry.spread(hashes)

    # --- the route ------------------------------------------------------------------------------

    async def ready(self) -> Entry:
        """The route is known; what rows are given to."""
        if self.route is None:
            self.begin(await self.producer.router.route(self.subject))
        return self.entry

    def look(self) -> None:
        """Ask for the route."""
        if self._looking is None and not self.closed:
            self._looking = tasks.start(self._look(), f"plait-route-{self.subject}", failed=self._defect)

    def stale(self, version: int) -> None:
        """A queue was told that the route is another one by now."""
        self._wanted = max(self._wanted, version)
        self.look()

    def _defect(self, error: Exception) -> None:
        """What looked at the route failed: what waits for it fails, the next send looks again."""
        self.abandon(tasks.error_of(error))

    async def _look(self) -> None:
        router, limits = self.producer.router, self.producer.limits
        pause = limits.send_retry_first_seconds
        try:
            if self.astray:
                # What was found last time led nowhere either.
                await self._rest(self.astray)
            if self.route is not None:
                self.astray = min(2 * (self.astray or pause), limits.send_retry_max_seconds)
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
                    self.trouble = error
                else:
                    self.trouble = None
                    if found.version >= self._wanted:
                        break
                await self._rest(pause)
                pause = min(pause * 2, limits.send_retry_max_seconds)
        finally:
            self._looking = None
        self.begin(found)

    @staticmethod
    async def _rest(seconds: float) -> None:
        await asyncio.sleep(seconds * chance.uniform(0.5, 1.0))

    def begin(self, route: SubjectRoute) -> None:
        """Change over to a route, as soon as what that concerns has drained."""
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
            # The same, with news of the brokers.
            self.route = route
            self.producer.health.news()
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
        """Queues of partitions that rows of some logical partition are not sent to any more."""
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
        """Rows go by this route from now on."""
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
        """A queue that drains knows the fate of what it sent; when all do, the route changes."""
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

    # --- rows that go elsewhere -----------------------------------------------------------------

    def _give(self, frame: SentFrame, home: PartitionQueue | None) -> None:
        """Send a frame that is not stored where the route leads its rows."""
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
        """A refused send holds its place."""
        return self.pinned or (self.route is not None and self.route.order == "strict")

    @property
    def movable(self) -> bool:
        """A refused send may go to another partition."""
        return isinstance(self.entry, Partitioner) and not self.holds

    def patience(self, queue: PartitionSender) -> float:
        """How long a broker that is not connected is waited for before rows go elsewhere."""
        if queue.node is None or not self.writable(queue):
            return 0.0
        away = self.producer.loop.time() - queue.node.down_since
        return max(self.producer.limits.unreached_seconds - away, 0.0)

    def move(self, frame: SentFrame, queue: PartitionSender, error: PlaitError) -> bool:
        """Send a frame that a broker definitely refused to another partition; False: there is none, or no more tries.

        Its rows get logical partitions that the other one takes (R6).
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
        """The broker group that has the queue's partition."""
        return queue.name.group if queue.name is not None else ""

    def writable(self, queue: PartitionSender) -> bool:
        """As far as is known, its broker takes sends."""
        assert self.route is not None
        _, state = self.route.brokers.get(self.group_of(queue), ([], "NRW"))
        return "W" in state and state != "NRW"

    def stored(self, queue: PartitionSender, frame: SentFrame) -> None:
        """A frame was answered."""
        self.astray = 0.0
        self.used_at = frame.sent_at
        if isinstance(self.entry, Partitioner):
            now = self.producer.loop.time()
            self.producer.health.answered(self.group_of(queue), now - frame.sent_at, now)

    def idle(self, oldest: float) -> bool:
        """Nothing was sent since then, and nothing is left to be said or done."""
        if self.pinned or self.used_at > oldest or self._looking is not None or self._next is not None:
            return False
        return all(queue.empty for queue in self.queues())

    # --- the end --------------------------------------------------------------------------------

    def note(self, error: PlaitError) -> None:
        """A posted frame failed; ``flush`` raises the first such error."""
        if self.producer.error is None:
            self.producer.error = error

    def unsettled(self) -> list[PendingBatch]:
        """Everything so far that has no answer; what was added last leaves."""
        self.seal()
        return [batch for queue in self.queues() for batch in queue.batches()]

    def abandon(self, error: PlaitError) -> None:
        """Everything open fails."""
        if error.code == "closed":
            self.closed = True
            if self._looking is not None:
                self._looking.cancel()
        for queue in self.queues():
            queue.abandon(error)
            queue.draining = False
        self._next = None


def split_batch(batch: PendingBatch, pieces: list[Rows | None]) -> list[PendingBatch]:
    """A batch for each piece of a batch's rows; the whole is settled when they are."""
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
