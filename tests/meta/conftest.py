"""Databases for the meta server's tests: every test that asks for ``url`` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.clock import ManualClock
from plait.limits import MetaLimits
from plait.meta.database.connection import Database
from plait.meta.database.migrate import migrate
from plait.meta.database.store import Store
from plait.meta.service import MetaService
from tests.meta.support import Stores, converge, register
from tests.support.postgres import Postgres, name_of


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL instance for all tests."""
    instance = Postgres()
    try:
        yield instance
    finally:
        instance.remove()


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    """The name of a database with the newest schema; copying it is faster than running the migrations."""
    url = postgres.create()
    database = Database(url)
    migrate(database)
    database.close()
    return name_of(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database with the newest schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/meta.db"
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    address = postgres.create(request.getfixturevalue("template"))
    yield address
    postgres.drop(address)


@pytest.fixture
def stores(url: str) -> Iterator[Stores]:
    """Makes stores over the test's database; each store has its own connections."""
    opened: list[Store] = []

    def store(*, alone: bool = False) -> Store:
        opened.append(Store(Database(url), cluster="test", alone=alone))
        return opened[-1]

    yield store
    for each in opened:
        each.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def service(stores: Stores, clock: ManualClock) -> MetaService:
    """A meta server with one broker group, g1."""
    made = MetaService(stores(), clock, MetaLimits())
    made.register_broker("g1", "b1", "plait://b1:1")
    return made


@pytest.fixture
def subject(service: MetaService) -> MetaService:
    """A meta server with one broker group, g1, and the subject s."""
    service.subjects.create("s")
    return service


@pytest.fixture
def spread(service: MetaService) -> MetaService:
    """A meta server with three broker groups, and a subject on two of them."""
    register(service, "g2", "g3")
    service.subjects.create("s", groups=["g1", "g2"])
    converge(service)
    return service
