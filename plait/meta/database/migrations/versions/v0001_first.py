"""Schema version 1: all tables of ``schema.py``. Version 2 must first copy the tables of version 1 to here."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from plait.meta.database.schema import CLUSTER, metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables, and the rows of the cluster table."""
    # Not ``checkfirst``: a table of another application is not taken over.
    metadata.create_all(op.get_bind(), checkfirst=False)
    facts = ("changes", "removed", "id")
    op.get_bind().execute(sa.insert(CLUSTER), [{"name": name, "number": 0, "text": ""} for name in facts])
