"""Brings a database to the schema of this version; refuses one that is ahead of it, untouched."""

from __future__ import annotations

import logging
from typing import Final

import sqlalchemy as sa

from plait.errors import VersionMismatch
from plait.meta.database.connection import Database

log = logging.getLogger("plait.meta")

VERSION_TABLE: Final = "plait_schema"
#: All versions of the schema, oldest first; what each one does is in ``migrations/versions``.
VERSIONS: Final = ("0001", "0002")

#: Several meta servers may start at once: one migrates, the others wait. The number is any that nobody else uses.
_LOCK: Final = 0x706C_6169


def migrate(database: Database) -> None:
    """The database has the newest schema afterwards."""
    with database.reading() as connection:
        if _version(connection, database) == VERSIONS[-1]:
            return
    with database.writing() as connection:
        if database.dialect == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        if _version(connection, database) != VERSIONS[-1]:
            _upgrade(connection)


def _version(connection: sa.Connection, database: Database) -> str | None:
    """The schema's version; None: there is none yet."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if found is not None and found not in VERSIONS:
        raise VersionMismatch(
            f"the meta database {database.name} has schema {found}, this Plait knows up to {VERSIONS[-1]}:"
            " use the newer Plait; nothing was changed",
            schema=found,
        )
    return found


def _upgrade(connection: sa.Connection) -> None:
    # A user of Plait has no use for Alembic's steps; that the schema is new is said in Plait's own words.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Only who migrates pays for it: this takes longer to import than all of the rest to start.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "plait.meta.database:migrations")
    command.upgrade(config, "head")
    log.info("the meta database has schema %s", VERSIONS[-1])
