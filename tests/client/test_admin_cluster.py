"""Management of a cluster through ``client.admin``: a real meta server and two brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.client.admin.admin import _route_info
from plait.limits import LOGICAL_PARTITIONS, PARKED_PAGE_MAX
from plait.meta.database.connection import file_url
from plait.server.meta.meta_server import MetaServer
from plait.testing import EmbeddedBroker
from plait.wire.admin.cluster import RouteDetails
from tests.client.support import EAGER, PATIENCE_SECONDS, config_of

HALF = LOGICAL_PARTITIONS // 2


@pytest.fixture
async def meta_server(tmp_path: Path) -> AsyncIterator[MetaServer]:
    server = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def pair(meta_server: MetaServer, tmp_path: Path) -> AsyncIterator[list[EmbeddedBroker]]:
    metas = [meta_server.address]
    async with (
        EmbeddedBroker(tmp_path / "1", config=config_of("g1"), metas=metas) as first,
        EmbeddedBroker(tmp_path / "2", config=config_of("g2"), metas=metas) as second,
    ):
        yield [first, second]


@pytest.fixture
async def client(meta_server: MetaServer, pair: list[EmbeddedBroker]) -> AsyncIterator[plait.Client]:
    async with plait.connect(meta_server.address, client_id="c", limits=EAGER) as connected:
        yield connected


async def reached(client: plait.Client, subject: str) -> plait.RouteInfo:
    """Wait until the route has reached its target, and return it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (route := await client.admin.route(subject)).reached:
            pass
    return route


async def test_a_subject_is_created_with_its_order_and_partitions(client: plait.Client) -> None:
    made = await client.admin.create_subject("s", order="strict", partitions=3, retention="1h", retention_bytes=7)
    assert made.partition == "s@g1, s@g2, s#1@g1"
    assert (made.count, made.retention_seconds, made.retention_bytes) == (0, 3600.0, 7)
    route = await client.admin.route("s")
    assert (route.subject, route.order, route.reached, route.moving) == ("s", "strict", True, 0)
    assert [(p.partition, p.takes, p.wanted, p.draining) for p in route.partitions] == [
        ("s@g1", 341, 341, 0),
        ("s@g2", 341, 341, 0),
        ("s#1@g1", 342, 342, 0),
    ]
    with pytest.raises(plait.SubjectExists):
        await client.admin.create_subject("s")
    assert (await client.admin.create_subject("on2", groups=["g2"])).partition == "on2@g2"
    assert (await client.admin.create_subject("usual")).partition == "usual@g1, usual@g2"


async def test_a_subject_is_spread_by_number_or_by_name(client: plait.Client) -> None:
    await client.admin.create_subject("s", groups=["g1"])
    await client.send_many("s", [b"%d" % n for n in range(50)], keys=[f"k{n}" for n in range(50)])
    before = await client.admin.route("s")
    at_once = await client.admin.expand_subject("s", 2)
    assert {p.partition: p.wanted for p in at_once.partitions} == {"s@g1": HALF, "s@g2": HALF}
    after = await reached(client, "s")
    assert after.version > before.version
    assert {p.partition: (p.takes, p.draining) for p in after.partitions} == {"s@g1": (HALF, HALF), "s@g2": (HALF, 0)}
    await client.admin.expand_subject("s", [plait.PartitionName("s", "g2"), "other@g1"])
    named = await reached(client, "s")
    assert {p.partition: p.takes for p in named.partitions} == {"s@g1": 0, "s@g2": HALF, "other@g1": HALF}
    assert (await client.admin.subject("s")).subject.count == 50


async def test_brokers_and_their_states(client: plait.Client, pair: list[EmbeddedBroker]) -> None:
    found = await client.admin.brokers()
    assert [(b.group, b.address, b.wished, b.state, b.partitions) for b in found] == [
        (broker.config.group, broker.address, "RW", "RW", 0) for broker in pair
    ]
    await client.admin.set_broker_state("g1", "R")
    assert [(b.wished, b.state) for b in await client.admin.brokers()] == [("R", "R"), ("RW", "RW")]
    assert (await client.admin.create_subject("s")).partition == "s@g2"


