"""A history whose live part comes from a server: the same messages as from its data directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.client.read import range_scan
from plait.client.read.surveyor import PartitionSpan
from plait.errors import SubjectNotFound
from plait.spark.history.lookup import History
from plait.spark.inputs.broker_input import BrokerInput
from tests.spark.histories import archive, sent, serving


async def found(client: plait.Client, place: Path, **conditions: Any) -> list[dict[str, Any]]:
    """Search in a thread, because the server runs in this one."""
    history = History(place, server=client._node._addresses[0])
    return (await asyncio.to_thread(history.find, "orders", **conditions)).to_pylist()


@pytest.fixture
async def place(tmp_path: Path) -> Path:
    """An archive of ten messages of the data directory beside it."""
    await sent(tmp_path / "data", 10)
    archive(tmp_path / "data", tmp_path / "archive")
    return tmp_path / "archive"


async def test_rows_are_those_of_the_data_directory(place: Path):
    data = place.parent / "data"
    await sent(data, 15, start=10)
    expected = History(place, data=data).find("orders").to_pylist()
    assert len(expected) == 25
    async with serving(data) as client:
        assert await found(client, place) == expected
        assert await found(client, place, key="order-1") == [row for row in expected if row["key"] == "order-1"]
        since = expected[17]["store_time"]
        assert await found(client, place, since=since) == [row for row in expected if row["store_time"] >= since]


async def test_frames_that_the_broker_splits_are_read_completely(place: Path, monkeypatch: pytest.MonkeyPatch):
    """A compressed column is sent whole, whichever of its rows are requested."""
    monkeypatch.setattr(range_scan, "READ_SIZE", 500)
    data = place.parent / "data"
    bodies = [b"%d " % number * 100 for number in range(40)]
    async with serving(data) as client, plait.connect(client._node._addresses, compression="zstd") as packing:
        receipts = await packing.send_many("orders", bodies, keys=[f"k-{number % 4}" for number in range(40)])
        rows = (await found(client, place))[10:]
        assert [row["body"] for row in rows] == bodies
        assert [row["sequence"] for row in rows] == list(range(10, 50))
        assert [row["message_id"] for row in rows] == [str(receipt.message_id) for receipt in receipts]
        assert [row["body"] for row in await found(client, place, key="k-1")] == bodies[1::4]


async def test_a_recreated_subject_has_both_lives(place: Path):
    data = place.parent / "data"
    async with serving(data) as client:
        await client.admin.delete_subject("orders")
        for number in range(100, 103):
            await client.send("orders", f"body-{number}")
        rows = await found(client, place)
        assert sorted(int(row["body"].removeprefix(b"body-")) for row in rows) == [*range(10), 100, 101, 102]


async def test_a_lookup_does_not_wait_for_later_messages(place: Path):
    async with serving(place.parent / "data") as client:
        assert len(await found(client, place)) == 10
        await client.send("orders", b"body-10")
        assert len(await found(client, place)) == 11


async def test_a_lookup_looks_again_where_a_broker_lost_messages_after_planning(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    data = place.parent / "data"
    await sent(data, 15, start=10)
    planned: list[int] = []
    spans = BrokerInput.spans

    def with_lost_tail(source: BrokerInput, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """At the first look the partition has three messages more."""
        planned.append(len(planned))
        found = spans(source, times)
        return [msgspec.structs.replace(span, end=span.end + 3) for span in found] if len(planned) == 1 else found

    monkeypatch.setattr(BrokerInput, "spans", with_lost_tail)
    async with serving(data) as client:
        assert [row["sequence"] for row in await found(client, place)] == list(range(25))
    assert planned == [0, 1]


async def test_an_unknown_subject_is_not_created(place: Path):
    async with serving(place.parent / "data") as client:
        history = History(place, server=client._node._addresses[0])
        with pytest.raises(SubjectNotFound, match=r"'unknown'.*plait://"):
            await asyncio.to_thread(history.find, "unknown")
        assert "unknown" not in {subject.subject for subject in await client.admin.subjects()}
