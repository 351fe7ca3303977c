"""The number of a partition is valid only in the data epoch that assigned it; stale routes are refreshed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import plait
from plait.client.net.router import Router
from plait.errors import InternalError
from plait.server import Server
from plait.storage.disk import RealDisk
from tests.client.cluster import EAGER, cluster_of
from tests.client.support import until

#: Each failed refresh doubles the pause: more refreshes than a float can double.
REFRESHES = 1_100


async def test_a_number_that_was_assigned_to_another_subject_is_not_used(tmp_path: Path) -> None:
    first = Server(RealDisk(tmp_path / "first"), port=0)
    await first.start()
    async with plait.connect(first.address) as client:
        await client.send("mine", b"before")
        await first.stop()
        # A broker that lost the creation of "mine": the number belongs to another subject.
        second = Server(RealDisk(tmp_path / "second"), port=first.port)
        await second.start()
        second.broker.turn.epoch += 1
        second.broker.partition_of("another")
        receipt = await client.send("mine", b"after")
        assert receipt.partition.name == "mine"
        assert second.broker.subjects["another"].next == 0
        assert second.broker.subjects["mine"].next == 1
    await second.stop()


async def test_a_send_succeeds_after_any_number_of_failed_refreshes(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(EAGER, send_retry_first_seconds=1e-6, send_retry_max_seconds=1e-6)
    async with cluster_of(tmp_path, 1) as cluster, cluster.connect(limits=limits) as client:
        await cluster.open("g1")
        await client.send("s", b"before")
        # The meta server's route leads to a sealed partition.
        cluster.version = 2
        await cluster.seal("g1", version=2)
        refreshes = 0
        route = cluster.route

        def counted(subject: str) -> object:
            nonlocal refreshes
            refreshes += 1
            return route(subject)

        cluster.route = counted  # type: ignore[method-assign,assignment]
        waiting = client.post("s", b"waiting")
        await until(lambda: refreshes > REFRESHES)
        await cluster.open("g1", version=3)
        cluster.version = 3
        assert (await waiting).sequence == 1


async def test_a_send_that_waits_for_a_failed_refresh_gets_the_error(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise OverflowError("int too large")

    with monkeypatch.context() as patch:
        patch.setattr(Router, "refresh", broken)
        with pytest.raises(InternalError, match="OverflowError"):
            await client.send("s", b"1")
    assert "background task plait-route-s failed" in caplog.text
    assert (await client.send("s", b"2")).sequence == 0
