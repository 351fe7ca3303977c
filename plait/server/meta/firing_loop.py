"""Fires recurrences: asks ``Firings`` what is due, and sends its frames to brokers until they are confirmed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from plait import tasks
from plait.errors import OutOfSequence, PlaitError, ProducerConflict, StaleRoute, Unavailable, UnknownProducer
from plait.meta.recurring.firings import Decided, PendingFrame
from plait.meta.service import MetaService
from plait.model.route import PartitionId
from plait.server.cluster.links import BrokerOrders
from plait.server.notices import Notices

if TYPE_CHECKING:
    from plait.server.meta.meta_host import MetaHost

log = logging.getLogger("plait.meta")

R = TypeVar("R")

#: The longest pause before the database is asked again: another meta server may have added a recurrence.
POLL_SECONDS: Final = 1.0
#: The pause after all due recurrences were examined and none could be decided: their partitions have unconfirmed
#: frames, or their brokers are down. A confirmed frame ends it.
BLOCKED_SECONDS: Final = 0.2
#: After so many pages of such recurrences, this short pause.
BLOCKED_PAGES: Final = 4
PAGES_SECONDS: Final = 0.05
#: A frame that another meta server has decided is sent by this one if it is unconfirmed after this long.
TAKE_OVER_SECONDS: Final = 2.0
#: A frame is sent only within this time after it was read from the database: another server may have replaced it.
STALE_SECONDS: Final = 2.0
#: Frames in flight.
SENDS_MAX: Final = 64


class FiringLoop:
    """The firings of one meta server."""

    def __init__(self, host: MetaHost, orders: BrokerOrders, *, alone: bool) -> None:
        self._host = host
        self._orders = orders
        self._take_over = 0.0 if alone else TAKE_OVER_SECONDS
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        #: Partitions with a frame in flight.
        self._busy: set[PartitionId] = set()
        self._stored: list[PendingFrame] = []
        #: Unconfirmed frames, by (partition, producer, last sequence) → when this server sends them.
        self._due: dict[tuple[PartitionId, int, int], float] = {}
        self._next_look = 0.0
        self._blocked_pages = 0
        self._failing = Notices(log)

    def wake(self) -> None:
        """Look for due recurrences now."""
        self._work.set()

    async def decide(self, decision: Callable[[MetaService], R]) -> R:
        """Run a decision that may make a recurrence due."""
        result = await self._host.call(decision)
        self.wake()
        return result

    async def run(self) -> None:
        while True:
            pause = POLL_SECONDS
            self._work.clear()
            try:
                pause = await self._step()
                self._failing.end("database")
            except PlaitError as error:
                self._failing.begin("database", f"recurring messages wait: {error}", error.code)
            except Exception:
                log.exception("a step of the recurring messages failed; it is retried")
            if pause > 0:
                try:
                    async with asyncio.timeout(pause):
                        await self._work.wait()
                except TimeoutError:
                    pass

    async def _step(self) -> float:
        """Confirm, decide and send. Returns the pause until the next step."""
        if self._stored:
            stored, self._stored = self._stored, []
            try:
                await self._host.call(lambda s: s.firings.confirm(stored))
            except PlaitError:
                self._stored += stored
                raise
        if self._loop.time() >= self._next_look:
            await self._look()
        if len(self._busy) >= SENDS_MAX:
            return POLL_SECONDS
        read = self._host.clock.monotonic()
        decided: Decided = await self._host.call(lambda s: s.firings.decide())
        for frame in decided.frames:
            self._begin(frame, read)
        self._blocked_pages = 0 if decided.frames or not decided.more else self._blocked_pages + 1
        if self._blocked_pages >= BLOCKED_PAGES:
            self._blocked_pages = 0
            return PAGES_SECONDS
        if decided.more or self._stored:
            return 0.0
        if decided.wait is None:
            return POLL_SECONDS
        if decided.wait <= 0 and not decided.frames:
            return BLOCKED_SECONDS
        return min(decided.wait, POLL_SECONDS)

    async def _look(self) -> None:
        """Send frames that were not confirmed: of sends that failed, and of other meta servers that ended."""
        read = self._host.clock.monotonic()
        frames = await self._host.call(lambda s: s.firings.pending())
        now = self._loop.time()
        self._next_look = now + POLL_SECONDS
        due = {_key(frame): self._due.get(_key(frame), now + self._take_over) for frame in frames}
        self._due = due
        for frame in frames:
            if now >= due[_key(frame)] and len(self._busy) < SENDS_MAX:
                self._begin(frame, read)

    def _begin(self, frame: PendingFrame, read: float) -> None:
        if frame.place in self._busy:
            return
        self._busy.add(frame.place)
        task = self._host.spawn(tasks.start(self._send(frame, read), "plait-meta-firing"))

        def ended(_: asyncio.Task[None]) -> None:
            self._busy.discard(frame.place)
            self._work.set()

        task.add_done_callback(ended)

    async def _send(self, frame: PendingFrame, read: float) -> None:
        """Send a frame. If this fails, ``_look`` sends it again."""
        place = str(frame.place)
        try:
            await self._store(frame, read)
        except (OutOfSequence, UnknownProducer, ProducerConflict) as error:
            log.warning("recurring messages are sent to partition %s under a new producer id: %s", place, error)
            await self._replace(frame, lambda s: s.firings.restart(frame))
        except StaleRoute as error:
            await self._replace(frame, lambda s: s.firings.reroute(frame))
            self._wait(place, error)
        except PlaitError as error:
            self._due[_key(frame)] = self._loop.time()
            self._wait(place, error)
        else:
            self._failing.end(place, f"recurring messages are sent to partition {place} again")
            self._stored.append(frame)

    async def _store(self, frame: PendingFrame, read: float) -> None:
        addresses = await self._host.call(lambda s: s.brokers.addresses(frame.place.group))
        if not addresses:
            raise Unavailable(f"broker group {frame.place.group} is not registered")
        clock = self._host.clock
        await self._orders.store_delayed(
            addresses[0], frame.place.name, frame.frame, lambda: clock.monotonic() - read > STALE_SECONDS
        )

    def _wait(self, place: str, error: PlaitError) -> None:
        self._failing.begin(
            place, f"recurring messages cannot be sent to partition {place} yet: {error}; this is retried", "waits"
        )

    async def _replace(self, frame: PendingFrame, decide: Callable[[MetaService], list[PendingFrame]]) -> None:
        """Replace a frame that the broker does not have. Its own retry, or that of the new frames, is soon."""
        self._due[_key(frame)] = self._loop.time()
        try:
            frames = await self._host.call(decide)
        except PlaitError as error:
            self._failing.begin("database", f"recurring messages wait: {error}", error.code)
            return
        for each in frames:
            self._due[_key(each)] = self._loop.time()
        if frames:
            self._next_look = 0.0


def _key(frame: PendingFrame) -> tuple[PartitionId, int, int]:
    return frame.place, frame.producer, frame.last
