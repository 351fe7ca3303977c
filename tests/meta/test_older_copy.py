"""The meta database is replaced by an older copy of itself: numbers that were given out since are not reused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plait.clock import ManualClock
from plait.meta.database.connection import Database
from plait.meta.database.store import Store
from plait.meta.service import MetaService
from plait.wire.admin.cluster import RegisteredPartition
from tests.meta.support import join, register, settle


class Copied:
    """A database file with a copy."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "meta.db"

    def store(self) -> Store:
        return Store(Database(f"sqlite:///{self._path}"), cluster="test", alone=True)

    def copy(self, store: Store) -> None:
        with store.database.writing() as connection:
            connection.exec_driver_sql("SELECT 1")
        store.close()
        shutil.copy(self._path, self._directory / "copy.db")

    def restore(self, store: Store) -> None:
        store.close()
        for path in self._directory.glob("meta.db*"):
            path.unlink()
        shutil.copy(self._directory / "copy.db", self._path)


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def first(copied: Copied) -> MetaService:
    """A meta server with one member, and a copy of its database."""
    store = copied.store()
    service = MetaService(store, ManualClock())
    register(service, "g1")
    service.subjects.create("s", partitions=1)
    join(service, "a")
    settle(service)
    copied.copy(store)
    return service


def epochs(service: MetaService, client: str) -> set[int]:
    return {epoch for _, _, epoch in service.allocator.view("s", "g").members[client]}


def test_a_running_meta_server_gives_out_higher_epochs_after_the_restore(copied: Copied):
    service = first(copied)
    for client in ("b", "c", "d"):
        join(service, client)
        settle(service)
    lost = service.allocator.view("s", "g").epoch
    copied.restore(service._core.store)
    service.tick()
    assert service.allocator.view("s", "g").members.keys() == {"a"}
    join(service, "e")
    settle(service)
    assert min(epochs(service, "e")) > lost
    service._core.store.close()


def test_a_meta_server_that_starts_on_the_copy_gives_out_higher_epochs_once_a_broker_reported_its_own(copied: Copied):
    service = first(copied)
    join(service, "b")
    settle(service)
    lost = service.allocator.view("s", "g").epoch
    copied.restore(service._core.store)
    store = copied.store()
    later = MetaService(store, ManualClock())
    later.register_broker(
        "g1", "g1-1", "plait://g1:1", epoch=2, partitions=[RegisteredPartition("s", "s", newest=lost + 40)]
    )
    join(later, "c")
    settle(later)
    assert min(epochs(later, "c")) > lost + 40
    store.close()
