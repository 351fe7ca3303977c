"""Ordered consumers as members: heartbeats to the meta server, allocations from it, and operation without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from tests.client.cluster import EAGER, Cluster, cluster_of
from tests.client.support import PATIENCE_SECONDS, fetch_all, until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path, 1) as running:
        yield running


async def test_one_heartbeat_names_all_members_of_a_client(cluster: Cluster) -> None:
    async with (
        cluster.connect(client_id="a") as client,
        client.consumer("s", group="one", ordered=True),
        client.consumer("s", group="two", affinity="key"),
    ):
        assert sorted(cluster.meta.heartbeats[-1].members) == [("s", "one", True), ("s", "two", True)]
        assert cluster.meta.heartbeats[-1].affinity == [("s", "two")]
    assert cluster.meta.heartbeats[-1].leaving
    assert cluster.meta.heartbeats[-1].client == "a"


async def test_the_meta_server_learns_of_a_leaving_member_while_another_one_ends(cluster: Cluster) -> None:
    async with cluster.connect(client_id="a") as client, client.consumer("s", group="one", ordered=True) as consumer:
        never: Any = client.consumer("s", group="two", ordered=True)._fetcher
        member: Any = consumer._fetcher
        await asyncio.gather(member._heartbeats.leave(member), member._heartbeats.leave(never))
        assert cluster.meta.heartbeats[-1].leaving


async def test_members_keep_their_shares_without_a_meta_server(cluster: Cluster) -> None:
    async with cluster.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        cluster.meta.error = plait.Unavailable("no meta server")
        cluster.meta.change()
        sent = len(cluster.meta.heartbeats)
        await until(lambda: len(cluster.meta.heartbeats) > sent + 2)
        await cluster.send_keyed("g1", [("k", 1)])
        batch = await consumer.fetch(1, wait=PATIENCE_SECONDS)
        assert len(batch) == 1
        await batch.ack()
        cluster.meta.error = None
        cluster.meta.epoch = 50
        cluster.meta.change()
        await until(lambda: consumer._fetcher._epochs.max() == 51)  # type: ignore[attr-defined]


async def test_a_member_that_was_overdue_receives_its_share_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        overdue = iter([True])
        member = consumer._fetcher  # type: ignore[attr-defined]
        monkeypatch.setattr(member, "overdue", lambda: next(overdue, False))
        cluster.meta.epoch = 50
        cluster.meta.change()
        await until(lambda: consumer._fetcher._epochs.max() == 51)  # type: ignore[attr-defined]


async def test_no_consumer_opens_without_a_reply_from_a_meta_server(cluster: Cluster) -> None:
    cluster.meta.error = plait.Unavailable("no meta server")
    limits = msgspec.structs.replace(EAGER, request_seconds=0.2)
    async with cluster.connect(client_id="a", limits=limits) as client:
        with pytest.raises(plait.Unavailable, match=r"no meta server answered within 0\.2 s"):
            await client.consumer("s", group="g", ordered=True).__aenter__()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "plait-member-heartbeats"]


async def test_a_refused_member_does_not_affect_the_others(broker: EmbeddedBroker) -> None:
    async with broker.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        async with client.consumer("s", group="shared"):
            pass
        with pytest.raises(plait.GroupMismatch, match="ordered"):
            await client.consumer("s", group="shared", ordered=True).__aenter__()
        await client.send("s", b"1", key="k")
        assert len(await consumer.fetch(1, wait=PATIENCE_SECONDS)) == 1


async def test_a_deleted_subject_does_not_affect_the_clients_other_members(tmp_path: Path) -> None:
    config = msgspec.structs.replace(TEST_CONFIG, auto_create=False)
    async with (
        EmbeddedBroker(tmp_path / "data", config=config) as broker,
        broker.connect(client_id="a") as client,
        broker.connect(client_id="b") as other,
    ):
        for subject in ("kept", "deleted"):
            await client.admin.create_subject(subject)
        async with (
            client.consumer("kept", group="g", ordered=True) as kept,
            client.consumer("deleted", group="g", ordered=True) as deleted,
        ):
            async with other.consumer("kept", group="g", ordered=True):
                await client.admin.delete_subject("deleted")
                with pytest.raises(plait.SubjectNotFound):
                    await deleted.fetch(1, wait=PATIENCE_SECONDS)
            # The remaining member must receive the share of the one that left.
            await client.send_many("kept", [b""] * 100, keys=[f"key-{n}" for n in range(100)])
            assert len(await fetch_all(kept, 100)) == 100


async def test_a_temporarily_refused_member_does_not_block_others_from_joining(cluster: Cluster) -> None:
    async with cluster.connect(client_id="a") as client:
        cluster.meta.refused = [("s", "full", "flow_control", "later")]
        waiting = asyncio.ensure_future(client.consumer("s", group="full", ordered=True).__aenter__())
        await until(lambda: len(cluster.meta.heartbeats) > 1)
        async with client.consumer("s", group="g", ordered=True):
            assert not waiting.done()
            cluster.meta.refused = []
            cluster.meta.change()
            await (await waiting).close()


async def test_a_member_that_stays_refused_gets_the_reason(cluster: Cluster) -> None:
    cluster.meta.refused = [("s", "full", "flow_control", "too busy")]
    limits = msgspec.structs.replace(EAGER, request_seconds=0.2)
    async with cluster.connect(client_id="a", limits=limits) as client:
        with pytest.raises(plait.Unavailable, match=r"group 'full' of 's' could not be joined within 0\.2 s: too busy"):
            await client.consumer("s", group="full", ordered=True).__aenter__()


async def test_a_leaving_member_does_not_flood_a_meta_server_that_refuses_heartbeats(
    cluster: Cluster,
) -> None:
    async with cluster.connect(client_id="a") as client:
        consumer = await client.consumer("s", group="g", ordered=True).__aenter__()
        cluster.meta.error = plait.InvalidArgument("not from you")
        sent = len(cluster.meta.heartbeats)
        await consumer.close()
        assert len(cluster.meta.heartbeats) - sent < 5


async def test_a_heartbeat_reply_with_a_newer_route_version_triggers_a_refresh(cluster: Cluster) -> None:
    async with cluster.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        cluster.version = 2
        cluster.partitions = [("s", "g1"), ("s.1", "g1")]
        cluster.meta.routes = {"s": 2}
        cluster.meta.change()
        await until(lambda: len(consumer._fetcher.clients) == 2)
