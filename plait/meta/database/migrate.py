"""Upgrades a database to the newest schema. A database with a newer schema is refused and not changed."""

from __future__ import annotations

import logging
from typing import Final

import sqlalchemy as sa

from plait.errors import VersionMismatch
from plait.meta.database.connection import Database

log = logging.getLogger("plait.meta")

VERSION_TABLE: Final = "plait_schema"
#: All schema versions, oldest first. ``migrations/versions`` has one module for each.
VERSIONS: Final = ("0001",)

#: Advisory lock of PostgreSQL: of several meta servers that start at once, one migrates and the others wait. The number
#: is arbitrary.
_LOCK: Final = 0x706C_6169


def migrate(database: Database) -> None:
    with database.reading() as connection:
        if _version(connection, database) == VERSIONS[-1]:
            return
    with database.writing() as connection:
        if database.dialect == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        if _version(connection, database) != VERSIONS[-1]:
            _upgrade(connection)


def _version(connection: sa.Connection, database: Database) -> str | None:
    """The schema version of the database, or None when it has no schema. Raises ``VersionMismatch`` if it is newer."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if found is not None and found not in VERSIONS:
        raise VersionMismatch(
            f"meta database {database.name} has schema {found}, this Plait supports up to {VERSIONS[-1]};"
            " use a newer Plait (nothing was changed)",
            schema=found,
        )
    return found


def _upgrade(connection: sa.Connection) -> None:
    # Hide Alembic's own log lines; Plait logs the new schema version below.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Imported only for a migration: the import takes longer than the rest of the start.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "plait.meta.database:migrations")
    command.upgrade(config, "head")
    log.info("meta database upgraded to schema %s", VERSIONS[-1])
