"""The databases of the outbox's tests: SQLite in a file, a private PostgreSQL and a private MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mariadb import MariaDB
from tests.support.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    instance = Postgres()
    try:
        yield instance
    finally:
        instance.remove()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    instance = MariaDB()
    try:
        yield instance
    finally:
        instance.remove()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    if request.param == "postgresql":
        instance: Postgres = request.getfixturevalue("postgres")
        return instance.create().replace("postgresql://", "postgresql+psycopg://", 1)
    other: MariaDB = request.getfixturevalue("mariadb")
    return other.create()
