"""The tables of the meta database, and the struct of a row of each.

``changed`` is the number of the change (see ``store.py``) that last wrote the row. It only grows. It serves as the
row's version for compare-and-set, and other meta servers find new rows by it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgspec
import sqlalchemy as sa

#: Prefix of all table names, so that other applications can share the database.
PREFIX = "plait_"

metadata = sa.MetaData()


class TableRow(msgspec.Struct, frozen=True, gc=False):
    """One row. Its first fields are the table's key.

    Rows are numerous and never refer to each other, so the garbage collector does not track them (``gc=False``).
    """

    TABLE: ClassVar[sa.Table]
    KEY: ClassVar[tuple[str, ...]]
    #: The columns, in the order of the fields.
    COLUMNS: ClassVar[list[sa.Column[Any]]]

    @classmethod
    def of(cls, values: sa.Row[Any]) -> Self:
        """The row of a result whose columns are in the order of ``COLUMNS``."""
        return cls(*values)


class BrokerRow(TableRow, frozen=True, gc=False):
    """A registered broker."""

    broker_group: str
    broker: str
    address: str
    #: "RW", "R", "W" or "NRW": the state that the operator set, and the state that the broker reports.
    wished: str
    reported: str
    #: The data epoch.
    epoch: int
    #: Why the broker accepts no messages, as it reports (a full disk). Empty if it accepts messages.
    reason: str = ""
    changed: int = 0


class SubjectRow(TableRow, frozen=True, gc=False):
    """A subject and its settings, as JSON."""

    name: str
    settings: str
    #: Wall time in microseconds.
    created: int
    deleted: bool = False
    changed: int = 0


class RouteRow(TableRow, frozen=True, gc=False):
    """A subject's newest route."""

    subject: str
    version: int
    body: bytes
    changed: int = 0


class PartitionAssignment(TableRow, frozen=True, gc=False):
    """A partition that a broker group has, is to make, or is to drop."""

    broker_group: str
    name: str
    subject: str
    #: The newest route version that the broker has applied to the partition; 0 until the broker has created it.
    told: int = 0
    #: "kept": a route names it. "dropping": no route names it, and its broker must drop it. "gone": its broker dropped
    #: it.
    state: str = "kept"
    #: The last report of its broker about finished rows (``known_groups.ReportedProgress``); empty without a report.
    progress: bytes = b""
    changed: int = 0


class GroupRow(TableRow, frozen=True, gc=False):
    """A consumer group of a subject. Its settings, as JSON, are those of its first member."""

    subject: str
    name: str
    settings: str
    deleted: bool = False
    changed: int = 0


class MemberRow(TableRow, frozen=True, gc=False):
    """One client's membership in a group."""

    subject: str
    name: str
    client: str
    online: bool
    changed: int = 0


class AllocationRow(TableRow, frozen=True, gc=False):
    """The allocation of an ordered group: which member is to own which LPs."""

    subject: str
    name: str
    epoch: int
    #: The allocation includes all membership changes up to this one.
    seen: int
    body: bytes
    changed: int = 0


def _name(column: str, *, key: bool = False) -> sa.Column[str]:
    # Compared byte by byte: the default collation depends on the database's configuration.
    text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    return sa.Column(column, text, primary_key=key, nullable=False)


def _number(column: str) -> sa.Column[int]:
    return sa.Column(column, sa.BigInteger, nullable=False)


def _flag(column: str) -> sa.Column[bool]:
    return sa.Column(column, sa.Boolean, nullable=False)


def _table(kind: type[TableRow], name: str, key: int, *columns: sa.Column[Any]) -> sa.Table:
    table = sa.Table(PREFIX + name, metadata, *columns, sa.Index(f"{PREFIX}{name}_changed", "changed"))
    kind.TABLE, kind.KEY = table, kind.__struct_fields__[:key]
    kind.COLUMNS = [table.c[field] for field in kind.__struct_fields__]
    return table


_table(
    BrokerRow,
    "brokers",
    2,
    _name("broker_group", key=True),
    _name("broker", key=True),
    _name("address"),
    _name("wished"),
    _name("reported"),
    _number("epoch"),
    _name("reason"),
    _number("changed"),
)
_table(
    SubjectRow,
    "subjects",
    1,
    _name("name", key=True),
    _name("settings"),
    _number("created"),
    _flag("deleted"),
    _number("changed"),
)
_table(
    RouteRow,
    "routes",
    1,
    _name("subject", key=True),
    _number("version"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    _number("changed"),
)
_table(
    PartitionAssignment,
    "partitions",
    2,
    _name("broker_group", key=True),
    _name("name", key=True),
    _name("subject"),
    _number("told"),
    _name("state"),
    sa.Column("progress", sa.LargeBinary, nullable=False),
    _number("changed"),
)
_table(
    GroupRow,
    "groups",
    2,
    _name("subject", key=True),
    _name("name", key=True),
    _name("settings"),
    _flag("deleted"),
    _number("changed"),
)
_table(
    MemberRow,
    "members",
    3,
    _name("subject", key=True),
    _name("name", key=True),
    _name("client", key=True),
    _flag("online"),
    _number("changed"),
)
_table(
    AllocationRow,
    "allocations",
    2,
    _name("subject", key=True),
    _name("name", key=True),
    _number("epoch"),
    _number("seen"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    _number("changed"),
)

#: The rows that every meta server mirrors in memory.
KINDS: tuple[type[TableRow], ...] = (
    BrokerRow,
    SubjectRow,
    RouteRow,
    PartitionAssignment,
    GroupRow,
    MemberRow,
    AllocationRow,
)

#: Heartbeats of each broker, client and meta server. Only the growth of a count matters; it makes no change number.
HEARTBEATS = sa.Table(PREFIX + "heartbeats", metadata, _name("name", key=True), _number("count"))

#: The last decided batch of each query that writes through the exactly-once sink (``batch_commits.py``). Not mirrored:
#: every request reads it from the database.
COMMITS = sa.Table(
    PREFIX + "commits",
    metadata,
    _name("query", key=True),
    _number("batch"),
    _number("version"),
    _flag("done"),
    #: The cluster's age at the last change of the row, in seconds (``cluster_age.py``).
    _number("time"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index(PREFIX + "commits_time", "time"),
)

#: Facts of the cluster: its id, its age, the number of the last change, and the newest change of a removed row.
CLUSTER = sa.Table(
    PREFIX + "cluster",
    metadata,
    _name("name", key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)
