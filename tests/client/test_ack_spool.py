"""``spool``: the next process sends the outcomes that were reported while the broker was unreachable."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.client.consume.ack_spool import AckSpool
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from plait.wire.link import Link
from tests.client.support import fetch_all, numbers, send, until

#: Reconnects at once; a close does not wait for an unreachable broker.
EAGER = plait.ClientLimits(reconnect_first_seconds=0.001, reconnect_max_seconds=0.01, request_seconds=0.2)
PATIENT = plait.ClientLimits(reconnect_first_seconds=0.001, reconnect_max_seconds=0.01)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def files(spool: Path) -> list[Path]:
    return list(spool.iterdir())


def overwrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def connect(broker: EmbeddedBroker, spool: Path, limits: plait.ClientLimits = EAGER) -> plait.Client:
    return plait.connect(broker.address, client_id="worker", limits=limits, spool=spool)


async def spool_outcomes(broker: EmbeddedBroker, spool: Path) -> None:
    """Stop the broker and report outcomes for ten messages: 0 to 3 are acked, 4 and 5 are nacked for a minute."""
    async with connect(broker, spool) as client:
        await send(client, 10)
        async with client.consumer("s", group="g") as consumer:
            held = await fetch_all(consumer, 10)
            await broker.kill()
            for message in held[:4]:
                message.ack()
            for message in held[4:6]:
                message.nack(delay=60)
            await until(lambda: [path for path in files(spool) if path.suffix == ".outcomes"])
    assert [path.suffix for path in files(spool)] == [".outcomes"]


async def test_the_next_process_sends_the_spooled_outcomes(broker: EmbeddedBroker, spool: Path) -> None:
    await spool_outcomes(broker, spool)
    await broker.start()
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        info = await client.admin.group("s", "g")
        assert (info.lag, info.waiting) == (6, 2)
        assert numbers(await fetch_all(consumer, 4)) == [6, 7, 8, 9]
        assert files(spool) == []


@pytest.mark.parametrize("unanswered", [m.AckRequest, m.NackRequest])
async def test_outcomes_that_a_close_did_not_wait_for_are_spooled(
    broker: EmbeddedBroker, spool: Path, monkeypatch: pytest.MonkeyPatch, unanswered: type[m.PacketHead]
) -> None:
    request = Link.request

    async def silence(self: Link, message: Any) -> Any:
        if isinstance(message, unanswered):
            await asyncio.Event().wait()
        return await request(self, message)

    async with connect(broker, spool) as client:
        await send(client, 3)
        async with client.consumer("s", group="g", prefetch=3) as consumer:
            done, failed, _ = await fetch_all(consumer, 3)
            monkeypatch.setattr(Link, "request", silence)
            done.ack()
            failed.nack(delay=60)
    monkeypatch.undo()
    assert [path.suffix for path in files(spool)] == [".outcomes"]
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        info = await client.admin.group("s", "g")
        assert (info.lag, files(spool)) == (2, [])
        assert 2 in numbers(await fetch_all(consumer, 1 if info.waiting else 2))


async def test_reasons_and_rejections_are_spooled(broker: EmbeddedBroker, spool: Path) -> None:
    async with connect(broker, spool) as client:
        await send(client, 3)
        async with client.consumer("s", group="g", retry=plait.Retry(attempts=1)) as consumer:
            rejected, failed, done = await fetch_all(consumer, 3)
            await broker.kill()
            rejected.reject(KeyError("order"))
            failed.nack(reason="the last attempt")
            done.ack()
            await until(lambda: [path for path in files(spool) if path.suffix == ".outcomes"])
    await broker.start()
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        letters = await client.admin.dead_letters("s", "g")
        assert [letter.reason for letter in letters] == [
            plait.Reason("KeyError", "'order'"),
            plait.Reason("", "the last attempt"),
        ]
        assert (await client.admin.group("s", "g")).lag == 0


async def test_a_spool_file_of_an_older_version_is_read(broker: EmbeddedBroker, spool: Path) -> None:
    await spool_outcomes(broker, spool)
    [path] = files(spool)
    *names, acks, nacks, place = msgspec.msgpack.decode(path.read_bytes())
    overwrite(path, msgspec.msgpack.encode([*names, acks, [nack[:2] for nack in nacks], place]))
    await broker.start()
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        info = await client.admin.group("s", "g")
        assert (info.lag, info.waiting, info.dead) == (6, 2, 0)


async def test_the_same_process_sends_its_spooled_outcomes_when_the_broker_is_back(
    broker: EmbeddedBroker, spool: Path
) -> None:
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await send(client, 3)
        held = await fetch_all(consumer, 3)
        await broker.kill()
        for message in held:
            message.ack()
        await until(lambda: [path for path in files(spool) if path.suffix == ".outcomes"])
        await broker.start()
        await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == 0
        await until(lambda: not files(spool))


async def test_each_client_id_has_its_own_spool_file(broker: EmbeddedBroker, spool: Path) -> None:
    await spool_outcomes(broker, spool)
    await broker.start()
    async with (
        plait.connect(broker.address, client_id="other", spool=spool) as client,
        client.consumer("s", group="g") as consumer,
    ):
        await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == 10
        assert len(files(spool)) == 1


async def test_spooled_outcomes_of_a_recreated_subject_are_dropped(broker: EmbeddedBroker, spool: Path) -> None:
    await spool_outcomes(broker, spool)
    await broker.start()
    async with connect(broker, spool, PATIENT) as client:
        await client.admin.delete_subject("s")
        await send(client, 10)
        async with client.consumer("s", group="g") as consumer:
            assert numbers(await fetch_all(consumer, 10)) == list(range(10))
            # A thread removes the file while messages are delivered.
            await until(lambda: not files(spool))


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x96\xa1s", b"\x90"])
async def test_an_unreadable_spool_file_is_logged_and_skipped(
    broker: EmbeddedBroker, spool: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    await spool_outcomes(broker, spool)
    [path] = files(spool)
    overwrite(path, content)
    await broker.start()
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == 10
    assert "cannot be read, its messages are delivered again" in caplog.text


async def test_a_failed_spool_write_is_logged_and_loses_no_ack(
    broker: EmbeddedBroker, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await send(client, 1)
        [message] = await fetch_all(consumer, 1)
        shutil.rmtree(spool)
        await broker.kill()
        message.ack()
        await until(lambda: "unsent acks cannot be written to spool file" in caplog.text)
        await broker.start()
        await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == 0


def test_a_spool_needs_a_client_id_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(plait.InvalidArgument, match="spool= needs client_id="):
        plait.connect(spool=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(plait.InvalidArgument, match="cannot be created: Not a directory"):
        plait.connect(client_id="worker", spool=tmp_path / "file" / "spool")
    with pytest.raises(plait.InvalidArgument, match="spool= needs client_id="):
        plait.App(group="g", spool=tmp_path)


async def test_other_users_cannot_read_a_spool(broker: EmbeddedBroker, spool: Path) -> None:
    await spool_outcomes(broker, spool)
    assert [path.stat().st_mode & 0o777 for path in [spool, *files(spool)]] == [0o700, 0o600]


async def test_the_users_loop_does_not_wait_for_the_disk(
    broker: EmbeddedBroker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread = threading.get_ident()
    syncs: list[int] = []
    fsync = os.fsync

    def counted(file: int) -> None:
        syncs.append(threading.get_ident())
        fsync(file)

    async with connect(broker, spool) as client:
        await send(client, 300)
        async with client.consumer("s", group="g") as consumer:
            held = await fetch_all(consumer, 300)
            await broker.kill()
            monkeypatch.setattr(os, "fsync", counted)
            for message in held:
                message.ack()
                # One turn of the loop per ack, so that acks are not combined.
                await asyncio.sleep(0)
            await until(lambda: syncs)
    assert loop_thread not in syncs
    # Acks that arrive while the disk is busy are written together.
    assert len(syncs) < 150
    monkeypatch.undo()
    await broker.start()
    async with connect(broker, spool, PATIENT) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        info = await client.admin.group("s", "g")
        assert (info.lag, info.unacked) == (0, 0)


def test_a_late_write_does_not_overwrite_a_newer_one(spool: Path) -> None:
    spool.mkdir()
    first = AckSpool(spool, "s", "g", "c", "s@g1")
    old, new = first.change(1, [(0, 1, 1)], {}), first.change(1, [(0, 2, 1)], {})
    assert old is not None
    assert new is not None
    assert first.change(1, [(0, 2, 1)], {}) is None
    new()
    old()
    outcomes = AckSpool(spool, "s", "g", "c", "s@g1").load()
    assert outcomes is not None
    assert outcomes.acks == [(0, 2, 1)]
    clear = first.change(1, [], {})
    assert clear is not None
    clear()
    assert AckSpool(spool, "s", "g", "c", "s@g1").load() is None
