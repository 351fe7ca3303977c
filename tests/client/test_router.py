"""How clients find routes and brokers, and notice that either has changed."""

from __future__ import annotations

import msgspec
import pytest

import plait
from plait.client.net.node import Node
from plait.client.net.router import Router, SubjectRoute
from plait.client.send.partition_sender import PartitionSender
from plait.meta.database.store import Store
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.support import EAGER, PATIENCE_SECONDS, PlayedMeta, fetch_all, impatient, numbers, until

LIMITS = msgspec.structs.replace(EAGER, unreached_seconds=0.01)
#: A key of the partition on the second broker.
RIGHT = "k1"


async def test_a_client_of_a_single_server_has_one_connection(broker: EmbeddedBroker, client: plait.Client) -> None:
    await client.send("s", b"x")
    async with client.reader("s", start="earliest") as reader:
        assert len(await reader.fetch(1)) == 1
    await client.admin.subjects()
    assert len(broker.server.connections) == 1
    assert set(client._router._nodes.values()) == {client._node}


async def test_a_broker_that_restarts_at_another_address_is_found(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    async with meta.client(limits=LIMITS) as client:
        await client.send("s", b"0", key=RIGHT)
        # On a busy machine the reconnect may take longer than a send waits.
        await until(lambda: client._router._nodes["g2"].link is not None)
        before = brokers[1].address
        await brokers[1].stop()
        brokers[1]._port = 0
        await brokers[1].start()
        assert brokers[1].address != before
        meta.order = "strict"
        node = client._router._nodes["g2"]
        await until(lambda: node.link is not None)
        assert str((await client.send("s", b"1", key=RIGHT)).partition) == "s#1@g2"


async def test_an_older_route_of_a_lagging_meta_server_is_ignored(meta: PlayedMeta) -> None:
    async with meta.client() as client:
        old = meta.route()
        await meta.change(3)
        route = await client._router.refresh("s")
        meta.frozen = old
        assert await client._router.refresh("s") is route


async def test_concurrent_route_requests_share_one_reply(meta: PlayedMeta) -> None:
    async with meta.client() as client:
        for n in range(20):
            client.post("s", b"x", key=f"k{n}")
            client.post("s", b"x", key=f"k{n}", delay=3600)
        await client.flush()
        assert meta.asked == 1


async def test_meta_server_addresses_are_learned_unless_the_node_is_also_a_broker(meta: PlayedMeta) -> None:
    node = Node(["plait://127.0.0.1:1"], "c", plait.ClientLimits())
    router = Router(node, "c", plait.ClientLimits())
    metas = ["plait://127.0.0.1:1", "plait://127.0.0.1:2"]
    router.learn(metas[:1])
    assert node.alone
    router._nodes["g1"] = node
    router.learn(metas)
    assert node.alone
    del router._nodes["g1"]
    router.learn(metas)
    router.learn(metas)
    assert node._addresses == metas
    # New addresses replace the old ones, so the list does not grow.
    router.learn(["plait://127.0.0.1:3", "plait://127.0.0.1:4"])
    assert node._addresses == ["plait://127.0.0.1:1", "plait://127.0.0.1:3", "plait://127.0.0.1:4"]


async def test_a_route_reply_has_the_addresses_of_the_meta_servers(meta: PlayedMeta) -> None:
    meta.frozen = msgspec.structs.replace(meta.route(), metas=["plait://a:1", "plait://b:2"])
    async with meta.client() as client:
        client._node.learn(["plait://127.0.0.1:2"])
        await client.send("s", b"x")
        assert {"plait://a:1", "plait://b:2"} <= set(client._node._addresses)


async def test_the_route_of_a_deleted_subject_is_no_longer_refreshed(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(route_seconds=0.001)
    async with broker.connect(limits=limits) as client:
        await client.send("s", b"x")
        await client.admin.delete_subject("s")
        await until(lambda: client._router.known("s") is None)
        assert (await client.send("s", b"y")).sequence == 0
        assert client._router.known("s") is not None


async def test_rows_without_keys_do_not_wait_for_a_broker_that_is_not_connected(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    meta.order = "strict"
    async with meta.client(limits=LIMITS) as client:
        await client.send_many("s", [b"x"] * 2, keys=["k0", RIGHT])
        await brokers[1].stop()
        await until(lambda: client._router._nodes["g2"].link is None)
        receipts = [await client.send("s", b"%d" % n) for n in range(20)]
        assert {str(r.partition) for r in receipts} == {"s@g1"}
        await brokers[1].start()


async def test_a_send_without_a_route_times_out_with_the_reason(meta: PlayedMeta) -> None:
    async def find(subject: str, create: bool) -> m.RouteReply:
        raise plait.NoBroker("no broker group is available")

    async with meta.client(limits=msgspec.structs.replace(LIMITS, send_seconds=0.05)) as client:
        client._router.find = find  # type: ignore[method-assign]
        with pytest.raises(plait.Timeout, match="no broker group is available"):
            await client.send("s", b"x")
        client._router.find = meta.find  # type: ignore[method-assign]
        client._producer.limits = LIMITS
        await client.send("s", b"y")


def test_partitions_without_a_span_are_left_out_of_a_route() -> None:
    found = m.RouteReply(
        "s",
        3,
        "strict",
        [("s#2", "g3"), ("s", "g1"), ("s#1", "g2")],
        [(0, 100, [(1, 7), (2, None)]), (100, 1024, [(1, None)])],
        {"g1": (["plait://a:1"], "RW"), "g2": (["plait://b:1"], "RW"), "g3": (["plait://c:1"], "RW")},
    )
    route = SubjectRoute(found)
    assert [str(partition) for partition in route.partitions] == ["s@g1", "s#1@g2"]
    assert route.histories == [(0, 100, [(0, 7), (1, None)]), (100, 1024, [(0, None)])]
    assert (route.table[0], route.table[100]) == (1, 0)


async def test_a_new_process_sends_and_consumes_while_the_meta_database_is_down(
    broker: EmbeddedBroker, client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.send("s", b"0")

    def down(*_: object) -> None:
        raise plait.MetaUnavailable("the meta database is down")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "news", down)
        async with broker.connect() as newcomer:
            assert (await newcomer.send("s", b"1")).sequence == 1
            async with newcomer.consumer("s", group="g") as consumer:
                assert numbers(await fetch_all(consumer, 2)) == [0, 1]
            with impatient(newcomer), pytest.raises(plait.Timeout, match="the meta database is down"):
                await newcomer.send("new", b"")
    await client.send("new", b"")


async def test_the_senders_of_idle_subjects_are_dropped(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(route_seconds=0.001, sender_idle_seconds=0.02)
    async with broker.connect(limits=limits) as client:
        senders, router = client._senders, client._router
        await client.admin.create_subject("read")
        async with client.reader("read", start="earliest") as reader, client.consumer("eaten", "g"):
            first = [await client.send(f"s{number}", b"0", key="k") for number in range(20)]
            await client.send("s0", b"later", delay=3600)
            await until(lambda: set(router._routes) == {"read", "eaten"})
            assert (senders.plain, senders.delayed) == ({}, {})
            assert not any(isinstance(call.__self__, PartitionSender) for call in client._node.on_link)
            # The next send continues with the same producer and the next sequence.
            second = await client.send("s0", b"1", key="k")
            assert (second.sequence, second.message_id.producer) == (1, first[0].message_id.producer)
            await client.send("read", b"2")
            assert [message.body for message in await reader.fetch(1, wait=PATIENCE_SECONDS)] == [b"2"]
        await until(lambda: not router._routes)
        assert router.users == [senders._uses]
        async with client.reader("s0", start="earliest") as reader:
            assert [m.body for m in await reader.fetch(5, wait=PATIENCE_SECONDS)] == [b"0", b"1"]


async def test_the_senders_of_deleted_subjects_are_dropped(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(route_seconds=0.001)) as client:
        senders = client._senders
        for number in range(5):
            await client.send(f"s{number}", b"")
            await client.send(f"s{number}", b"", delay=3600)
            await client.admin.delete_subject(f"s{number}")
        await until(lambda: not senders.plain and not senders.delayed)
        assert not any(isinstance(call.__self__, PartitionSender) for call in client._node.on_link)
        assert (await client.send("s0", b"")).sequence == 0
