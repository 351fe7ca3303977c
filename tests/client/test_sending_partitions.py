"""Sending to a subject with several partitions: rows follow the route through every change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import plait
from plait.model.logical_partitions import lp_of_key
from tests.client.support import EAGER, PlayedMeta, until


@pytest.fixture
async def client(meta: PlayedMeta) -> AsyncIterator[plait.Client]:
    async with meta.client(limits=EAGER) as connected:
        yield connected


async def test_a_key_decides_the_partition_and_the_receipt_names_it(meta: PlayedMeta, client: plait.Client) -> None:
    for key in ("a", "b", "c", "d", 5):
        receipt = await client.send("s", b"x", key=key)
        partition = lp_of_key(str(key)) * 2 // 1024
        assert str(receipt.partition) == f"{meta.name(partition)}@{meta.group(partition)}"
        assert receipt.sequence == (await meta.rows(partition))[-1][0]


async def test_rows_posted_before_the_route_is_known_are_routed_later(meta: PlayedMeta, client: plait.Client) -> None:
    tickets = [client.post("s", b"%d" % n, key=f"k{n % 7}") for n in range(100)]
    receipts = [await ticket for ticket in tickets]
    assert {str(r.partition) for r in receipts} == {"s@g1", "s#1@g2"}
    found = await meta.by_key()
    assert found == {f"k{k}": [b"%d" % n for n in range(k, 100, 7)] for k in range(7)}
    for n, receipt in enumerate(receipts):
        rows = await meta.rows(lp_of_key(f"k{n % 7}") * 2 // 1024)
        assert (receipt.sequence, b"%d" % n) in [(row[0], row[3]) for row in rows]


async def test_send_many_routes_by_key_and_returns_receipts_in_order(meta: PlayedMeta, client: plait.Client) -> None:
    bodies, keys = [b"%d" % n for n in range(5_000)], [f"k{n % 50}" for n in range(5_000)]
    for _ in range(2):
        receipts = await client.send_many("s", bodies, keys=keys)
        places = {(str(r.partition), r.sequence): n for n, r in enumerate(receipts)}
        assert len(places) == 5_000
        for partition in range(2):
            for sequence, key, lp, body in (await meta.rows(partition))[-len(places) :]:
                n = places.pop((f"{meta.name(partition)}@{meta.group(partition)}", sequence), None)
                if n is not None:
                    assert (body, key, lp * 2 // 1024) == (bodies[n], keys[n], partition)
        assert not places


async def test_rows_without_keys_go_to_all_partitions(meta: PlayedMeta, client: plait.Client) -> None:
    receipts = [await client.send("s", b"x") for _ in range(60)]
    assert {str(r.partition) for r in receipts} == {"s@g1", "s#1@g2"}
    many = await client.send_many("s", [b"x"] * 100, keys=[None] * 100)
    assert len({str(r.partition) for r in many}) == 1


async def test_a_sealed_partition_makes_the_client_request_the_route_until_it_changes(
    meta: PlayedMeta, client: plait.Client
) -> None:
    await client.send_many("s", [b"x"] * 20, keys=[f"k{n}" for n in range(20)])
    meta.frozen = meta.route()
    await meta.change(3)
    asked = meta.asked
    sending = asyncio.ensure_future(client.send_many("s", [b"y"] * 20, keys=[f"k{n}" for n in range(20)]))
    await until(lambda: meta.asked > asked + 2)
    meta.frozen = None
    receipts = await sending
    assert {r.partition.name for r in receipts} == {"s", "s#1", "s#2"}
    assert await meta.by_key() == {f"k{n}": [b"x", b"y"] for n in range(20)}


async def test_delayed_rows_are_routed_by_key(meta: PlayedMeta, client: plait.Client) -> None:
    receipts = [await client.send("s", b"x", key=f"k{n}", delay=3600) for n in range(10)]
    for n, receipt in enumerate(receipts):
        assert receipt.partition.name == meta.name(lp_of_key(f"k{n}") * 2 // 1024)
        assert (receipt.sequence, receipt.schedule is not None) == (None, True)
    many = await client.send_many(
        "s", [b"y"] * 10, keys=[f"k{n}" for n in range(10)], delay=[timedelta(hours=n + 1) for n in range(10)]
    )
    assert [r.partition for r in many] == [r.partition for r in receipts]
    times = [r.deliver_at for r in many]
    assert times == sorted(times)  # type: ignore[type-var]


async def test_oneway_sends_are_routed_by_key(meta: PlayedMeta, client: plait.Client) -> None:
    receipts = [await client.send("s", b"%d" % n, key=f"k{n}", oneway=True) for n in range(10)]
    await client.send_many("s", [b"end"] * 20, keys=[f"k{n}" for n in range(20)])
    stored = {row[3]: meta.name(p) for p in range(2) for row in await meta.rows(p)}
    for n, receipt in enumerate(receipts):
        assert stored[b"%d" % n] == receipt.partition.name == meta.name(lp_of_key(f"k{n}") * 2 // 1024)