async def test_the_allocation_names_the_share_of_each_member(client: plait.Client) -> None:
    async with (
        client.consumer("s", group="ordered", ordered=True),
        client.consumer("s", group="shared"),
    ):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (ordered := await client.admin.allocation("s", "ordered")).members[0].count == 0:
                pass
        assert (ordered.strategy, [(m.client, m.count) for m in ordered.members]) == (
            "exclusive",
            [("c", LOGICAL_PARTITIONS)],
        )
        assert ordered.members[0].lps == [(0, LOGICAL_PARTITIONS, ordered.epoch)]
        [consumer] = (await client.admin.group("s", "ordered")).consumers
        assert (consumer.client, consumer.online) == ("c", True)
    with pytest.raises(plait.GroupNotFound, match="'missing'"):
        await client.admin.allocation("s", "missing")


async def park(client: plait.Client, *keys: str) -> None:
    """Create strict subject "s" with these keys parked in group "g", two messages each, and close the consumer."""
    await client.admin.create_subject("s", order="strict")
    for key in keys:
        await client.send_many("s", [f"{key} {n}".encode() for n in range(2)], keys=[key] * 2)
    async with client.consumer("s", group="g", ordered=True, retry=plait.Retry(attempts=1)) as consumer:
        failed: set[str | None] = set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while failed != set(keys):
                for message in await consumer.fetch(10, wait=PATIENCE_SECONDS):
                    if message.key not in failed:
                        failed.add(message.key)
                        message.nack(reason=ValueError(message.key))
                await consumer.flush()


async def bodies(client: plait.Client, count: int) -> list[str]:
    """The bodies of the next messages of the group."""
    got: list[str] = []
    async with client.consumer("s", group="g", ordered=True, retry=plait.Retry(attempts=1)) as consumer:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(got) < count:
                for message in await consumer.fetch(10, wait=PATIENCE_SECONDS):
                    got.append(message.body.decode())
                    message.ack()
                await consumer.flush()
    return sorted(got)


async def test_parked_keys_of_all_partitions_are_listed_resumed_and_skipped(client: plait.Client) -> None:
    keys = ["a", "b", "c", "17"]
    await park(client, *keys)
    found = await client.admin.parked("s", "g")
    assert sorted((key.key or "", key.reason.text, key.attempts) for key in found) == sorted((k, k, 1) for k in keys)
    assert {str(key.partition) for key in found} == {"s@g1", "s@g2"}
    assert [key.since for key in found] == sorted(key.since for key in found if key.since is not None)
    assert all(key.since and datetime.now(UTC) - key.since < timedelta(minutes=5) for key in found)
    for key in found:
        assert key.sequence is not None
        assert key.lp == key.hash % LOGICAL_PARTITIONS
        letter = await client.admin.dead_letter("s", "g", key.sequence, partition=key.partition)
        assert letter.key == key.key
    [one] = [key for key in found if key.key == "c"]
    assert one in await client.admin.parked("s", "g", partition=one.partition)
    assert (await client.admin.group("s", "g")).parked == 4
    await client.admin.resume_key("s", "g", "a")
    await client.admin.resume_key("s", "g", 17)
    await client.admin.skip_key("s", "g", one)
    assert [key.key for key in await client.admin.parked("s", "g")] == ["b"]
    assert await bodies(client, 5) == ["17 0", "17 1", "a 0", "a 1", "c 1"]
    assert await client.admin.skip_all("s", "g") == 1
    assert await client.admin.resume_all("s", "g") == 0
    assert await bodies(client, 1) == ["b 1"]
    assert sorted(letter.key or "" for letter in await client.admin.dead_letters("s", "g")) == ["b", "c"]


async def test_a_parked_key_stays_parked_after_a_route_change_and_resumes_in_order(client: plait.Client) -> None:
    await park(client, "a", "b", "c", "d")
    await client.admin.expand_subject("s", ["s@g1"])
    await reached(client, "s")
    for key in ("a", "b", "c", "d"):
        await client.send("s", f"{key} 2".encode(), key=key)
    assert len(await client.admin.parked("s", "g")) == 4
    assert await client.admin.resume_all("s", "g") == 4
    got: dict[str | None, list[bytes]] = {}
    async with client.consumer("s", group="g", ordered=True, retry=plait.Retry(attempts=1)) as consumer:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(map(len, got.values())) < 12:
                for message in await consumer.fetch(10, wait=PATIENCE_SECONDS):
                    got.setdefault(message.key, []).append(message.body)
                    message.ack()
                await consumer.flush()
    assert got == {key: [f"{key} {n}".encode() for n in range(3)] for key in ("a", "b", "c", "d")}


