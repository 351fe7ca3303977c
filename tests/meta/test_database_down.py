"""The database fails and returns: calls report it, and work again without a restart of the meta server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from plait.clock import ManualClock
from plait.errors import MetaUnavailable
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.database.connection import Database
from plait.meta.database.schema import CLUSTER
from plait.meta.database.store import Store
from plait.meta.service import MetaService
from tests.meta.support import expire, join, lps, pass_time, place, register, settle, share, subject_names
from tests.support.postgres import Postgres


@pytest.fixture
def down() -> Iterator[Postgres]:
    """An instance of the test's own, which the test may stop."""
    instance = Postgres()
    try:
        yield instance
    finally:
        instance.remove()


CALLS: dict[str, Callable[[MetaService], object]] = {
    "tick": lambda service: service.tick(),
    "brokers": lambda service: service.brokers.views(),
    "register": lambda service: service.register_broker("g2", "b1", "plait://b2:1"),
    "broker_heartbeat": lambda service: service.brokers.heartbeat("g1", "g1-1", "RW"),
    "broker state": lambda service: service.brokers.wish("g1", "R"),
    "create": lambda service: service.subjects.create("new"),
    "update": lambda service: service.subjects.update("s", {"order": "strict"}),
    "delete": lambda service: service.subjects.delete("s"),
    "subjects": subject_names,
    "route": lambda service: service.routing.view("unknown"),
    "expand": lambda service: service.routing.retarget("s", 2),
    "progress": lambda service: expire(service, "s", "s@g1", 1),
    "forget broker": lambda service: service.retiring.forget("g9"),
    "client_heartbeat": lambda service: join(service, "c1"),
    "allocation": lambda service: service.allocator.view("s", "g"),
}


def test_every_call_reports_the_outage_and_works_again_afterwards(down: Postgres):
    clock = ManualClock()
    store = Store(Database(down.create()), cluster="test")
    service = MetaService(store, clock)
    register(service, "g1")
    service.subjects.create("s")
    join(service, "c1")
    settle(service)
    before = service.allocator.view("s", "g")
    down.stop()
    failed = {}
    for name, call in CALLS.items():
        with pytest.raises(MetaUnavailable, match="meta database postgresql://") as caught:
            call(service)
        failed[name] = caught.value
    assert all(error.retryable for error in failed.values())
    # Known routes are still answered, so that brokers can check them.
    assert service.routing.view("s").route.subject == "s"
    # No client is lost during the outage, however long: the meta server could not receive its heartbeats.
    for _ in range(30):
        clock.advance(1.0)
        with pytest.raises(MetaUnavailable):
            service.tick()
    down.start()
    service.tick()
    settle(service)
    assert service.allocator.view("s", "g") == before
    assert lps(share(join(service, "c1")).lps) == LOGICAL_PARTITIONS
    assert [view.state for view in service.brokers.views()] == ["RW"]
    service.subjects.create("t")
    # A client that does not return afterwards is lost.
    pass_time(clock, 12, service, alive=["g1"])
    assert service.allocator.view("s", "g").members == {}
    store.close()


def test_callers_do_not_notice_a_closed_connection_once_the_database_is_back(down: Postgres):
    store = Store(Database(down.create()), cluster="test")
    service = MetaService(store, ManualClock())
    register(service, "g1")
    service.subjects.create("s")
    down.stop()
    down.start()
    assert service.routing.view("s").route.partitions == (place("s@g1"),)
    store.close()


def test_a_database_that_is_temporarily_read_only_counts_as_down(down: Postgres):
    store = Store(Database(down.create()), cluster="test")

    def write_while_reading() -> None:
        with store.database.writing() as connection:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
            connection.execute(sa.update(CLUSTER).values(number=0))

    with pytest.raises(MetaUnavailable, match="read-only transaction"):
        write_while_reading()
    with store.change() as change:
        assert change.number == 1
    store.close()
