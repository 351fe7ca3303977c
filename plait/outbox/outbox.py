"""``Outbox``: adds messages in the user's own transaction.

The row of a message is part of the transaction: a rollback, also of a savepoint, removes it. All rows are sent by the
relay that has the lease, never by the process that commits. So there is one sender for each key, and the order of two
messages cannot depend on which process was faster. A commit wakes the relay of its own process; the relay of another
process finds the row at its next look.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, overload

import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session

from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.blocking_client import SyncClient
from plait.client.client import Client
from plait.client.send.encoding import Delay
from plait.errors import InvalidArgument
from plait.outbox.outbox_limits import OUTBOX_LEASE_SECONDS, OUTBOX_POLL_SECONDS
from plait.outbox.outgoing_row import outgoing_row
from plait.outbox.relay import Relay
from plait.outbox.relay_store import RelayStore
from plait.outbox.tables import outbox_table, relay_table

Blocking = orm.Session | orm.scoped_session[Any] | sa.Connection
Asynchronous = AsyncSession | async_scoped_session[Any] | AsyncConnection


class Outbox:
    """The tables of an outbox, on the application's ``MetaData``, so that migrations include them.

    ``name`` is the table of the messages; the table of the relay's lease is named ``name`` + ``_relay``.
    """

    def __init__(self, metadata: sa.MetaData, name: str = "plait_outbox", *, schema: str | None = None) -> None:
        self.table = outbox_table(metadata, name, schema)
        self.relay_table = relay_table(metadata, f"{name}_relay", schema)
        self._store = RelayStore(self.table, self.relay_table)
        self._relays: list[Relay] = []

    @overload
    def add(
        self,
        session: Blocking,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> None: ...

    @overload
    def add(
        self,
        session: Asynchronous,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> Coroutine[Any, Any, None]: ...

    def add(
        self,
        session: Blocking | Asynchronous,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> Coroutine[Any, Any, None] | None:
        """Add a message to the transaction of a session or connection. It is sent after the commit.

        With an ``AsyncSession`` or ``AsyncConnection``: ``await outbox.add(...)``. The arguments after the session are
        those of ``client.send``. A delay counts from this call.
        """
        row = outgoing_row(subject, body, key, tags, headers, delay, deliver_at)
        insert = self.table.insert().values(row)
        # A registry gives the session of the present thread or task.
        target = session() if isinstance(session, orm.scoped_session | async_scoped_session) else session
        if isinstance(target, orm.Session | sa.Connection):
            self._listen(target)
            target.execute(insert)
            return None
        if isinstance(target, AsyncSession):
            self._listen(target.sync_session)
        elif isinstance(target, AsyncConnection):
            self._listen(target.sync_connection or target)
        else:
            raise InvalidArgument(
                f"{session!r} is no session; pass a SQLAlchemy Session, Connection, AsyncSession or AsyncConnection"
            )
        return self._execute(target, insert)

    @staticmethod
    async def _execute(target: AsyncSession | AsyncConnection, insert: sa.Insert) -> None:
        await target.execute(insert)

    def _listen(self, target: Any) -> None:
        """Wake the relays of this process when the transaction is committed."""
        if not isinstance(target, orm.Session | sa.Connection):
            raise InvalidArgument("the AsyncConnection is not started; use it in 'async with engine.begin()'")
        # A connection reports a commit before it happens, so the relay looks several times in short intervals.
        name = "after_commit" if isinstance(target, orm.Session) else "commit"
        if not event.contains(target, name, self._committed):
            event.listen(target, name, self._committed)

    def _committed(self, _: Any) -> None:
        for relay in list(self._relays):
            relay.wake()

    def relay(
        self,
        client: Client | SyncClient,
        engines: Any,
        *,
        lease: Duration = OUTBOX_LEASE_SECONDS,
        poll: Duration = OUTBOX_POLL_SECONDS,
    ) -> Relay:
        """A relay for ``async with`` (or ``with``, given a blocking client) that sends the rows of these databases.

        ``engines`` is an ``Engine`` or ``AsyncEngine``, or a list of them: one for each shard. Run a relay in as many
        processes as you like. One of them sends; when it has not renewed its lease for ``lease``, another takes over.
        ``poll`` is how often it looks for rows that other processes have committed.
        """
        listed: Sequence[Any] = [engines] if isinstance(engines, sa.Engine | AsyncEngine) else list(engines)
        if not listed:
            raise InvalidArgument("the list of engines is empty; pass at least one")
        for name, value in (("lease", lease), ("poll", poll)):
            if not seconds_of(value) > 0:
                raise InvalidArgument(f"{name} must be more than 0, not {value!r}")
        return Relay(client, listed, self._store, lease=seconds_of(lease), poll=seconds_of(poll), on_open=self._opened)

    def _opened(self, relay: Relay, opened: bool) -> None:
        if opened:
            self._relays.append(relay)
        elif relay in self._relays:
            self._relays.remove(relay)
