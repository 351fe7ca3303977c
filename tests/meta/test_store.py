"""The store: totally ordered changes, compare-and-set, and news without gaps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from plait.errors import DamageError, InvalidArgument, MetaUnavailable
from plait.meta.database.connection import ConcurrentChange, Database
from plait.meta.database.schema import MemberRow, SubjectRow
from plait.meta.database.store import Store
from tests.meta.support import Stores

SUBJECT = SubjectRow("s", "{}", 1)


def write(store: Store, *rows: SubjectRow) -> list[SubjectRow]:
    with store.change() as change:
        change.insert(*rows)
    return [row for row in change.rows if isinstance(row, SubjectRow)]


def test_a_written_row_is_news_to_other_stores_once(stores: Stores):
    one, two = stores(), stores()
    start = two.news(-1)
    (row,) = write(one, SUBJECT)
    news = two.news(start.number)
    assert (news.rows, news.number, news.everything) == ([row], start.number + 1, False)
    assert two.news(news.number).rows == []


def test_a_row_is_replaced_only_by_a_caller_that_has_its_current_version(stores: Stores):
    store = stores()
    (row,) = write(store, SUBJECT)
    with store.change() as change:
        change.replace((row, msgspec.structs.replace(row, settings="1")))
    with pytest.raises(ConcurrentChange), store.change() as change:
        change.replace((row, msgspec.structs.replace(row, settings="2")))
    (found,) = store.news(-1).rows
    assert isinstance(found, SubjectRow)
    assert found.settings == "1"


def test_a_change_is_atomic(stores: Stores):
    store = stores()
    row, other = write(store, SUBJECT, SubjectRow("t", "{}", 1))
    number = store.news(-1).number
    stale = msgspec.structs.replace(other, changed=77)

    def partly() -> None:
        with store.change() as change:
            change.insert(SubjectRow("u", "{}", 1))
            change.replace((row, msgspec.structs.replace(row, settings="1")), (stale, stale))

    with pytest.raises(ConcurrentChange):
        partly()
    assert store.news(-1).number == number
    assert store.news(number).rows == []


def test_an_existing_row_is_not_inserted(stores: Stores):
    store = stores()
    write(store, SUBJECT)
    with pytest.raises(ConcurrentChange):
        write(store, SUBJECT)


def test_the_newest_value_of_a_fact_wins(stores: Stores):
    store = stores()
    for online in (True, False, True):
        with store.change() as change:
            change.put(MemberRow("s", "g", "c1", online), MemberRow("s", "g", "c2", online=False))
    rows = [row for row in store.news(-1).rows if isinstance(row, MemberRow)]
    assert {row.client: row.online for row in rows} == {"c1": True, "c2": False}
    assert {row.changed for row in rows} == {store.news(-1).number}


def test_a_reader_that_missed_a_removal_receives_the_full_state(stores: Stores):
    store = stores()
    start = store.news(-1).number
    row, other = write(store, SUBJECT, SubjectRow("t", "{}", 1))
    aware = store.news(-1).number
    with store.change() as change:
        change.remove(row)
    assert store.news(start).everything
    assert store.news(start).rows == [other]
    assert not store.news(aware).everything
    assert store.news(aware).rows == []


def test_a_row_that_was_changed_meanwhile_is_not_removed(stores: Stores):
    store = stores()
    (row,) = write(store, SUBJECT)
    with store.change() as change:
        change.replace((row, msgspec.structs.replace(row, settings="1")))
    with store.change() as change:
        change.remove(row)
    assert len(store.news(-1).rows) == 1


def test_changes_are_seen_in_the_order_of_their_numbers(stores: Stores):
    """A reader that asks for changes after the last one seen misses none, however many writers there are."""
    writers, reader = [stores() for _ in range(3)], stores()

    def fill(number: int) -> None:
        for at in range(30):
            write(writers[number], SubjectRow(f"{number}-{at}", "{}", 1))

    seen, found = reader.news(-1).number, []
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(fill, number) for number in range(3)]
        while not all(each.done() for each in running):
            news = reader.news(seen)
            seen, found = news.number, found + news.rows
        for each in running:
            each.result()
    found += reader.news(seen).rows
    names = [row.name for row in found if isinstance(row, SubjectRow)]
    assert len(set(names)) == 90
    assert len(names) == 90


def test_the_cluster_keeps_its_first_id(url: str, stores: Stores):
    assert stores().cluster == "test"
    database = Database(url)
    assert Store(database, cluster="another").cluster == "test"
    database.close()


def test_sqlite_is_durable_through_a_crash(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/meta.db")
    with database.reading() as connection:
        assert connection.scalar(sa.text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(sa.text("PRAGMA synchronous")) == 2
    database.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mysql://h/d", "is not supported"),
        ("nonsense", "is not a database URL"),
        ("://", "is not a database URL"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_other_databases_are_refused(url: str, text: str):
    with pytest.raises(InvalidArgument, match=text):
        Database(url)


def test_a_file_that_cannot_be_opened_is_reported_as_unavailable(tmp_path: Path):
    with pytest.raises(MetaUnavailable, match="unable to open database file"):
        Store(Database(f"sqlite:///{tmp_path}/nowhere/meta.db"), cluster="x")


def test_a_file_that_is_no_database_is_reported_as_damaged(tmp_path: Path):
    (tmp_path / "meta.db").write_bytes(b"something else " * 100)
    database = Database(f"sqlite:///{tmp_path}/meta.db")
    with pytest.raises(DamageError, match="not a database"):
        Store(database, cluster="x")
    database.close()
