"""The connection to the meta server's database: SQLite in a file, or PostgreSQL.

Whatever the database does, callers see one of three things: it worked, ``MetaUnavailable`` (ask again later; it
reconnects by itself), or ``ConcurrentChange`` (somebody else was first; look again and decide anew).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event, exc

from plait.errors import DamageError, InvalidArgument, MetaUnavailable

#: How long a connection, a statement or a lock is waited for, in seconds: a call that takes longer is of no use.
WAIT_SECONDS: Final = 5

_WRITES: Final = "plait_writes"

#: What a database says of itself and not of what it was asked for; also that it may only be read for a while.
_PASSING: Final = (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.NotSupportedError)


def file_url(path: str) -> str:
    """The URL of a SQLite database in a file, whatever characters its name has."""
    return sa.URL.create("sqlite", database=path).render_as_string(hide_password=False)


def parse(url: str) -> sa.URL:
    """The URL of a database that a meta server can use."""
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise InvalidArgument(f"{url!r} is no database: use sqlite:///FILE or postgresql://...") from None
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        name = parsed.render_as_string(hide_password=True)
        raise InvalidArgument(f"{name} is no database that Plait can use: SQLite and PostgreSQL are")
    if kind == "sqlite" and parsed.database in (None, "", ":memory:"):
        # It would be one connection, and a meta server's threads would be in each other's transactions.
        raise InvalidArgument("a database in memory is gone with the meta server: use sqlite:///FILE")
    return parsed


class ConcurrentChange(Exception):
    """What was to be changed had been changed by somebody else; nothing was written."""


class Database:
    """Transactions on one database; any thread may use it, each transaction one of them."""

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        #: For people: without the password.
        self.name = parsed.render_as_string(hide_password=True)
        kind = parsed.get_backend_name()
        if kind == "sqlite":
            self._engine = _sqlite(parsed)
            self._reading = self._engine
        else:
            self._engine = _postgresql(parsed)
            # All statements of a reading transaction see the same moment.
            self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        #: SQLite has one writer at a time, and looks again only every now and then whether that may be the next one.
        self._one: AbstractContextManager[object] = threading.Lock() if kind == "sqlite" else nullcontext()
        self._writing = self._engine.execution_options(**{_WRITES: True})

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._engine.dialect.name

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one moment."""
        with self._translated(), self._reading.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that is carried out as a whole, or not at all if the block raises."""
        with self._one, self._translated(), self._writing.connect() as connection, connection.begin():
            yield connection

    def quick(self, statement: str) -> int | None:
        """One number, past all that is done around other statements; None: ask in a transaction, which says why."""
        if self.dialect != "sqlite":
            return None
        try:
            with closing(self._engine.raw_connection()) as connection:
                found: int = connection.cursor().execute(statement).fetchone()[0]
                return found
        except (sqlite3.Error, exc.DBAPIError):
            return None

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.IntegrityError as error:
            raise ConcurrentChange(str(error.orig)) from error
        except exc.DBAPIError as error:
            if isinstance(error, _PASSING) or error.connection_invalidated:
                raise self._unavailable(error.orig) from error
            if type(error) is exc.DatabaseError:
                raise DamageError(f"the meta database {self.name} is damaged: {error.orig}") from error
            raise
        except exc.TimeoutError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException | None) -> MetaUnavailable:
        reason = str(error).strip().partition("\n")[0]
        return MetaUnavailable(f"the meta database {self.name} cannot be used: {reason}")


def _sqlite(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"check_same_thread": False, "timeout": WAIT_SECONDS})

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        # Transactions begin where we say so, not where the driver guesses.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A transaction that is going to write takes the lock at once: it could not get it later without a conflict.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: sa.URL) -> sa.Engine:
    milliseconds = WAIT_SECONDS * 1000
    settings = {
        "statement_timeout": milliseconds,
        "lock_timeout": milliseconds,
        "idle_in_transaction_session_timeout": 2 * milliseconds,
        "synchronous_commit": "on",
    }
    arguments = {
        "connect_timeout": WAIT_SECONDS,
        "tcp_user_timeout": milliseconds,
        "application_name": "plait",
        "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
    }
    try:
        return sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            connect_args=arguments,
            pool_pre_ping=True,
            pool_timeout=WAIT_SECONDS,
        )
    except ImportError as error:
        raise InvalidArgument(f"PostgreSQL needs pip install 'plait[postgres]': {error}") from None
