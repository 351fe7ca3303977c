"""Schema version 1: all tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _name(column: str, *, key: bool = False) -> sa.Column[str]:
    text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    return sa.Column(column, text, primary_key=key, nullable=False)


def _number(column: str) -> sa.Column[int]:
    return sa.Column(column, sa.BigInteger, nullable=False)


def _flag(column: str) -> sa.Column[bool]:
    return sa.Column(column, sa.Boolean, nullable=False)


def _body() -> sa.Column[bytes]:
    return sa.Column("body", sa.LargeBinary, nullable=False)


def _mirrored(table: str, *columns: sa.Column[Any]) -> None:
    """Create a table whose rows meta servers mirror; ``changed`` is the change that wrote a row last."""
    op.create_table(table, *columns, _number("changed"))
    op.create_index(f"{table}_changed", table, ["changed"])


def upgrade() -> None:
    """Create all tables, and the rows of the cluster table."""
    _mirrored(
        "plait_brokers",
        _name("broker_group", key=True),
        _name("broker", key=True),
        *(_name(column) for column in ("address", "wished", "reported")),
        _number("epoch"),
        _name("reason"),
    )
    _mirrored("plait_subjects", _name("name", key=True), _name("settings"), _number("created"), _flag("deleted"))
    _mirrored("plait_routes", _name("subject", key=True), _number("version"), _body())
    _mirrored(
        "plait_partitions",
        _name("broker_group", key=True),
        _name("name", key=True),
        _name("subject"),
        _number("told"),
        _name("state"),
        sa.Column("progress", sa.LargeBinary, nullable=False),
    )
    group = ("subject", "name")
    _mirrored("plait_groups", *(_name(column, key=True) for column in group), _name("settings"), _flag("deleted"))
    _mirrored("plait_members", *(_name(column, key=True) for column in (*group, "client")), _flag("online"))
    _mirrored(
        "plait_allocations",
        *(_name(column, key=True) for column in group),
        *(_number(column) for column in ("epoch", "seen")),
        _body(),
    )
    op.create_table("plait_heartbeats", _name("name", key=True), _number("count"))
    op.create_table(
        "plait_commits",
        _name("query", key=True),
        *(_number(column) for column in ("batch", "version")),
        _flag("done"),
        _number("time"),
        _body(),
    )
    op.create_index("plait_commits_time", "plait_commits", ["time"])
    cluster = op.create_table(
        "plait_cluster",
        _name("name", key=True),
        _number("number"),
        sa.Column("text", sa.Text, nullable=False),
    )
    facts = [("changes", 0, ""), ("removed", 0, ""), ("id", 0, "")]
    op.bulk_insert(cluster, [{"name": name, "number": number, "text": text} for name, number, text in facts])
