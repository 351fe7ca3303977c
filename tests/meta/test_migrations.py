"""Migrations create the schema once, even when several meta servers start at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from plait.meta.database.connection import Database
from plait.meta.database.migrate import VERSIONS, migrate
from plait.meta.database.store import Store


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/meta.db"
    return str(request.getfixturevalue("postgres").create())


def test_the_versions_are_the_revisions_of_the_migrations():
    config = Config()
    config.set_main_option("script_location", "plait.meta.database:migrations")
    scripts = ScriptDirectory.from_config(config)
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == VERSIONS


def test_several_meta_servers_may_start_at_once(empty: str):
    count = 4
    together = Barrier(count, timeout=60)

    def start(number: int) -> str:
        database = Database(empty)
        together.wait()
        store = Store(database, cluster=f"cluster-{number}")
        database.close()
        return store.cluster

    with ThreadPoolExecutor(count) as pool:
        assert len(set(pool.map(start, range(count)))) == 1


def test_a_migration_that_fails_leaves_nothing_behind(empty: str, monkeypatch: pytest.MonkeyPatch):
    database = Database(empty)
    with database.writing() as connection:
        connection.execute(sa.text("CREATE TABLE plait_cluster (other INTEGER)"))
    with pytest.raises(Exception, match="plait_cluster"):
        migrate(database)
    with database.reading() as connection:
        assert [name for name in sa.inspect(connection).get_table_names() if name.startswith("plait_")] == [
            "plait_cluster"
        ]
    database.close()
