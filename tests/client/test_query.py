"""Queries through a server: by key, id, headers and time, with and without indexes, cut and continued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

import plait
import plait.sync
from plait.errors import DataLost, InvalidArgument, InvalidFilter, SubjectNotFound
from plait.limits import MIB
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG

SMALL = msgspec.structs.replace(TEST_CONFIG, message_segment_size=1 * MIB)


def bodies(result: plait.QueryResult) -> list[bytes]:
    return [message.body for message in result]


async def test_a_key_is_found_in_order(client: plait.Client) -> None:
    for number in range(6):
        await client.send("s", b"%d" % number, key=f"k{number % 2}")
    await client.send("s", b"none")
    result = await client.query("s", key="k1")
    assert bodies(result) == [b"1", b"3", b"5"]
    assert [message.key for message in result] == ["k1"] * 3
    assert (result.partial, result.reason, result.token) == (False, None, None)
    assert not await client.query("s", key="k2")
    assert len(await client.query("s")) == 7


async def test_a_message_is_found_by_its_id_receipt_or_text(client: plait.Client) -> None:
    receipts = await client.send_many("s", [b"%d" % number for number in range(100)])
    for given in (receipts[42], receipts[42].message_id, str(receipts[42].message_id)):
        assert bodies(await client.query("s", message_id=given)) == [b"42"]
    (message,) = await client.query("s", message_id=receipts[7])
    assert bodies(await client.query("s", message_id=message)) == [b"7"]
    assert not await client.query("s", message_id="00000000000000ff-1")


async def test_everything_that_is_given_must_match(client: plait.Client) -> None:
    for number in range(8):
        await client.send("s", b"%d" % number, key=f"k{number % 2}", headers={"n": number}, tags=["big"] * (number > 3))
    assert bodies(await client.query("s", key="k1", where="n < 6", tags="big")) == [b"5"]
    assert bodies(await client.query("s", where="n >= 6")) == [b"6", b"7"]
    times = [message.store_time for message in await client.query("s")]
    assert bodies(await client.query("s", since=times[3], until=times[5])) == [b"3", b"4"]
    assert bodies(await client.query("s", key="k0", since=times[3])) == [b"4", b"6"]
    assert not await client.query("s", until="-1h")


async def test_an_argument_that_is_wrong_is_named(client: plait.Client) -> None:
    for name, value in (("scan_count", 0), ("scan_bytes", -1), ("limit", 0), ("since", "soon"), ("until", "5 o'clock")):
        with pytest.raises(InvalidArgument, match=name):
            await client.query("s", **{name: value})  # type: ignore[arg-type]


async def test_a_limit_leaves_the_rest_to_the_token(client: plait.Client) -> None:
    await client.send_many("s", [b"%d" % number for number in range(25)], keys=["a", "b", "c", "a", "b"] * 5)
    found: list[bytes] = []
    token = None
    while True:
        result = await (
            client.query("s", key="a", limit=3) if token is None else client.query("s", token=token, limit=3)
        )
        assert len(result) <= 3
        assert not result.partial
        found += bodies(result)
        if (token := result.token) is None:
            break
    assert found == [b"%d" % number for number in range(25) if number % 5 in (0, 3)]


async def test_caps_make_a_result_partial_and_the_token_continues(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.filter.scan_budget.FILTER_SCAN_FRAMES", 4)
    for number in range(40):
        await client.send("s", b"%d" % number, headers={"n": number})
    first = await client.query("s", where="n >= 30", scan_count=10)
    assert first.partial
    assert "scan_count=10" in str(first.reason)
    assert len(first) == 0
    assert list(first.reached.values()) == [first.examined_count] == [12]
    found, result = [], first
    while result.token is not None:
        result = await client.query("s", token=result.token, scan_count=10)
        found += bodies(result)
    assert found == [b"%d" % number for number in range(30, 40)]
    assert "bytes were examined (scan_bytes=1)" in str((await client.query("s", where="n = 39", scan_bytes=1)).reason)
    assert "scan_seconds" in str((await client.query("s", where="n = 39", scan_seconds=0)).reason)


async def test_a_query_sees_what_was_stored_when_it_began(client: plait.Client) -> None:
    await client.send_many("s", [b"old"] * 5)
    result = await client.query("s", limit=2)
    await client.send("s", b"new")
    rest = await client.query("s", token=result.token)
    assert bodies(rest) == [b"old"] * 3


async def test_wrong_arguments(client: plait.Client) -> None:
    await client.send_many("s", [b"x"] * 5)
    result = await client.query("s", limit=2)
    for arguments in (
        {"message_id": "17"},
        {"message_id": 17},
        {"key": ""},
        {"limit": 0},
        {"limit": 1_000_000},
        {"since": "-1m", "until": "-2m"},
        {"token": "nonsense"},
        {"token": str(result.token)[:-2]},
        {"token": result.token, "key": "k"},
        {"scan_count": 0},
    ):
        with pytest.raises(InvalidArgument):
            await client.query("s", **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidFilter):
        await client.query("s", where="n >")
    with pytest.raises(SubjectNotFound):
        await client.query("other")
    with pytest.raises(InvalidArgument, match="a query of 's'"):
        await client.query("t", token=result.token)


async def test_a_token_of_a_deleted_subject_is_refused(client: plait.Client) -> None:
    await client.send_many("s", [b"x"] * 5)
    result = await client.query("s", limit=2)
    await client.admin.delete_subject("s")
    await client.send("s", b"y")
    with pytest.raises(DataLost, match="created again"):
        await client.query("s", token=result.token)


async def test_all_partitions_are_queried_and_merged_by_time(nodes: list[EmbeddedBroker]) -> None:
    async with nodes[0].connect() as client:
        await client.admin.create_subject("s", partitions=4)
        receipts = [await client.send("s", b"%d" % n, key=f"k{n % 10}") for n in range(60)]
        result = await client.query("s", limit=7)
        found = bodies(result)
        while result.token is not None:
            result = await client.query("s", token=result.token, limit=7)
            found += bodies(result)
        assert found == [b"%d" % n for n in range(60)]
        assert bodies(await client.query("s", key="k3")) == [b"%d" % n for n in range(3, 60, 10)]
        for receipt in receipts[::9]:
            (message,) = await client.query("s", message_id=receipt)
            assert (message.partition, message.sequence) == (receipt.partition, receipt.sequence)
        await client.admin.expand_subject("s", partitions=2)
        await client.send("s", b"later", key="k3")
        assert bodies(await client.query("s", key="k3")) == [b"%d" % n for n in range(3, 60, 10)] + [b"later"]


async def indexed(broker: EmbeddedBroker) -> int:
    """Wait until all sealed segments have an index; returns how many."""
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0)
            served = broker._server.broker_host.broker  # type: ignore[union-attr]
            index, log = served.message_index, served.message_log
            if all(index.of(each) for each in log.segments[:-1]) and not index._builder:
                return len(log.segments) - 1


async def test_sealed_segments_are_indexed_and_survive_restarts_and_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.server.disk_upkeep.LOOK_SECONDS", 0.05)
    async with EmbeddedBroker(tmp_path / "data", config=SMALL) as broker, broker.connect() as client:
        for start in range(0, 40_000, 2_000):
            keys = [f"k{n}" for n in range(start, start + 2_000)]
            await client.send_many("s", [b"%d" % n + bytes(100) for n in range(start, start + 2_000)], keys=keys)
        receipt = await client.send("s", b"last", key="k5")
        assert await indexed(broker) >= 3

        async def check() -> None:
            result = await client.query("s", key="k5")
            assert [message.body[:4] for message in result] == [b"5" + bytes(3), b"last"]
            # One frame in each of two segments, and the rest of the newest one.
            assert result.examined_count <= 12_001
            assert bodies(await client.query("s", message_id=receipt)) == [b"last"]

        await check()
        await broker.restart()
        await check()
        files = sorted((tmp_path / "data" / "index").iterdir())
        files[0].write_bytes(files[0].read_bytes()[:100])
        files[1].unlink()
        broken = bytearray(files[2].read_bytes())
        broken[200] ^= 1
        files[2].write_bytes(broken)
        (tmp_path / "data" / "index" / "00000000000000000000.idx.new").write_bytes(b"draft")
        await broker.restart()
        assert bodies(await client.query("s", key="k39999"))[0].startswith(b"39999")
        assert [message.body[:2] for message in await client.query("s", key="k5")] == [b"5\0", b"la"]
        assert await indexed(broker) >= 3
        await check()
        assert sorted((tmp_path / "data" / "index").iterdir()) == files


def test_blocking_clients_query_too(plait_broker: EmbeddedBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("s", b"a", key="k")
        result = client.query("s", key="k")
        assert isinstance(result, plait.sync.QueryResult)
        assert [message.body for message in result] == [b"a"]
