"""The meta database of a node: the findings of a check, and a start after its loss."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

import plait
from plait.broker import BrokerConfig
from plait.doctor import CheckReport, Finding
from plait.limits import MIB
from plait.server import Server
from plait.server.cluster.cluster_role import database_in
from plait.storage.disk import RealDisk
from tests.cli.data_directory import check

KEYS = [f"k{n}" for n in range(24)]
_template: list[Path] = []


def node(path: Path) -> Server:
    return Server(RealDisk(path), BrokerConfig(message_segment_size=MIB), port=0, meta=database_in(path))


@pytest.fixture
async def data(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A node's directory with a strict subject that was expanded from two to three partitions, and one with one."""
    if not _template:
        made = tmp_path_factory.mktemp("template") / "data"
        server = node(made)
        await server.start()
        async with plait.connect(server.address) as client:
            await client.admin.create_subject("s", partitions=2, order="strict")
            await client.send_many("s", [b"1"] * len(KEYS), keys=KEYS)
            await client.admin.expand_subject("s", partitions=3)
            async with client.consumer("s", "g", ordered=True) as consumer:
                # All LPs have moved when the route has the new partition.
                got = 0
                while got < len(KEYS):
                    batch = await consumer.fetch(100, wait=5.0)
                    got += len(batch)
                    await batch.ack()
            await client.send_many("s", [b"2"] * len(KEYS), keys=KEYS)
            await client.send("t", b"x")
        await server.stop()
        _template.append(made)
    copy = tmp_path / "data"
    shutil.copytree(_template[0], copy)
    return copy


def only_damage(report: CheckReport) -> Finding:
    (found,) = [finding for finding in report.findings if finding.severity == "damaged"]
    assert found.part == "meta database"
    assert not report.healthy
    return found


def test_every_file_of_a_node_is_known(data: Path):
    (data / "groups" / "g2").mkdir(parents=True)
    report = check(data)
    assert report.healthy
    assert [(found.file, found.severity) for found in report.findings] == [("groups/g2", "note")]


async def test_a_lost_database_is_named_and_its_routes_are_rebuilt(data: Path):
    (data / "meta.db").unlink()
    found = only_damage(check(data))
    assert found.what == "is missing, although the logs have routes"
    assert found.harm == "the routes of 2 subjects are lost; the next start rebuilds them from the logs"
    server = node(data)
    await server.start()
    try:
        async with plait.connect(server.address) as client:
            route = await client.admin.route("s")
            assert len(route.partitions) == 3
            await client.send_many("s", [b"3"] * len(KEYS), keys=KEYS)
            seen: dict[str, list[bytes]] = {}
            async with client.consumer("s", "another", ordered=True) as consumer:
                while sum(map(len, seen.values())) < 3 * len(KEYS):
                    batch = await consumer.fetch(100, wait=5.0)
                    assert batch, f"{sum(map(len, seen.values()))} of {3 * len(KEYS)} messages can be read"
                    for message in batch:
                        seen.setdefault(message.key or "", []).append(message.body)
                    await batch.ack()
    finally:
        await server.stop()
    assert seen == {key: [b"1", b"2", b"3"] for key in KEYS}, "each key's messages in the order they were sent"
    assert check(data).healthy


@pytest.mark.parametrize("where", ["start", "middle", "everything", "cut"])
def test_a_damaged_database_is_found(data: Path, where: str):
    file = data / "meta.db"
    content = bytearray(file.read_bytes())
    if where == "start":
        content[:100] = b"\xff" * 100
    elif where == "middle":
        content[len(content) // 2 : len(content) // 2 + 8192] = b"\xa5" * 8192
    elif where == "everything":
        content = bytearray(len(content))
    else:
        del content[len(content) // 2 :]
    file.write_bytes(content)
    assert "the server does not start" in only_damage(check(data)).harm


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE plait_routes SET body = x'ff' WHERE subject = 's'", "the route of subject 's' does not decode"),
        ("DELETE FROM plait_routes WHERE subject = 's'", "'s' has no route"),
        ("DELETE FROM plait_partitions WHERE name = 's#1'", "it lacks 's#1', which"),
        ("UPDATE plait_partitions SET name = 'lost' WHERE name = 't'", "its routes lead to 'lost', which the message"),
        ("UPDATE plait_schema SET version_num = '9999'", "its schema is '9999'"),
        ("DROP TABLE plait_subjects", "no such table: plait_subjects"),
    ],
)
def test_a_database_that_contradicts_the_logs_is_found(data: Path, statement: str, what: str):
    connection = sqlite3.connect(data / "meta.db")
    connection.execute(statement)
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    found = [finding for finding in check(data).findings if finding.severity == "damaged"]
    assert any(what in each.what for each in found), found
