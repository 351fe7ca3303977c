"""No implicit effects: a reader creates no subject, and a consumer without a group must ask for a broadcast."""

from __future__ import annotations

import pytest

import plait
import plait.sync
from plait.testing import EmbeddedBroker


async def test_a_reader_creates_no_subject(client: plait.Client):
    with pytest.raises(plait.SubjectNotFound, match="'typo' does not exist") as caught:
        async with client.reader("typo"):
            pass
    assert caught.value.details == {"subject": "typo"}
    assert await client.admin.subjects() == []


async def test_a_reader_creates_no_subject_where_there_is_no_meta_server():
    async with EmbeddedBroker(metas=()) as broker, broker.connect() as client:
        with pytest.raises(plait.SubjectNotFound):
            async with client.reader("typo", start="earliest"):
                pass
        assert await client.admin.subjects() == []


async def test_a_reader_does_not_recreate_its_deleted_subject(client: plait.Client):
    await client.send("s", b"x")
    async with client.reader("s", start="earliest") as reader:
        assert len(await reader.fetch(1)) == 1
        await client.admin.delete_subject("s")
        with pytest.raises(plait.PlaitError):
            await reader.fetch(1, wait=0)
    assert await client.admin.subjects() == []


async def test_a_consumer_without_a_group_must_ask_for_a_broadcast(client: plait.Client):
    with pytest.raises(plait.InvalidArgument, match=r"'s' needs a group.*broadcast=True"):
        client.consumer("s")
    async with (
        client.consumer("s", broadcast=True) as one,
        client.consumer("s", group=None) as two,
        client.consumer("s", None) as three,
    ):
        await client.send("s", b"x")
        for consumer in (one, two, three):
            assert [message.body for message in await consumer.fetch(1, wait=20)] == [b"x"]


def test_errors_of_the_blocking_client_name_how_to_open_it():
    with EmbeddedBroker() as broker:
        client = plait.sync.connect(broker.address)
        for use in (
            lambda: client.send("s", b""),
            lambda: client.post("s", b""),
            lambda: client.consumer("s", "g"),
            lambda: client.reader("s"),
            client.admin.subjects,
            client.flush,
        ):
            with pytest.raises(plait.Closed, match=r"use 'with plait\.sync\.connect\(\.\.\.\)', or open\(\)"):
                use()
        with client:
            with pytest.raises(plait.InvalidArgument, match="needs a group"):
                client.consumer("s")
            client.send("s", b"x")
            with pytest.raises(plait.Closed, match=r"use 'with client\.consumer\(\.\.\.\)'"):
                client.consumer("s", "g").fetch()
            with pytest.raises(plait.Closed, match=r"use 'with client\.reader\(\.\.\.\)'"):
                client.reader("s").fetch()


async def test_errors_of_an_unopened_client_name_how_to_open_it(broker: EmbeddedBroker):
    client = plait.connect(broker.address)
    with pytest.raises(plait.Closed, match=r"use 'async with plait\.connect\(\.\.\.\)', or open\(\)"):
        await client.send("s", b"")
    await client.open()
    await client.send("s", b"")
    await client.close()
