"""Settings of existing subjects and groups can be changed, and a group can be deleted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from tests.client.support import fetch_all, send

# --- subjects ------------------------------------------------------------------------------------


async def test_the_retention_of_a_subject_can_be_changed_and_survives_a_restart(
    broker: EmbeddedBroker, client: plait.Client
):
    await client.admin.create_subject("s", retention="7d", retention_bytes=1000, order="strict")
    changed = await client.admin.set_subject("s", retention="1h")
    assert (changed.retention_seconds, changed.retention_bytes) == (3600, 1000), "an omitted setting stays the same"
    changed = await client.admin.set_subject("s", retention="default", retention_bytes=5)
    assert (changed.retention_seconds, changed.retention_bytes) == (TEST_CONFIG.retention_seconds, 5)
    await broker.restart()
    [info] = [each for each in await client.admin.subjects() if each.subject == "s"]
    assert (info.retention_seconds, info.retention_bytes) == (TEST_CONFIG.retention_seconds, 5)
    assert (await client.admin.route("s")).order == "strict"


async def test_an_invalid_setting_is_refused(client: plait.Client):
    await send(client, 1)
    for bad in ({"retention": 0}, {"retention": -1}, {"retention_bytes": 0}, {"retention_bytes": "x"}):
        with pytest.raises(plait.InvalidArgument):
            await client.admin.set_subject("s", **bad)
    with pytest.raises(plait.InvalidArgument, match="no setting of 's' to change"):
        await client.admin.set_subject("s")
    with pytest.raises(plait.SubjectNotFound, match="'typo'"):
        await client.admin.set_subject("typo", retention=5)


# --- a full disk ---------------------------------------------------------------------------------


async def test_a_new_subject_is_refused_with_the_cause_if_every_disk_is_full(tmp_path: Path):
    config = msgspec.structs.replace(TEST_CONFIG, disk_free_min=1 << 60)
    async with EmbeddedBroker(tmp_path, config=config) as broker, broker.connect() as client:
        with pytest.raises(plait.DiskFull, match=r"subject 'new': g1: \d+ MiB of disk are free \(minimum"):
            await client.send("new", b"x")
        with pytest.raises(plait.DiskFull, match="plait subject set"):
            await client.admin.create_subject("new")
        [info] = await client.admin.brokers()
        assert info.state == "R"
        assert "MiB of disk are free" in info.reason


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_deleted_group_starts_again(client: plait.Client, ordered: bool):
    await send(client, 10)
    async with client.consumer("s", group="g", ordered=ordered) as consumer:
        assert len(await fetch_all(consumer, 10)) == 10
        with pytest.raises(plait.GroupBusy, match="stop it first"):
            await client.admin.delete_group("s", "g")
        with pytest.raises(plait.GroupBusy, match="stop it first"):
            await client.admin.set_group("s", "g", retry=plait.Retry(attempts=3))
    await client.admin.delete_group("s", "g")
    assert await client.admin.groups("s") == []
    with pytest.raises(plait.GroupNotFound):
        await client.admin.delete_group("s", "g")
    # The new group may have another mode, and gets all messages.
    async with client.consumer("s", group="g", ordered=not ordered) as consumer:
        assert len(await fetch_all(consumer, 10)) == 10


async def test_a_group_uses_its_changed_retry_policy(client: plait.Client):
    await send(client, 1)
    async with client.consumer("s", group="g"):
        pass
    info = await client.admin.set_group("s", "g", retry=plait.Retry(attempts=1))
    assert info.retry.attempts == 1
    async with client.consumer("s", group="g") as consumer:
        [message] = await fetch_all(consumer, 1)
        await message.nack()
    assert (await client.admin.group("s", "g")).dead == 1
    await client.admin.delete_group("s", "g")
    assert await client.admin.dead_queues("s") == []
    with pytest.raises(plait.InvalidArgument, match=r"use plait\.Retry"):
        await client.admin.set_group("s", "g", retry=3)  # type: ignore[arg-type]
