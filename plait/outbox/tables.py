"""The tables of an outbox, and what their rows mean.

| column | value |
| --- | --- |
| ``subject``, ``key``, ``body``, ``tags``, ``headers`` | the message, encoded as it is sent |
| ``lp``, ``size`` | the LP of the key (NULL: no key), and the bytes of the message: the relay plans with them |
| ``created``, ``due`` | send time and due time in microseconds since 1970; ``due``: NULL if there is no delay |
| ``place``, ``producer``, ``sequence`` | NULL until the relay assigns the row: its partition, and its message id |
| ``first`` | the sequence of the first row of its frame |

The relay table has one row, which is the lease and the counter of sequences. Every change of the relay to the outbox is
in a transaction that also increments ``renewals`` where ``epoch`` is the relay's own (R22). ``epoch`` grows with each
new leader, so a former leader changes nothing.

Text is stored as bytes: PostgreSQL refuses the character NUL in text, and MariaDB needs a character set for it.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from plait.limits import NAME_LENGTH_MAX, PARTITION_LENGTH_MAX

#: The only row of a relay table.
RELAY_ROW: Final = 1

_Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
#: MariaDB's BLOB holds 64 KiB only.
_Bytes = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")

#: Compared exactly, also by MariaDB, whose other collations take "a" and "A" for the same.
_Subject = sa.String(NAME_LENGTH_MAX).with_variant(
    mysql.VARCHAR(NAME_LENGTH_MAX, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
)
_Name = sa.LargeBinary().with_variant(mysql.VARBINARY(NAME_LENGTH_MAX), "mysql", "mariadb")


def outbox_table(metadata: sa.MetaData, name: str, schema: str | None = None) -> sa.Table:
    """The table of the messages that are not sent yet."""
    return sa.Table(
        name,
        metadata,
        sa.Column("id", _Number, primary_key=True, autoincrement=True),
        sa.Column("subject", _Subject, nullable=False),
        sa.Column("key", _Bytes),
        sa.Column("body", _Bytes, nullable=False),
        sa.Column("tags", _Bytes),
        sa.Column("headers", _Bytes),
        sa.Column("lp", sa.SmallInteger),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("due", sa.BigInteger),
        sa.Column("place", sa.String(PARTITION_LENGTH_MAX + 1 + NAME_LENGTH_MAX)),
        sa.Column("producer", sa.BigInteger),
        sa.Column("sequence", sa.BigInteger),
        sa.Column("first", sa.BigInteger),
        schema=schema,
        # A deleted row's id is never used again: a former leader that deletes by id cannot hit another row.
        sqlite_autoincrement=True,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


def relay_table(metadata: sa.MetaData, name: str, schema: str | None = None) -> sa.Table:
    """The table with the lease of the relay."""
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String(NAME_LENGTH_MAX)),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
        sa.Column("producer", sa.BigInteger, nullable=False),
        sa.Column("next", sa.BigInteger, nullable=False),
        schema=schema,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


def dedup_table(metadata: sa.MetaData, name: str, schema: str | None = None) -> sa.Table:
    """The table of the messages that were handled."""
    return sa.Table(
        name,
        metadata,
        sa.Column("id", _Number, primary_key=True, autoincrement=True),
        # Binary, because some collations of MariaDB take "a" and "A" for the same name.
        sa.Column("group", _Name, nullable=False),
        sa.Column("producer", sa.BigInteger, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("group", "producer", "sequence", name=f"uq_{name}_message"),
        schema=schema,
        sqlite_autoincrement=True,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )
