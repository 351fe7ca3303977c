"""Sends the rows of one subject: has its route, a sender for each partition, and changes from one route to the next.

When the route changes, every partition sender that loses LPs drains: it sends no new frames, and resends sent frames
until they are answered. New rows still enter the old senders. When every sent frame has a result, the frames that are
not stored are taken back and given to the senders of the new route, split where necessary, and new rows enter those
senders as well. All of this is one step, so no row overtakes another row of its key (R8).

A frame that a broker definitely refused moves to another partition, unless the subject is strict (R6) or the sender is
pinned. A later process resends the rows of a pinned sender with the same numbers, which only their partition
recognizes. ``Senders`` has the subject senders of a client.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plait.client.net.node import Node
from plait.client.net.router import RouteLookup, Router, SubjectRoute
from plait.client.send.encoding import encode_key, priority_of
from plait.client.send.open_rows import OpenRows, RowExtras, hash_keys
from plait.client.send.partition_sender import PartitionSender
from plait.client.send.partitioner import Partitioner, Pieces
from plait.client.send.producer import Producer
from plait.client.send.resend_window import PendingBatch, SentFrame
from plait.client.send.row_columns import RowColumns
from plait.client.types import PartitionName, Receipt
from plait.errors import Closed, PlaitError, Timeout
from plait.frame.view import FrameView
from plait.model import names
from plait.model.logical_partitions import Hashes, restamp
from plait.model.settings import priority_refused


class SubjectSender:
    """Sends the rows of one subject, or with ``delayed`` its delayed rows."""

    def __init__(self, producer: Producer, router: Router, subject: str, *, delayed: bool = False) -> None:
        self.producer = producer
        self.router = router
        self.subject = subject
        self.delayed = delayed
        self.route: SubjectRoute | None = None
        #: The next route, while senders drain for it.
        self._next: SubjectRoute | None = None
        self.lookup = RouteLookup(router, producer.limits, subject, self.begin, self.abandon)
        self._senders: dict[PartitionName, PartitionSender] = {}
        self.closed = False
        #: When rows were last added or stored (loop time).
        self.used_at = 0.0
        #: True if rows keep their partition and their numbers, for every order strategy.
        self.pinned = False
        self._only: PartitionSender | None
        self.partitioner: Partitioner | None
        #: Where rows enter: the open rows of the only partition...
        self.rows: OpenRows | None
        #: ...or, if ``rows`` is None, the open rows that the partitioner chooses for the key.
        self.choose: Callable[[str | int | None], OpenRows]
        # Until the route is known, rows wait in a sender without a partition.
        self._enter(PartitionSender(self))

    def _enter(self, entry: PartitionSender | Partitioner) -> None:
        """Let rows enter here from now on."""
        if isinstance(entry, Partitioner):
            self._only, self.partitioner, self.rows, self.choose = None, entry, None, entry.choose
        else:
            self._only, self.partitioner, self.rows = entry, None, entry.rows

    def senders(self) -> list[PartitionSender]:
        """All partition senders, including the one in which rows wait until the route is known."""
        found = list(self._senders.values())
        if self._only is not None and self._only not in found:
            found.append(self._only)
        return found

    def seal(self) -> None:
        """Seal the open rows of all partition senders."""
        for sender in self.senders():
            sender.seal()

    def spread(self, hashes: Hashes | None, home: PartitionSender | None = None) -> Pieces:
        """The partition senders for rows with these key hashes, each with its rows; see ``Partitioner``."""
        if self._only is not None:
            return [(self._only, None)]
        assert self.partitioner is not None
        return self.partitioner.spread(hashes, home)

    def push(self, pieces: Pieces, columns: RowColumns, batch: PendingBatch, now: int) -> None:
        """Send a frame for each piece of the rows; ``now`` is their send time, and ``batch`` gets the result."""
        producer = self.producer
        batch.count = len(columns.bodies)
        batches = [batch] if len(pieces) == 1 else batch.split([rows for _, rows in pieces if rows is not None])
        for (sender, rows), part in zip(pieces, batches, strict=True):
            # Rows that were added before these are sent first.
            sender.seal()
            first, last = producer.take(part.count), sender.window.last
            parts = columns.take(rows).build(producer.id, first, last, now=now, compression=producer.compression)
            part.producer, part.first = parts.producer, first
            producer.buffered += parts.size
            sender.push(SentFrame(parts, part, parts.size, producer.loop.time() + producer.limits.send_seconds))

    async def send_oneway(
        self,
        body: Any,
        key: str | int | None,
        extras: RowExtras | None,
    ) -> Receipt:
        """Add a row that is sent once, at the end of this loop turn, and gets no reply."""
        await self.ready()
        if extras is not None and extras.priority:
            self.refuse_priorities()
        [(sender, _)] = self.spread(None if key is None else hash_keys([encode_key(key)], 1))
        return await sender.target.send_oneway(body, key, extras)

    # --- the route ------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until the route is known."""
        if self.route is None:
            self.begin(await self.router.route(self.subject))

    def allowed(self, priority: int) -> int:
        """A priority that the subject takes, if its settings are known; raises ``InvalidArgument``."""
        self.refuse_priorities()
        return priority_of(priority)

    def refuse_priorities(self) -> None:
        """Raise ``InvalidArgument`` if the subject is known to be strict; otherwise its broker refuses.

        A row does not wait for the route here, because later rows would overtake it.
        """
        if self.route is not None and self.route.order == "strict":
            raise priority_refused(self.subject)

    def begin(self, route: SubjectRoute) -> None:
        """Change to a route when the partition senders that it affects have drained."""
        if self.closed:
            return
        if self.route is None:
            self._first(route)
            return
        if self._next is not None and self._next.version > route.version:
            route = self._next
        if route.version < self.route.version:
            return
        if route.version == self.route.version and not any(sender.draining for sender in self.senders()):
            # The same version with changed broker states.
            self.route = route
            if self.partitioner is not None:
                self.partitioner.route = route
            self.producer.health.changed()
            return
        for sender in self._losers(self.route, route):
            sender.draining = True
        self._next = route
        self.resolved()

    def _losers(self, old: SubjectRoute, new: SubjectRoute) -> list[PartitionSender]:
        """The senders of partitions that lose some LP."""
        if old is new or old.version == new.version:
            return []
        numbers = {name: number for number, name in enumerate(dict.fromkeys([*old.partitions, *new.partitions]))}
        before = np.array([numbers[name] for name in old.partitions])[old.table]
        after = np.array([numbers[name] for name in new.partitions])[new.table]
        lost = set(before[before != after].tolist())
        return [sender for name, sender in self._senders.items() if numbers.get(name) in lost]

    def _first(self, route: SubjectRoute) -> None:
        waiting = self._only
        assert waiting is not None
        self.lookup.first = False
        names = [route.partitions[index] for index in route.open()]
        if len(names) == 1:
            self.route = route
            self._senders[names[0]] = waiting
            waiting.bind(self.router.node(route, names[0].group), names[0])
            return
        self._adopt(route)
        for frame in waiting.take_back():
            self._give(frame, None)

    def _adopt(self, route: SubjectRoute) -> None:
        """Use this route for all rows from now on."""
        self.route = route
        senders = {}
        for index in route.open():
            name = route.partitions[index]
            sender = self._senders.get(name)
            if sender is None:
                sender = self._senders[name] = PartitionSender(self)
                sender.bind(self.router.node(route, name.group), name)
            senders[index] = sender
        if len(senders) == 1:
            self._enter(next(iter(senders.values())))
            return
        places = np.zeros(len(route.partitions), np.int64)
        places[list(senders)] = np.arange(len(senders))
        self._enter(Partitioner(self.producer, route, list(senders.values()), places[route.table]))

    def resolved(self) -> None:
        """Change the route once all draining senders have a result for every sent frame."""
        draining = [sender for sender in self._senders.values() if sender.draining]
        if self._next is None or not all(sender.window.resolved for sender in draining):
            return
        route, self._next = self._next, None
        taken = [(frame, sender) for sender in draining for frame in sender.take_back()]
        self._adopt(route)
        for frame, sender in taken:
            self._give(frame, sender)
        for sender in draining:
            sender.resume()

    # --- frames that move -----------------------------------------------------------------------

    def _give(self, frame: SentFrame, home: PartitionSender | None) -> None:
        """Give a frame that is not stored to the partition senders of the current route."""
        if self._only is not None:
            self._only.take_over(frame)
            return
        columns = RowColumns.of(FrameView(frame.parts.tobytes()))
        pieces = self.spread(columns.hashes, home)
        if len(pieces) == 1:
            pieces[0][0].take_over(frame)
            return
        batches = frame.batch.split([rows for _, rows in pieces if rows is not None])
        left = frame.size
        for (sender, rows), batch in zip(pieces, batches, strict=True):
            parts = columns.take(rows).build(self.producer.id, 1, compression=self.producer.compression)
            size = left if batch is batches[-1] else frame.size * parts.count // frame.parts.count
            left -= size
            piece = SentFrame(parts, batch, size, frame.deadline)
            piece.tries, piece.refusal = frame.tries, frame.refusal
            sender.take_over(piece)

    @property
    def holds(self) -> bool:
        """True if a refused frame keeps its partition and its position."""
        return self.pinned or (self.route is not None and self.route.order == "strict")

    def patience(self, sender: PartitionSender) -> float:
        """Seconds to wait for a disconnected broker before frames move to another partition."""
        assert self.route is not None
        node = sender.target.node
        if node is None or not self.route.writable(sender.target.group):
            return 0.0
        away = self.producer.loop.time() - node.down_since
        return max(self.producer.limits.unreached_seconds - away, 0.0)

    def move(self, frame: SentFrame, sender: PartitionSender, error: PlaitError) -> bool:
        """Move a frame that a broker definitely refused to another partition.

        Its rows get LPs of the other partition (R6). Returns False if no partition accepts the frame, or if the frame
        was moved ``send_attempts`` times.
        """
        partitioner, producer = self.partitioner, self.producer
        producer.health.failed(sender.target.group, producer.loop.time())
        frame.refusal = error
        if partitioner is None or self.holds or frame.tries + 1 >= producer.limits.send_attempts:
            return False
        other = partitioner.pick(but=sender)
        if not partitioner.route.writable(other.target.group):
            return False
        frame.tries += 1
        sender.window.remove(frame)
        columns = RowColumns.of(FrameView(frame.parts.tobytes()))
        if columns.hashes is not None:
            moved = columns._replace(hashes=restamp(columns.hashes, partitioner.lps_of(other)))
            frame.parts = moved.build(producer.id, 1, compression=producer.compression)
        other.take_over(frame)
        return True

    def timeout(self, node: Node | None) -> Timeout:
        """The error of a send without a reply in time, with the reason if there is no connection."""
        node, limit = node or self.router.meta, self.producer.limits.send_seconds
        cause = self.lookup.error or (node.last_error if node.link is None else None)
        detail = f": {cause}" if cause else ""
        return Timeout(
            f"no answer for a send to {self.subject!r} within {limit:g} s{detail}", subject=self.subject, seconds=limit
        )

    # --- the end --------------------------------------------------------------------------------

    def idle(self, oldest: float) -> bool:
        """True if nothing was sent after ``oldest``, no row waits, and no route change is pending."""
        if self.pinned or self.used_at > oldest or self.lookup.running or self._next is not None:
            return False
        return all(sender.empty for sender in self.senders())

    def stop(self) -> None:
        """Stop the partition senders: none is used again."""
        for sender in self.senders():
            sender.stop()

    def unsettled(self) -> list[PendingBatch]:
        """Seal the open rows; returns the batches that have no result yet."""
        self.seal()
        return [frame.batch for sender in self.senders() for frame in sender.window.frames]

    def abandon(self, error: PlaitError) -> None:
        """Fail all rows with ``error``."""
        if error.code == "closed":
            self.closed = True
            self.lookup.close()
        for sender in self.senders():
            sender.abandon(error)
        self._next = None


