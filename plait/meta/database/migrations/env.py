"""Alembic runs this module. The migrations use the connection and the transaction of ``migrate``."""

from __future__ import annotations

from alembic import context

from plait.meta.database.migrate import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
