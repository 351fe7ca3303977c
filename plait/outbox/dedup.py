"""``Dedup``: a redelivered message has no second effect in the database.

Delivery is at least once. The id of a message is inserted in the transaction of its handler, so it is stored exactly if
the handler's changes are. For a redelivered message the insert fails on a unique constraint, and the handler is not
called. If two consumers handle one message at the same time, as after the end of a lease, the second insert waits for
the first transaction.

The table keeps the newest ``keep`` ids, in the order of their inserts: no clocks are compared.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from plait.client.types import Message
from plait.errors import InvalidArgument
from plait.outbox.outbox_limits import DEDUP_CLEAN_EVERY, DEDUP_KEEP_IDS
from plait.outbox.tables import dedup_table

log = logging.getLogger("plait.outbox")

#: Calls the handler with the transaction and the indexes of the messages that were not handled before.
CallHandler = Callable[[Any, list[int]], Any]
#: Handles messages of a group: (group, messages, the call of the handler).
RunHandler = Callable[[str, Sequence[Message], CallHandler], Any]


class _Raced(Exception):
    """Another consumer has recorded one of the messages in the meantime."""


class Dedup:
    """Pass it as ``@app.subscriber(..., dedup=Dedup(engine, metadata))``; one object serves any number of handlers.

    The table ``name`` is added to ``metadata``, so that migrations include it. It keeps the newest ``keep`` ids.
    """

    def __init__(
        self,
        engine: sa.Engine | AsyncEngine,
        metadata: sa.MetaData,
        name: str = "plait_dedup",
        *,
        schema: str | None = None,
        keep: int = DEDUP_KEEP_IDS,
    ) -> None:
        if not isinstance(engine, sa.Engine | AsyncEngine):
            raise InvalidArgument(f"{engine!r} is no engine; pass a SQLAlchemy Engine or AsyncEngine")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise InvalidArgument(f"keep must be a number of message ids from 1, not {keep!r}")
        self.table = dedup_table(metadata, name, schema)
        self._engine = engine
        self._keep = keep
        #: The number of messages that this process has handled; threads may lose some, which only delays a cleaning.
        self._handled = 0
        self._insert = self.table.insert()

    # --- called by the app ----------------------------------------------------------------------

    def runner(self, handler: str, *, is_async: bool, annotations: Sequence[Any]) -> tuple[RunHandler, int]:
        """How to run a handler, and which of its parameters gets the transaction. Refuses an unfit handler."""
        blocking, asynchronous = (orm.Session, sa.Connection), (AsyncSession, AsyncConnection)
        kinds = asynchronous if is_async else blocking
        for index, annotation in enumerate(annotations):
            if isinstance(annotation, type) and issubclass(annotation, kinds):
                if isinstance(self._engine, AsyncEngine) != is_async:
                    other = "an Engine" if isinstance(self._engine, sa.Engine) else "an AsyncEngine"
                    wanted = "AsyncEngine" if is_async else "Engine"
                    raise InvalidArgument(f"handler {handler}: its Dedup has {other}; give it an {wanted}")
                run = self._run_async if is_async else self._run
                return functools.partial(run, annotation), index
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidArgument(
            f"handler {handler} takes no transaction; with dedup= annotate a parameter {names}, and change the "
            "database through it"
        )

    # --- handling -------------------------------------------------------------------------------

    def _run(self, kind: type, group: str, messages: Sequence[Message], call: CallHandler) -> None:
        assert isinstance(self._engine, sa.Engine)
        for attempt in itertools.count():
            record = functools.partial(self._record, group=group, messages=messages, attempt=attempt)
            try:
                if issubclass(kind, orm.Session):
                    with kind(self._engine) as session, session.begin():
                        if new := record(session.connection()):
                            call(session, new)
                else:
                    with self._engine.begin() as connection:
                        if new := record(connection):
                            call(connection, new)
                break
            except _Raced:
                continue
        if self._is_time_to_clean(len(messages)):
            try:
                with self._engine.begin() as connection:
                    self.clean(connection)
            except exc.SQLAlchemyError as error:
                log.warning("old message ids of %s could not be deleted: %s", self.table.name, error)

    async def _run_async(self, kind: type, group: str, messages: Sequence[Message], call: CallHandler) -> None:
        assert isinstance(self._engine, AsyncEngine)
        for attempt in itertools.count():
            record = functools.partial(self._record, group=group, messages=messages, attempt=attempt)
            try:
                if issubclass(kind, AsyncSession):
                    async with kind(self._engine) as session, session.begin():
                        if new := await (await session.connection()).run_sync(record):
                            await call(session, new)
                else:
                    async with self._engine.begin() as connection:
                        if new := await connection.run_sync(record):
                            await call(connection, new)
                break
            except _Raced:
                continue
        if self._is_time_to_clean(len(messages)):
            try:
                async with self._engine.begin() as connection:
                    await connection.run_sync(self.clean)
            except exc.SQLAlchemyError as error:
                log.warning("old message ids of %s could not be deleted: %s", self.table.name, error)

    def _record(self, connection: sa.Connection, group: str, messages: Sequence[Message], attempt: int) -> list[int]:
        """Record the messages as handled; returns the indexes of those that were not recorded before."""
        c, name = self.table.c, group.encode()
        ids = [tuple(message.message_id) for message in messages]
        known: set[tuple[int, ...]] = set()
        # One message is nearly always new: its insert is the check.
        if len(ids) > 1 or attempt:
            found = sa.select(c.producer, c.sequence).where(c.group == name, sa.tuple_(c.producer, c.sequence).in_(ids))
            known = {tuple(row) for row in connection.execute(found)}
        # A message may be in a batch twice.
        firsts = {each: index for index, each in reversed(list(enumerate(ids)))}
        new = [index for index, each in enumerate(ids) if each not in known and firsts[each] == index]
        # Sorted, so that two consumers with the same messages do not wait for each other.
        rows = [
            {"group": name, "producer": producer, "sequence": sequence}
            for producer, sequence in sorted(ids[index] for index in new)
        ]
        if rows:
            try:
                connection.execute(self._insert, rows)
            except exc.IntegrityError:
                if attempt > len(ids):
                    # Each race means that another consumer has recorded one more of the messages.
                    raise
                raise _Raced from None
        return new

    # --- old ids --------------------------------------------------------------------------------

    def _is_time_to_clean(self, count: int) -> bool:
        before = self._handled
        self._handled = before + count
        return before // DEDUP_CLEAN_EVERY != self._handled // DEDUP_CLEAN_EVERY

    def clean(self, connection: sa.Connection) -> int:
        """Delete the oldest ids beyond ``keep``, some thousands at a time; returns how many. Handlers do it, too."""
        c = self.table.c
        oldest, newest = connection.execute(sa.select(sa.func.min(c.id), sa.func.max(c.id))).one()
        if newest is None or newest - oldest < self._keep:
            return 0
        last = min(newest - self._keep, oldest + 10 * DEDUP_CLEAN_EVERY)
        return connection.execute(self.table.delete().where(c.id <= last)).rowcount

    def forget(self, connection: sa.Connection, group: str) -> int:
        """Delete all ids of a group, so that messages that the group gets again by a reset are handled again."""
        return connection.execute(self.table.delete().where(self.table.c.group == group.encode())).rowcount