async def test_parked_keys_are_listed_and_resumed_in_pages(client: plait.Client) -> None:
    count = PARKED_PAGE_MAX + 20
    await client.admin.create_subject("s", order="strict", groups=["g1"])
    await client.send_many("s", [b""] * count, keys=[f"k{n}" for n in range(count)])
    async with client.consumer("s", group="g", ordered=True, retry=plait.Retry(attempts=1)) as consumer:
        failed = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while failed < count:
                batch = await consumer.fetch(count, wait=PATIENCE_SECONDS)
                await batch.nack()
                failed += len(batch)
        await consumer.flush()
        keys = await client.admin.parked("s", "g")
        assert sorted(key.key or "" for key in keys) == sorted(f"k{n}" for n in range(count))
        assert await client.admin.resume_all("s", "g") == count
        assert await client.admin.parked("s", "g") == []


@pytest.mark.parametrize("call", ["resume_key", "skip_key"])
async def test_resuming_a_key_that_is_not_parked_is_refused(client: plait.Client, call: str) -> None:
    await park(client, "a")
    with pytest.raises(plait.KeyNotParked, match="key 'z' is not parked in group 'g' on 's'"):
        await getattr(client.admin, call)("s", "g", "z")
    for wrong in ("", True, 1.5, b"a", None):
        with pytest.raises(plait.InvalidArgument, match="key"):
            await getattr(client.admin, call)("s", "g", wrong)
    with pytest.raises(plait.GroupNotFound):
        await getattr(client.admin, call)("s", "missing", "a")
    with pytest.raises(plait.SubjectNotFound):
        await getattr(client.admin, call)("nothing", "g", "a")


@pytest.mark.parametrize(
    ("call", "arguments", "settings", "reason"),
    [
        ("create_subject", ("s",), {"order": "loose"}, "order is 'loose'; use best_tried or strict"),
        ("create_subject", ("s",), {"partitions": 0}, "0 partitions are not possible; a subject has 1 to 1024"),
        ("create_subject", ("s",), {"partitions": "2"}, "partitions"),
        ("create_subject", ("s",), {"groups": "g1"}, "groups 'g1' is a string"),
        ("create_subject", ("s",), {"groups": ["g7"]}, "there is no broker group 'g7'"),
        ("create_subject", ("s",), {"retention_bytes": -1}, "retention_bytes is -1"),
        ("expand_subject", ("there", 0), {}, "0 partitions"),
        ("expand_subject", ("there", True), {}, "partitions"),
        ("expand_subject", ("there", 1.5), {}, "use a number, or a list"),
        ("expand_subject", ("there", "there@g1"), {}, "use a number, or a list"),
        ("expand_subject", ("there", [5]), {}, "partition 5 is a int"),
        ("expand_subject", ("there", []), {}, "0 partitions"),
        ("set_broker_state", ("g1", "rw"), {}, "state 'rw' is not known; use RW, R, W, NRW"),
        ("set_broker_state", ("g7", "R"), {}, "there is no broker group 'g7'"),
    ],
)
async def test_invalid_arguments_are_refused_with_the_reason(
    client: plait.Client, call: str, arguments: tuple[Any, ...], settings: dict[str, Any], reason: str
) -> None:
    await client.admin.create_subject("there")
    with pytest.raises(plait.InvalidArgument, match=reason):
        await getattr(client.admin, call)(*arguments, **settings)


def test_lps_that_returned_to_a_partition_still_drain_the_span_between() -> None:
    route = RouteDetails(
        "s",
        4,
        "strict",
        ["s@g1", "s@g2"],
        [(0, 24, [(0, 5), (1, 9), (0, None)]), (24, 1024, [(1, None)])],
        [(0, 12, 0), (12, 1024, 1)],
        {"g1": (["plait://a:1"], "RW"), "g2": (["plait://b:1"], "NRW")},
    )
    info = _route_info(route)
    assert (info.reached, info.moving) == (False, 12)
    assert info.partitions == [
        plait.PartitionShare("s@g1", 24, 12, 24, "RW"),
        plait.PartitionShare("s@g2", 1000, 1012, 24, "NRW"),
    ]
