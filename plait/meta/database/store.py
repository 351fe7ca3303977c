"""Rows in the database, changed by compare-and-set, and found again by what changed.

Every change has a number, one more than that of the change before. It is drawn by updating a row that stays locked to
the end of the transaction, so changes are committed in the order of their numbers: who has seen all up to one number
misses nothing when asking for what came after. A row carries the number of the change that wrote it last, and is
replaced only by who knows that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from plait.meta.database.connection import ConcurrentChange, Database
from plait.meta.database.migrate import migrate
from plait.meta.database.schema import BEATS, CLUSTER, KINDS, TableRow

_R = TypeVar("_R", bound=TableRow)

_COUNTER: Final = sa.select(CLUSTER.c.number).where(CLUSTER.c.name == "changes")
_REMOVED: Final = sa.select(CLUSTER.c.number).where(CLUSTER.c.name == "removed")
_QUICK_COUNTER: Final = f"SELECT number FROM {CLUSTER.name} WHERE name = 'changes'"
_COUNT: Final = (
    sa.update(CLUSTER)
    .where(CLUSTER.c.name == "changes")
    .values(number=CLUSTER.c.number + 1)
    .returning(CLUSTER.c.number)
)


class News(NamedTuple):
    """What changed since a caller looked last."""

    #: All up to this change is known now.
    number: int
    rows: list[TableRow]
    #: The rows are all there are: what the caller has besides is gone.
    everything: bool


class StoreChange:
    """A transaction under way; ``number`` is its own, which every row it writes gets."""

    def __init__(self, connection: sa.Connection, number: int) -> None:
        self._connection = connection
        self.number = number
        #: What was written.
        self.rows: list[TableRow] = []
        #: What was removed.
        self.removed: list[TableRow] = []

    def insert(self, *rows: TableRow) -> None:
        """New rows; ``ConcurrentChange`` if there is one with that key."""
        for kind, stamped in self._stamped(rows):
            self._connection.execute(_STATEMENTS[kind].insert, [msgspec.structs.asdict(row) for row in stamped])

    def put(self, *rows: TableRow) -> None:
        """Rows that replace whatever is there: for facts that only the newest word counts of."""
        for kind, stamped in self._stamped(rows):
            statement = _STATEMENTS[kind].put[self._connection.dialect.name]
            self._connection.execute(statement, [msgspec.structs.asdict(row) for row in stamped])

    def replace(self, *pairs: tuple[_R, _R]) -> None:
        """(old, new) rows of one kind and key; ``ConcurrentChange`` unless every old one is what the database has."""
        if not pairs:
            return
        for kind, stamped in self._stamped([new for _, new in pairs]):
            values = [_expected(old) | _content(new) for (old, _), new in zip(pairs, stamped, strict=True)]
            result = self._connection.execute(_STATEMENTS[kind].update, values)
            if result.rowcount != len(values):
                raise ConcurrentChange(f"{len(values) - result.rowcount} of {len(values)} rows were changed by others")

    def remove(self, *rows: TableRow) -> None:
        """Rows that are of no use to anybody any more; those that somebody has changed since stay."""
        for kind in KINDS:
            old = [_expected(row) for row in rows if type(row) is kind]
            if old:
                self._connection.execute(_STATEMENTS[kind].delete, old)
        self.removed += rows
        newest = max((_changed(row) for row in rows), default=0)
        statement = sa.update(CLUSTER).where(CLUSTER.c.name == "removed", CLUSTER.c.number < newest)
        self._connection.execute(statement.values(number=newest))

    def beats(self, whos: Sequence[str]) -> dict[str, int]:
        """How often each of these was heard of."""
        statement = sa.select(BEATS.c.who, BEATS.c.count).where(BEATS.c.who.in_(whos))
        return dict(self._connection.execute(statement).all())

    def _stamped(self, rows: Sequence[TableRow]) -> Iterator[tuple[type[TableRow], list[TableRow]]]:
        for kind, group in groupby(rows, key=type):
            stamped = [msgspec.structs.replace(row, changed=self.number) for row in group]
            self.rows += stamped
            yield kind, stamped


class Store:
    """The database as the meta server uses it."""

    def __init__(self, database: Database, *, cluster: str, alone: bool | None = None) -> None:
        """``cluster`` becomes the id of a cluster that has none yet.

        ``alone``: no other meta server uses the database, so heartbeats need not be noted for others. A SQLite file is
        one server's.
        """
        migrate(database)
        self.database = database
        self.alone = database.dialect == "sqlite" if alone is None else alone
        with database.writing() as connection:
            named = sa.update(CLUSTER).where(CLUSTER.c.name == "id", CLUSTER.c.text == "")
            connection.execute(named.values(text=cluster))
            known = sa.select(CLUSTER.c.text).where(CLUSTER.c.name == "id")
            self.cluster: str = connection.execute(known).scalar_one()

    def close(self) -> None:
        self.database.close()

    def news(self, seen: int) -> News:
        """What changed after the change numbered ``seen``; -1: everything."""
        if seen >= 0 and self.database.quick(_QUICK_COUNTER) == seen:
            # Asked before every decision, and nearly always so.
            return News(seen, [], everything=False)
        with self.database.reading() as connection:
            number = connection.execute(_COUNTER).scalar_one()
            if number == seen:
                return News(number, [], everything=False)
            removed = connection.execute(_REMOVED).scalar_one()
            # Number before removed, by one who has not heard of its rows: there is nothing left to hear of them by.
            everything = seen < removed or seen > number
            rows: list[TableRow] = []
            for kind in KINDS:
                statements = _STATEMENTS[kind]
                if everything:
                    found = connection.execute(statements.all)
                else:
                    found = connection.execute(statements.changed, {"seen": seen})
                rows += map(kind.of, found.all())
            return News(number, rows, everything)

    @contextmanager
    def change(self) -> Iterator[StoreChange]:
        """Write rows: all of them, or none if the block raises (``ConcurrentChange`` if others were faster)."""
        with self.database.writing() as connection:
            yield StoreChange(connection, connection.execute(_COUNT).scalar_one())

    def advance(self, number: int) -> None:
        """Changes from now on have higher numbers than this."""
        with self.database.writing() as connection:
            statement = sa.update(CLUSTER).where(CLUSTER.c.name == "changes", CLUSTER.c.number < number)
            connection.execute(statement.values(number=number))

    def beat(self, whos: Sequence[str]) -> None:
        """These were heard of once more."""
        if not whos:
            return
        # In one order everywhere, so that two servers do not wait for each other.
        ordered = sorted(whos)
        with self.database.writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(_BEAT_ALL, {"whos": ordered})
            else:
                connection.execute(_BEAT, [{"who": who, "count": 1} for who in ordered])

    def beats(self, after: str, end: str, limit: int) -> list[tuple[str, int]]:
        """How often those with names between these two were heard of, in the order of their names."""
        between = {"after": after, "end": end, "limit": limit}
        with self.database.reading() as connection:
            return [(who, count) for who, count in connection.execute(_BEATS_BETWEEN, between)]

    def forget_beats(self, whos: Sequence[str]) -> None:
        """These will not be heard of again."""
        if whos:
            with self.database.writing() as connection:
                connection.execute(sa.delete(BEATS).where(BEATS.c.who.in_(whos)))


def _changed(row: TableRow) -> int:
    changed: int = row.changed  # type: ignore[attr-defined]
    return changed


def _content(row: TableRow) -> dict[str, Any]:
    """The columns that a change may change."""
    return {field: getattr(row, field) for field in _fields(type(row))}


def _fields(kind: type[TableRow]) -> tuple[str, ...]:
    return kind.__struct_fields__[len(kind.KEY) :]


def _expected(old: TableRow) -> dict[str, Any]:
    """What the database must have for a row to be the one we know; see ``_Statements``."""
    return {f"old_{field}": getattr(old, field) for field in (*old.KEY, "changed")}


class _Statements:
    """What is done with rows of one kind, built once: the database's driver then knows it again by itself."""

    def __init__(self, kind: type[TableRow]) -> None:
        table = kind.TABLE
        still = [table.c[field] == sa.bindparam(f"old_{field}") for field in (*kind.KEY, "changed")]
        self.all = sa.select(*kind.COLUMNS)
        self.changed = self.all.where(table.c.changed > sa.bindparam("seen"))
        self.insert = sa.insert(table)
        self.update = sa.update(table).where(*still)
        self.delete = sa.delete(table).where(*still)
        #: Each database has its own word for it.
        self.put = {name: _put(insert(table), kind) for name, insert in _INSERTS.items()}


def _put(insert: Any, kind: type[TableRow]) -> Any:
    changes = {field: insert.excluded[field] for field in _fields(kind)}
    return insert.on_conflict_do_update(index_elements=list(kind.KEY), set_=changes)


_INSERTS: Final[dict[str, Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_STATEMENTS: Final = {kind: _Statements(kind) for kind in KINDS}
_BEAT: Final = sqlite.insert(BEATS).on_conflict_do_update(index_elements=["who"], set_={"count": BEATS.c.count + 1})
#: The same for many at once, without a round trip for each.
_BEAT_ALL: Final = sa.text(
    f"INSERT INTO {BEATS.name} (who, count) SELECT who, 1 FROM unnest(CAST(:whos AS text[])) AS who ORDER BY who"
    f" ON CONFLICT (who) DO UPDATE SET count = {BEATS.name}.count + 1"
)
_BEATS_BETWEEN: Final = (
    sa.select(BEATS.c.who, BEATS.c.count)
    .where(BEATS.c.who > sa.bindparam("after"), BEATS.c.who < sa.bindparam("end"))
    .order_by(BEATS.c.who)
    .limit(sa.bindparam("limit"))
)
