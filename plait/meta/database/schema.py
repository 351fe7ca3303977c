"""The tables of the meta database, and the struct of a row of each.

``changed`` is the number of the change (see ``store.py``) that last wrote the row. It only grows. It serves as the
row's version for compare-and-set, and other meta servers find new rows by it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

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
    #: The last report of its broker about finished rows (``subjects.ReportedProgress``); empty without a report.
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


_TYPES: Final[dict[Any, sa.types.TypeEngine[Any]]] = {
    # Compared byte by byte: the default collation depends on the database's configuration.
    str: sa.Text().with_variant(sa.Text(collation="C"), "postgresql"),
    int: sa.BigInteger(),
    bool: sa.Boolean(),
    bytes: sa.LargeBinary(),
}


def _column(name: str, kind: type, *, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, _TYPES[kind], primary_key=key, nullable=False)


def _mirrored(kind: type[TableRow], name: str, keys: int) -> type[TableRow]:
    """Define the table of a kind of row. The first ``keys`` fields are its key."""
    fields = msgspec.structs.fields(kind)
    kind.KEY = kind.__struct_fields__[:keys]
    columns = [_column(field.name, field.type, key=field.name in kind.KEY) for field in fields]
    index = sa.Index(f"{PREFIX}{name}_changed", "changed")
    kind.TABLE = sa.Table(PREFIX + name, metadata, *columns, index)
    return kind


#: The rows that every meta server mirrors in memory.
KINDS: Final = (
    _mirrored(BrokerRow, "brokers", 2),
    _mirrored(SubjectRow, "subjects", 1),
    _mirrored(RouteRow, "routes", 1),
    _mirrored(PartitionAssignment, "partitions", 2),
    _mirrored(GroupRow, "groups", 2),
    _mirrored(MemberRow, "members", 3),
    _mirrored(AllocationRow, "allocations", 2),
)

#: Heartbeats of each broker, client and meta server. Only the growth of a count matters; it makes no change number.
HEARTBEATS = sa.Table(PREFIX + "heartbeats", metadata, _column("name", str, key=True), _column("count", int))

#: The last decided batch of each query that writes through the exactly-once sink (``batch_commits.py``). Not mirrored:
#: every request reads it from the database.
COMMITS = sa.Table(
    PREFIX + "commits",
    metadata,
    _column("query", str, key=True),
    _column("batch", int),
    _column("version", int),
    _column("done", bool),
    #: The cluster's age at the last change of the row, in seconds (``batch_commits.ClusterAge``).
    _column("time", int),
    _column("body", bytes),
    sa.Index(PREFIX + "commits_time", "time"),
)

#: The recurrences (``recurring/``). Not mirrored: only those that are due are read.
RECURRENCES = sa.Table(
    PREFIX + "recurrences",
    metadata,
    _column("name", str, key=True),
    _column("subject", str),
    _column("body", bytes),
    _column("paused", bool),
    _column("created", int),
    #: The due time of the next firing in microseconds, or ``occurrences.NEVER``.
    _column("next", int),
    #: The number of the last firing and its due time; 0 before the first.
    _column("firings", int),
    _column("last", int),
    #: The firings in a row that were made up for.
    _column("behind", int),
    sa.Index(PREFIX + "recurrences_next", "next", "name"),
    sa.Index(PREFIX + "recurrences_subject", "subject", "name"),
)

#: Frames of firings that the broker of a partition has not confirmed yet. Not mirrored.
FIRING_FRAMES = sa.Table(
    PREFIX + "firing_frames",
    metadata,
    #: The producer id, and the producer sequence of the last row.
    _column("producer", int, key=True),
    _column("last", int),
    _column("broker_group", str),
    _column("partition", str),
    _column("subject", str),
    _column("frame", bytes),
    sa.Index(PREFIX + "firing_frames_place", "broker_group", "partition"),
    sa.Index(PREFIX + "firing_frames_subject", "subject"),
)

#: Facts of the cluster: its id, its age, the number of the last change, and the newest change of a removed row.
CLUSTER = sa.Table(
    PREFIX + "cluster",
    metadata,
    _column("name", str, key=True),
    _column("number", int),
    _column("text", str),
)
