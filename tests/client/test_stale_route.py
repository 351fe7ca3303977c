"""A partition's number is believed only in the epoch that gave it."""

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

#: Pauses double with each look that did not help: more often than a float can double.
LOOKS = 1_100


async def test_a_number_that_went_to_another_subject_is_not_used_again(tmp_path: Path) -> None:
    first = Server(RealDisk(tmp_path / "first"), port=0)
    await first.start()
    async with plait.connect(first.address) as client:
        await client.send("mine", b"before")
        await first.stop()
        # A broker that lost the moments in which "mine" was made: its number is another subject's.
        second = Server(RealDisk(tmp_path / "second"), port=first.port)
        await second.start()
        second.broker.epoch += 1
        second.broker.partition_of("another")
        receipt = await client.send("mine", b"after")
        assert receipt.partition.name == "mine"
        assert second.broker.subjects["another"].next == 0
        assert second.broker.subjects["mine"].next == 1
    await second.stop()


async def test_a_client_sends_again_after_any_number_of_looks_that_did_not_help(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(EAGER, send_retry_first_seconds=1e-6, send_retry_max_seconds=1e-6)
    async with cluster_of(tmp_path, 1) as cluster, cluster.connect(limits=limits) as client:
        await cluster.open("g1")
        await client.send("s", b"before")
        # The route that the meta server has leads to a partition that takes nothing.
        cluster.version = 2
        await cluster.seal("g1", version=2)
        looks = 0
        told = cluster.route

        def counted(subject: str) -> object:
            nonlocal looks
            looks += 1
            return told(subject)

        cluster.route = counted  # type: ignore[method-assign,assignment]
        waiting = client.post("s", b"waiting")
        await until(lambda: looks > LOOKS)
        await cluster.open("g1", version=3)
        cluster.version = 3
        assert (await waiting).sequence == 1


async def test_what_waits_for_a_look_that_fails_gets_the_error(
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
