"""The connection to the meta server's database: SQLite in a file, or PostgreSQL.

A call has one of three results: it succeeds, it raises ``MetaUnavailable`` (retry later; the connection is restored
automatically), or it raises ``ConcurrentChange`` (another meta server changed the same row first; read and decide
again).
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

#: Timeout of a connection, a statement or a lock, in seconds. A slower reply would be useless to the caller.
WAIT_SECONDS: Final = 5

#: The database file of a node, in its data directory.
DATABASE: Final = "meta.db"

_WRITES: Final = "plait_writes"

#: Errors about the state of the database, not about the statement. They include a database that is temporarily
#: read-only.
_PASSING: Final = (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.NotSupportedError)


def file_url(path: str) -> str:
    """The URL of a SQLite database file. The path may contain any characters."""
    return sa.URL.create("sqlite", database=path).render_as_string(hide_password=False)


def parse(url: str) -> sa.URL:
    """Parse the URL of a meta database. Raises ``InvalidArgument`` unless it is SQLite in a file or PostgreSQL."""
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise InvalidArgument(f"{url!r} is not a database URL; use sqlite:///FILE or postgresql://...") from None
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        name = parsed.render_as_string(hide_password=True)
        raise InvalidArgument(f"database {name} is not supported; use sqlite:///FILE or postgresql://...")
    if kind == "sqlite" and parsed.database in (None, "", ":memory:"):
        # All threads would share one connection and therefore one transaction.
        raise InvalidArgument("a meta database in memory is lost when the meta server stops; use sqlite:///FILE")
    return parsed


class ConcurrentChange(Exception):
    """Another meta server changed the same row first; nothing was written."""


class Database:
    """Transactions on one database. Any thread may use it; a transaction belongs to one thread."""

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        #: The URL without its password, for messages.
        self.name = parsed.render_as_string(hide_password=True)
        kind = parsed.get_backend_name()
        if kind == "sqlite":
            self._engine = _sqlite(parsed)
            self._reading = self._engine
        else:
            self._engine = _postgresql(parsed)
            # All statements of a reading transaction see the same snapshot.
            self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        #: SQLite has one writer at a time, and a waiting writer only polls for its turn: a lock hands over at once.
        self._one: AbstractContextManager[object] = threading.Lock() if kind == "sqlite" else nullcontext()
        self._writing = self._engine.execution_options(**{_WRITES: True})

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._engine.dialect.name

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A read-only transaction that sees one snapshot."""
        with self._translated(), self._reading.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that is committed at the end of the block, and rolled back if the block raises."""
        with self._one, self._translated(), self._writing.connect() as connection, connection.begin():
            yield connection

    def quick(self, statement: str) -> int | None:
        """One number, read without the overhead of a transaction.

        Returns None when that is not possible; a transaction then gives the number or the error.
        """
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
                raise DamageError(
                    f"meta database {self.name} is damaged: {error.orig}; stop the meta server and restore a copy"
                ) from error
            raise
        except exc.TimeoutError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException | None) -> MetaUnavailable:
        reason = str(error).strip().partition("\n")[0]
        return MetaUnavailable(f"meta database {self.name} is unavailable: {reason}; it is retried")


def _sqlite(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"check_same_thread": False, "timeout": WAIT_SECONDS})

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        # Transactions begin explicitly, not where the driver guesses.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writing transaction takes the write lock at once: upgrading a read lock later can conflict.
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
        raise InvalidArgument(
            f"a PostgreSQL meta database needs a driver; run pip install 'plait[postgres]' ({error})"
        ) from None
