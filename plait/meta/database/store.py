"""Rows in the database: written by compare-and-set, read by change number.

Every change has a number, one higher than that of the previous change. A transaction draws its number by updating a row
that stays locked until the transaction ends, so changes are committed in the order of their numbers: a meta server that
has read all changes up to a number misses none when it asks for later ones. A row carries the number of the change that
last wrote it. To replace a row, a caller must know that number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, starmap
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from plait.meta.database.connection import ConcurrentChange, Database
from plait.meta.database.migrate import migrate
from plait.meta.database.schema import CLUSTER, FIRING_FRAMES, HEARTBEATS, KINDS, RECURRENCES, TableRow
from plait.model.route import PartitionId

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
    """The changes since a given change."""

    #: The rows include all changes up to this one.
    number: int
    rows: list[TableRow]
    #: True if these are all rows of the database; any other row that the caller has was removed.
    everything: bool


class StoreChange:
    """An open transaction. Every row that it writes gets its ``number``."""

    def __init__(self, connection: sa.Connection, number: int) -> None:
        self._connection = connection
        self.number = number
        #: Written rows.
        self.rows: list[TableRow] = []
        #: Removed rows.
        self.removed: list[TableRow] = []

    def insert(self, *rows: TableRow) -> None:
        """Insert rows. Raises ``ConcurrentChange`` if a key exists."""
        for kind, stamped in self._stamped(rows):
            self._connection.execute(_STATEMENTS[kind].insert, [msgspec.structs.asdict(row) for row in stamped])

    def put(self, *rows: TableRow) -> None:
        """Insert or overwrite rows, without a comparison: for facts of which only the newest value matters."""
        for kind, stamped in self._stamped(rows):
            statement = _STATEMENTS[kind].put[self._connection.dialect.name]
            self._connection.execute(statement, [msgspec.structs.asdict(row) for row in stamped])

    def replace(self, *pairs: tuple[_R, _R]) -> None:
        """Replace (old, new) pairs of one kind and key. Raises ``ConcurrentChange`` unless every old row is current."""
        if not pairs:
            return
        for kind, stamped in self._stamped([new for _, new in pairs]):
            fields = _fields(kind)
            values = [
                _expected(old) | {field: getattr(new, field) for field in fields}
                for (old, _), new in zip(pairs, stamped, strict=True)
            ]
            result = self._connection.execute(_STATEMENTS[kind].update, values)
            if result.rowcount != len(values):
                raise ConcurrentChange(
                    f"{len(values) - result.rowcount} of {len(values)} rows were changed by another meta server"
                )

    def remove(self, *rows: TableRow) -> None:
        """Delete rows. A row that was changed since it was read stays."""
        for kind in KINDS:
            old = [_expected(row) for row in rows if type(row) is kind]
            if old:
                self._connection.execute(_STATEMENTS[kind].delete, old)
        self.removed += rows
        newest = max((_changed(row) for row in rows), default=0)
        statement = sa.update(CLUSTER).where(CLUSTER.c.name == "removed", CLUSTER.c.number < newest)
        self._connection.execute(statement.values(number=newest))

    def heartbeats(self, names: Sequence[str]) -> dict[str, int]:
        statement = sa.select(HEARTBEATS.c.name, HEARTBEATS.c.count).where(HEARTBEATS.c.name.in_(names))
        return dict(self._connection.execute(statement).all())

    def forget_recurrences(self, subject: str) -> None:
        """Delete the recurrences of a subject, and their firings that are not confirmed."""
        self._connection.execute(sa.delete(RECURRENCES).where(RECURRENCES.c.subject == subject))
        self._connection.execute(sa.delete(FIRING_FRAMES).where(FIRING_FRAMES.c.subject == subject))

    def has_firings(self, places: Iterable[PartitionId]) -> bool:
        """Whether one of the partitions has unconfirmed firings. Call it when their rows are written, and so locked."""
        frames = FIRING_FRAMES.c
        of = (sa.and_(frames.broker_group == place.group, frames.partition == place.name) for place in places)
        return self._connection.execute(sa.select(frames.producer).where(sa.or_(sa.false(), *of))).first() is not None

    def _stamped(self, rows: Sequence[TableRow]) -> Iterator[tuple[type[TableRow], list[TableRow]]]:
        for kind, group in groupby(rows, key=type):
            stamped = [msgspec.structs.replace(row, changed=self.number) for row in group]
            self.rows += stamped
            yield kind, stamped


class Store:
    """The database as the meta server uses it."""

    def __init__(self, database: Database, *, cluster: str, alone: bool | None = None) -> None:
        """``cluster`` becomes the id of a cluster that has none yet.

        ``alone``: no other meta server uses the database, so heartbeats are not written to it. Default: True for
        SQLite.
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
        """The rows changed after change ``seen``; all rows if it is -1."""
        if seen >= 0 and self.database.quick(_QUICK_COUNTER) == seen:
            # The usual case; this runs before every decision.
            return News(seen, [], everything=False)
        with self.database.reading() as connection:
            number = connection.execute(_COUNTER).scalar_one()
            if number == seen:
                return News(number, [], everything=False)
            removed = connection.execute(_REMOVED).scalar_one()
            # A caller whose last change predates a removal cannot be sent a delta, which has no removed rows: send all.
            everything = seen < removed or seen > number
            rows: list[TableRow] = []
            for kind in KINDS:
                statements = _STATEMENTS[kind]
                if everything:
                    found = connection.execute(statements.all)
                else:
                    found = connection.execute(statements.changed, {"seen": seen})
                rows += starmap(kind, found.all())
            return News(number, rows, everything)

    @contextmanager
    def change(self) -> Iterator[StoreChange]:
        """Write rows in one transaction; it is rolled back if the block raises (``ConcurrentChange`` on a conflict)."""
        with self.database.writing() as connection:
            yield StoreChange(connection, connection.execute(_COUNT).scalar_one())

    def advance(self, number: int) -> None:
        """Raise the change counter: later changes have higher numbers than this."""
        with self.database.writing() as connection:
            statement = sa.update(CLUSTER).where(CLUSTER.c.name == "changes", CLUSTER.c.number < number)
            connection.execute(statement.values(number=number))

    def add_heartbeats(self, names: Sequence[str]) -> None:
        """Add one heartbeat to the count of each name."""
        if not names:
            return
        # Sorted, so that two meta servers lock rows in the same order and do not deadlock.
        ordered = sorted(names)
        with self.database.writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(_ADD_HEARTBEATS, {"names": ordered})
            else:
                connection.execute(_ADD_HEARTBEAT, [{"name": name, "count": 1} for name in ordered])

    def heartbeats(self, after: str, end: str, limit: int) -> list[tuple[str, int]]:
        between = {"after": after, "end": end, "limit": limit}
        with self.database.reading() as connection:
            return [(name, count) for name, count in connection.execute(_HEARTBEATS_BETWEEN, between)]

    def forget_heartbeats(self, names: Sequence[str]) -> None:
        if names:
            with self.database.writing() as connection:
                connection.execute(sa.delete(HEARTBEATS).where(HEARTBEATS.c.name.in_(names)))


