"""Start positions of consumers and readers; readers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, numbers, send, until


async def test_readers_start_at_the_latest(client: plait.Client) -> None:
    await send(client, 3)
    async with client.reader("s") as reader:
        await send(client, 2, first=3)
        assert numbers(await reader.fetch()) == [3, 4]


async def test_a_start_applies_only_to_a_new_group(client: plait.Client) -> None:
    await send(client, 5)
    async with client.consumer("s", group="g", start=3) as consumer:
        await (await consumer.fetch(5)).ack()
    async with client.consumer("s", group="g", start="earliest") as consumer:
        await send(client, 1, first=5)
        assert numbers(await fetch_all(consumer, 1)) == [5]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", [0, 1, 2, 3]),
        ("latest", []),
        (0, [0, 1, 2, 3]),
        (2, [2, 3]),
        ("2", [2, 3]),
        (99, []),
        ("-30m", [2, 3]),
        ("-90m", [1, 2, 3]),
        ("-2d", [0, 1, 2, 3]),
        ("-0s", []),
        (timedelta(minutes=90), [1, 2, 3]),
        (timedelta(minutes=-90), [1, 2, 3]),
        ("two hours ago", [1, 2, 3]),
    ],
)
async def test_consumers_and_readers_start_at_the_given_position(
    timed_broker: EmbeddedBroker, start: Any, expected: list[int]
) -> None:
    """Four messages: 25 hours, one hour and twice 1 ms old. Broker and client share a clock."""
    clock = timed_broker.clock
    async with timed_broker.connect() as client:
        await send(client, 1)
        await timed_broker.advance("1d")
        await send(client, 1, first=1)
        await timed_broker.advance("1h")
        await send(client, 2, first=2)
        await timed_broker.advance(0.001)
        if start == "two hours ago":
            start = datetime.fromtimestamp(clock.now() / 1_000_000, UTC) - timedelta(hours=2)
        async with client.consumer("s", group="g", start=start) as consumer, client.reader("s", start=start) as reader:
            await client.send("s", b"9")
            assert numbers(await fetch_all(consumer, len(expected) + 1)) == [*expected, 9]
            assert numbers(await reader.fetch()) == [*expected, 9]


@pytest.mark.parametrize("start", [-1, "yesterday", "-5 minutes", 1.5, datetime(2024, 1, 1), b"", "-"])  # noqa: DTZ001
async def test_an_invalid_start_is_refused(client: plait.Client, start: Any) -> None:
    with pytest.raises(plait.InvalidArgument, match=r"start|duration"):
        client.consumer("s", group="g", start=start)
    with pytest.raises(plait.InvalidArgument, match=r"start|duration"):
        client.reader("s", start=start)


async def test_a_start_may_be_a_time_as_text(client: plait.Client) -> None:
    await send(client, 2)
    async with client.reader("s", start="2024-01-01T00:00:00") as reader:
        assert numbers(await reader.fetch()) == [0, 1]
    async with client.reader("s", start="2099-01-01T00:00:00+02:00") as reader:
        assert await reader.fetch(wait=0) == []


async def test_a_reader_stores_no_progress_and_takes_no_message_from_groups(client: plait.Client) -> None:
    await send(client, 10)
    for _ in range(2):
        async with client.reader("s", start="earliest") as reader:
            assert numbers(await reader.fetch(4)) == [0, 1, 2, 3]
            assert numbers(await reader.fetch(100)) == [4, 5, 6, 7, 8, 9]
            assert await reader.fetch(wait=0.01) == []
    assert await client.admin.groups("s") == []


async def test_iterating_a_reader_follows_the_subject_and_a_break_loses_no_message(client: plait.Client) -> None:
    await send(client, 10)
    seen: list[int] = []
    async with client.reader("s", start="earliest") as reader:
        for stop in (3, 9):
            async for message in reader:
                seen.append(int(message.body))
                if seen[-1] == stop:
                    break
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        await send(client, 1, first=10)
        seen.append(int((await asyncio.wait_for(waiting, 5)).body))
    assert seen == list(range(11))


async def test_an_ack_of_a_readers_message_has_no_effect(client: plait.Client) -> None:
    await send(client, 1)
    async with client.reader("s", start="earliest") as reader:
        [message] = await reader.fetch()
        message.ack()
        await message.nack()


async def test_a_restart_is_invisible_to_a_reader(broker: EmbeddedBroker, client: plait.Client) -> None:
    await send(client, 5)
    async with client.reader("s", start="earliest") as reader:
        assert len(await reader.fetch(3)) == 3
        await broker.restart()
        assert numbers(await reader.fetch(10)) == [3, 4]
        waiting = asyncio.ensure_future(reader.fetch(wait=20))
        await until(lambda: client._node.link is not None)
        await broker.kill()
        await broker.start()
        await send(client, 1, first=5)
        assert numbers(await asyncio.wait_for(waiting, 10)) == [5]


async def test_a_reader_that_is_not_open_refuses_calls(client: plait.Client) -> None:
    await client.admin.create_subject("s")
    reader = client.reader("s")
    with pytest.raises(plait.Closed, match="not open"):
        await reader.fetch()
    async with reader:
        pass
    with pytest.raises(plait.Closed, match="is closed"):
        await reader.fetch()
    with pytest.raises(StopAsyncIteration):
        await anext(reader)
