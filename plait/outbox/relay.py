"""``Relay``: competes for the lease of each database, and sends its rows while it has it.

Any number of processes may run a relay on the same databases. One of them leads each database; the others watch the
lease, and one takes over when it ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from sqlalchemy import exc

from plait import chance, tasks
from plait.client.blocking.blocking_client import SyncClient
from plait.client.client import Client
from plait.client.closing import Closing
from plait.client.send.numbered_sender import NumberedSender
from plait.clock import Clock, SystemClock
from plait.errors import InvalidArgument, PlaitError
from plait.outbox.leader import FIRST_PAUSE_SECONDS, Leader
from plait.outbox.lease_watch import LeaseWatch
from plait.outbox.outbox_limits import OUTBOX_PAUSE_SECONDS
from plait.outbox.relay_store import LeaseLost, RelayStore, RowsChanged
from plait.outbox.transactions import RelayTransactions

log = logging.getLogger("plait.outbox")


class DatabaseRelay:
    """The relay of one database."""

    def __init__(
        self, sender: NumberedSender, engine: Any, store: RelayStore, clock: Clock, lease: float, poll: float
    ) -> None:
        self._sender = sender
        self._database = RelayTransactions(engine)
        self._store = store
        self._lease = lease
        self._poll = poll
        self._clock = clock
        self._owner = f"relay-{chance.process_number()}-{chance.token(6)}"
        self._watch = LeaseWatch(lease)
        #: The error of the database that was logged last.
        self._logged = ""
        self._epoch: int | None = None
        #: True if the last term ended after the database had worked.
        self._worked = False
        self.leader: Leader | None = None

    async def run(self) -> None:
        """Lead whenever the lease is free, until the task is cancelled."""
        pause = FIRST_PAUSE_SECONDS
        try:
            while True:
                self._worked = False
                try:
                    await self._lead(*await self._take())
                except LeaseLost as lost:
                    self._epoch = None
                    log.info("%s: another relay has the lease now (%s)", self._database.name, lost)
                    pause = FIRST_PAUSE_SECONDS
                except RowsChanged as error:
                    log.warning("%s: %s; another program changes the outbox", self._database.name, error)
                except (exc.SQLAlchemyError, OSError) as error:
                    if type(error).__name__ != self._logged:
                        self._logged = type(error).__name__
                        log.warning("%s: the outbox cannot be read, trying again: %s", self._database.name, error)
                    pause = FIRST_PAUSE_SECONDS if self._worked else min(2 * pause, OUTBOX_PAUSE_SECONDS)
                await asyncio.sleep(pause)
        finally:
            await self._release()

    async def _take(self) -> tuple[int, float]:
        """Wait for the lease. Returns its epoch, and when the request for it was sent."""
        while True:
            started = self._clock.monotonic()
            lease = await self._database.run(self._store.lease)
            if lease is None:
                await self._create()
                continue
            # After a failure of the database this relay may still be the owner: it takes the lease under a new epoch.
            free = lease.owner == self._owner or self._watch.may_take(lease, started)
            if free and await self._database.run(functools.partial(self._store.take, seen=lease, owner=self._owner)):
                return lease.epoch + 1, started
            await asyncio.sleep(min(self._poll, self._lease / 10) * chance.uniform(0.5, 1.0))

    async def _create(self) -> None:
        try:
            await self._database.run(self._store.create)
        except exc.IntegrityError:
            # Another relay has created it.
            pass

    async def _lead(self, epoch: int, taken: float) -> None:
        self._epoch, self._logged = epoch, ""
        log.info("%s: this process sends the rows of the outbox (epoch %d)", self._database.name, epoch)
        self.leader = Leader(
            self._sender, self._database, self._store, self._clock, epoch, taken, self._lease, self._poll
        )
        try:
            await self.leader.lead()
        finally:
            self._worked = self.leader.worked
            self.leader = None

    async def _release(self) -> None:
        """Give the lease back, so that the next relay takes over at once."""
        try:
            if self._epoch is not None:
                await self._database.run(functools.partial(self._store.release, epoch=self._epoch))
        except (exc.SQLAlchemyError, OSError) as error:
            log.warning("%s: the lease could not be given back and will expire: %s", self._database.name, error)

    def close(self) -> None:
        """End the thread of the database."""
        self._database.close()


class Relay:
    """Sends the rows of an outbox: ``async with outbox.relay(client, engine):``, or ``with`` and a blocking client."""

    def __init__(
        self,
        client: Client | SyncClient,
        engines: Sequence[Any],
        store: RelayStore,
        *,
        lease: float,
        poll: float,
        on_open: Callable[[Relay, bool], None],
    ) -> None:
        if not isinstance(client, Client | SyncClient):
            raise InvalidArgument(f"{client!r} is no client; pass one from plait.connect or plait.sync.connect")
        self._blocking = client if isinstance(client, SyncClient) else None
        self._client = client._inner if isinstance(client, SyncClient) else client
        sender = NumberedSender(self._client)
        self._databases = [DatabaseRelay(sender, engine, store, SystemClock(), lease, poll) for engine in engines]
        self._on_open = on_open
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = Closing("the outbox relay", self._close_all)

    @property
    def leading(self) -> int:
        """The number of databases whose rows this process sends at present."""
        return sum(each.leader is not None for each in self._databases)

    @property
    def errors(self) -> dict[str, PlaitError]:
        """Subject or partition → why its rows wait, for the databases that this process leads."""
        leaders = [each.leader for each in self._databases if each.leader is not None]
        return {name: error for leader in leaders for name, error in leader.errors.items()}

    def wake(self) -> None:
        """Look for rows now. A commit in this process does it by itself; any thread may call it."""
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                # The loop has ended, and the relay with it.
                pass

    def _wake(self) -> None:
        for each in self._databases:
            if each.leader is not None:
                each.leader.wake()

    async def open(self) -> Self:
        """Start; ``async with`` does it for you."""
        if self._loop is not None:
            raise InvalidArgument("the relay is open already; create another one with outbox.relay(...)")
        self._client._check_open()
        self._loop = asyncio.get_running_loop()
        self._tasks = [tasks.keep(each.run, "plait-outbox") for each in self._databases]
        self._on_open(self, True)
        return self

    async def close(self) -> None:
        """Stop. Rows that are not sent yet stay in the outbox; another relay sends them."""
        await self._closing()

    async def _close_all(self) -> None:
        self._on_open(self, False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._databases:
            each.close()

    async def __aenter__(self) -> Self:
        if self._blocking is not None:
            raise InvalidArgument("a relay with a blocking client is opened with 'with', not 'async with'")
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> Self:
        if self._blocking is None:
            raise InvalidArgument("a relay with an asynchronous client is opened with 'async with', not 'with'")
        self._blocking._run(self.open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._blocking is not None
        self._blocking._run(self.close(), cancel=False)