def _changed(row: TableRow) -> int:
    changed: int = row.changed  # type: ignore[attr-defined]
    return changed


def _fields(kind: type[TableRow]) -> tuple[str, ...]:
    """The columns outside the key."""
    return kind.__struct_fields__[len(kind.KEY) :]


def _expected(old: TableRow) -> dict[str, Any]:
    """Key and version that the stored row must have; see ``_Statements``."""
    return {f"old_{field}": getattr(old, field) for field in (*old.KEY, "changed")}


class _Statements:
    """The statements for one kind of row, built once so that the driver can cache them."""

    def __init__(self, kind: type[TableRow]) -> None:
        table = kind.TABLE
        still = [table.c[field] == sa.bindparam(f"old_{field}") for field in (*kind.KEY, "changed")]
        self.all = sa.select(table)
        self.changed = self.all.where(table.c.changed > sa.bindparam("seen"))
        self.insert = sa.insert(table)
        self.update = sa.update(table).where(*still)
        self.delete = sa.delete(table).where(*still)
        #: By dialect: an upsert is written differently in each.
        self.put = {name: _put(insert(table), kind) for name, insert in _INSERTS.items()}


def _put(insert: Any, kind: type[TableRow]) -> Any:
    changes = {field: insert.excluded[field] for field in _fields(kind)}
    return insert.on_conflict_do_update(index_elements=list(kind.KEY), set_=changes)


_INSERTS: Final[dict[str, Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_STATEMENTS: Final = {kind: _Statements(kind) for kind in KINDS}
_ADD_HEARTBEAT: Final = sqlite.insert(HEARTBEATS).on_conflict_do_update(
    index_elements=["name"], set_={"count": HEARTBEATS.c.count + 1}
)
#: ``_ADD_HEARTBEAT`` for many names in one round trip.
_ADD_HEARTBEATS: Final = sa.text(
    f"INSERT INTO {HEARTBEATS.name} (name, count)"
    " SELECT name, 1 FROM unnest(CAST(:names AS text[])) AS name ORDER BY name"
    f" ON CONFLICT (name) DO UPDATE SET count = {HEARTBEATS.name}.count + 1"
)
_HEARTBEATS_BETWEEN: Final = (
    sa.select(HEARTBEATS.c.name, HEARTBEATS.c.count)
    .where(HEARTBEATS.c.name > sa.bindparam("after"), HEARTBEATS.c.name < sa.bindparam("end"))
    .order_by(HEARTBEATS.c.name)
    .limit(sa.bindparam("limit"))
)