class Senders:
    """Sends everything that one client sends."""

    def __init__(self, router: Router, producer: Producer) -> None:
        self.router = router
        self.producer = producer
        #: Subject → its sender...
        self.plain: dict[str, SubjectSender] = {}
        #: ...and the sender of its delayed rows.
        self.delayed: dict[str, SubjectSender] = {}
        router.on_route.append(self._new_route)
        router.users.append(self._uses)
        router.on_deleted.append(self._drop_idle)

    def sender(self, subject: str, *, delayed: bool = False) -> SubjectSender:
        """The sender of a subject, made on first use."""
        senders = self.delayed if delayed else self.plain
        sender = senders.get(subject)
        if sender is None:
            names.check("subject", subject)
            sender = senders[subject] = SubjectSender(self.producer, self.router, subject, delayed=delayed)
        sender.used_at = self.producer.loop.time()
        return sender

    def _all(self) -> list[SubjectSender]:
        return [*self.plain.values(), *self.delayed.values()]

    def _uses(self, subject: str) -> bool:
        """Drop the senders of the subject if they are idle. Returns whether the subject still needs its route."""
        self._drop_idle(subject, self.producer.loop.time() - self.producer.limits.sender_idle_seconds)
        return subject in self.plain or subject in self.delayed

    def _drop_idle(self, subject: str, oldest: float = math.inf) -> None:
        """Drop the senders of a subject, unless they have rows or sent some after ``oldest`` (loop time).

        The next send makes a new one; the broker then reports the last row that it has stored.
        """
        for senders in (self.plain, self.delayed):
            sender = senders.get(subject)
            if sender is not None and sender.idle(oldest):
                del senders[subject]
                sender.stop()

    def _new_route(self, route: SubjectRoute) -> None:
        for senders in (self.plain, self.delayed):
            sender = senders.get(route.subject)
            if sender is not None:
                sender.begin(route)

    async def flush(self) -> None:
        """Wait until every posted row has a result; raises the first error since the last flush."""
        for batch in [batch for sender in self._all() for batch in sender.unsettled()]:
            await batch.wait()
        # No await before the raise, so that a flush that is cancelled while it waits leaves the error to the next
        # flush.
        error, self.producer.error = self.producer.error, None
        if error is not None:
            raise error

    async def close(self) -> PlaitError | None:
        """Send the buffered rows, then refuse more. Returns the first error of posted messages since the last flush."""
        error: PlaitError | None = None
        seconds = self.producer.limits.send_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.flush()
        except PlaitError as failure:
            error = failure
        except TimeoutError:
            error = Timeout(
                f"{self.producer.buffered} bytes of messages had no answer within {seconds:g} s; "
                "they may or may not be stored"
            )
        closed = Closed("the client is closed; connect again")
        self.producer.close(closed)
        for sender in self._all():
            sender.abandon(closed)
        return error
