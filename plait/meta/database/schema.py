"""The meta server's tables, and what a row of each is in memory.

``changed`` is the number of the change (see ``store.py``) that wrote a row last. It only grows, so it is the
row's version, which every change compares before it sets, and by it others find what is new to them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgspec
import sqlalchemy as sa

#: What is added to every table's name, so that a database can be shared with others.
PREFIX = "plait_"

metadata = sa.MetaData()


class TableRow(msgspec.Struct, frozen=True, gc=False):
    """One row. Its first fields, as many as the table's key has, identify it.

    There are many, and none refers to another: the garbage collector need not look at them.
    """

    TABLE: ClassVar[sa.Table]
    KEY: ClassVar[tuple[str, ...]]
    #: The columns, in the order of the fields.
    COLUMNS: ClassVar[list[sa.Column[Any]]]

    @classmethod
    def of(cls, values: sa.Row[Any]) -> Self:
        """The row that a statement found, with the columns in order."""
        return cls(*values)


class BrokerRow(TableRow, frozen=True, gc=False):
    """A broker that has registered itself."""

    broker_group: str
    broker: str
    address: str
    #: "RW", "R", "W" or "NRW": what the operator wants of it, and what it says of itself.
    wished: str
    reported: str
    #: The epoch of its data.
    epoch: int
    #: Why it takes no messages, as it says: a full disk. Empty where it does.
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
    #: The newest route that its broker has carried out; 0: it has not made the partition yet.
    told: int = 0
    #: "kept"; "dropping": no route leads to it any more, its broker is to drop it; "gone": it has.
    state: str = "kept"
    #: What its broker has reported last of what is finished there (``retiring.Progress``); empty: nothing.
    progress: bytes = b""
    changed: int = 0


class GroupRow(TableRow, frozen=True, gc=False):
    """A consumer group of a subject; its settings, as JSON, are those of its first member."""

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
    """Which member of an exclusive group is to handle what."""

    subject: str
    name: str
    epoch: int
    #: All changes of members up to this one are in it.
    seen: int
    body: bytes
    changed: int = 0


def _name(column: str, *, key: bool = False) -> sa.Column[str]:
    # Compared byte by byte everywhere: how a database sorts words is up to its administrator.
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

#: Rows that every meta server has in memory.
KINDS: tuple[type[TableRow], ...] = (
    BrokerRow,
    SubjectRow,
    RouteRow,
    PartitionAssignment,
    GroupRow,
    MemberRow,
    AllocationRow,
)

#: How often each broker and client was heard of: that it grows is all that counts, and nobody is told.
BEATS = sa.Table(PREFIX + "beats", metadata, _name("who", key=True), _number("count"))

#: Of each query that writes batches with exactly one effect, the last that was decided (``commits.py``). Nobody has it
#: in memory: whoever asks is told by the database.
COMMITS = sa.Table(
    PREFIX + "commits",
    metadata,
    _name("query", key=True),
    _number("batch"),
    _number("version"),
    _flag("done"),
    #: The cluster's age when it was last changed, in seconds (``age.py``).
    _number("time"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index(PREFIX + "commits_time", "time"),
)

#: Facts of the cluster: its id, its age, the number of the last change, and up to which change rows were removed.
CLUSTER = sa.Table(
    PREFIX + "cluster",
    metadata,
    _name("name", key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)
