"""Two meta server processes share one PostgreSQL database: either of them is enough."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import broker, meta, plait
from tests.support.postgres import Postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    instance = Postgres()
    try:
        yield instance
    finally:
        instance.remove()


def test_a_cluster_continues_with_either_of_its_meta_servers(postgres: Postgres, tmp_path: Path):
    url = postgres.create()
    with meta(url) as first, meta(url) as second:
        clusters = {re.search(r" cluster=(\w+) ", each.ready)[1] for each in (first, second)}  # type: ignore[index]
        assert len(clusters) == 1
        both = f"{first.address},{second.address}"
        with broker("g1", both, tmp_path / "g1"):
            made = plait("subject", "create", "one", "--server", first.address)
            assert made.returncode == 0, made.stderr
            assert plait("send", "one", "x", "--server", second.address).returncode == 0
            code, _, err = first.stop()
            assert code == 0
            assert "Traceback" not in err
            made = plait("subject", "create", "two", "--partitions", "2", "--server", both)
            assert made.returncode == 0, made.stderr
            listed = plait("subject", "list", "-o", "json", "--server", both)
            assert [each["partition"] for each in json.loads(listed.stdout)] == ["one@g1", "two#1@g1", "two@g1"]
            with meta(url) as again:
                assert plait("subject", "route", "two", "--server", again.address).returncode == 0


def test_a_meta_server_survives_a_restart_of_its_database(postgres: Postgres, tmp_path: Path):
    url = postgres.create()
    with meta(url) as server, broker("g1", server.address, tmp_path / "g1"):
        assert plait("subject", "create", "s", "--server", server.address).returncode == 0
        postgres.stop()
        try:
            away = plait("subject", "create", "t", "--server", server.address)
            assert away.returncode == 3
            assert b"(meta_unavailable)" in away.stderr
        finally:
            postgres.start()
        assert plait("subject", "create", "t", "--server", server.address).returncode == 0
        assert server.stop()[0] == 0
