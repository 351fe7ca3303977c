"""The private PostgreSQL: it leaves nothing behind, and its tests are skipped where it is not installed."""

from __future__ import annotations

import psycopg
import pytest

from tests.support import leaks, postgres
from tests.support.postgres import Postgres


def test_it_is_separate_from_other_instances_and_removed_afterwards():
    token = leaks.mark_run()
    before = leaks.observe(token)
    instance = Postgres()
    try:
        found = leaks.observe(token).beyond(before)
        with psycopg.connect(instance.create()) as connection:
            directory = connection.execute("SHOW data_directory").fetchone()
    finally:
        instance.remove()
    # It listens on no port: only its socket reaches it.
    assert found
    assert all("postgres" in line and line.startswith("process") for line in found)
    assert directory is not None
    assert "plait-pg-" in directory[0]
    assert leaks.observe(token).beyond(before) == []


def test_where_it_is_not_installed_the_test_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres, "find_programs", lambda: None)
    monkeypatch.delenv("PLAIT_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="tools/debian-install postgresql"):
        Postgres()
    monkeypatch.setenv("PLAIT_REQUIRE", "all")
    with pytest.raises(pytest.fail.Exception, match="PostgreSQL is not installed"):
        Postgres()
