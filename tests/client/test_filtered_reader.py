"""A reader with a filter: it gets the messages that match, in order, from stored and from new messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import plait
import plait.sync
from plait.broker.partitions import filtered_read
from plait.filter import scan_budget
from plait.testing import EmbeddedBroker


async def numbers(client: plait.Client, **filters: Any) -> list[int]:
    """Of all messages that are stored and match; one fetch may examine a part of them."""
    async with client.reader("orders", start="latest") as reader:
        end = reader.position
    found: list[int] = []
    async with client.reader("orders", start="earliest", **filters) as reader:
        while reader.position != end:
            found += [int(message.body) for message in await reader.fetch(10_000, wait=0)]
    return found


async def send_orders(client: plait.Client, count: int) -> None:
    """Half of the messages in frames with header blocks, half alone."""
    bodies = [b"%d" % number for number in range(count)]
    headers = [{"city": ("BJS", "SHA")[number % 2], "amount": number} for number in range(count)]
    tags = [["new"] if number % 3 == 0 else ["old", "slow"] for number in range(count)]
    half = count // 2
    await client.send_many("orders", bodies[:half], headers=headers[:half], tags=tags[:half])
    for number in range(half, count):
        await client.send("orders", bodies[number], headers=headers[number], tags=tags[number], key=f"k{number}")


async def test_only_messages_that_match_are_read(client: plait.Client) -> None:
    await send_orders(client, 160)
    assert await numbers(client, where="city = 'BJS' AND amount >= 70") == list(range(70, 160, 2))
    assert await numbers(client, tags=["new"]) == list(range(0, 160, 3))
    assert await numbers(client, tags="slow", where="amount < 5") == [1, 2, 4]
    assert await numbers(client, tags=plait.TagFilter(none=["old"]), where="key IS NOT NULL") == list(range(81, 160, 3))
    assert await numbers(client, where="city = 'CAN'") == []


async def test_the_messages_keep_all_their_fields(client: plait.Client) -> None:
    await send_orders(client, 160)
    async with client.reader("orders", start="earliest", where="amount IN (7, 100)") as reader:
        [seven] = await reader.fetch(1, wait=20)
        [hundred] = await reader.fetch(1, wait=20)
    assert (seven.body, seven.sequence, seven.headers, seven.tags) == (
        b"7",
        7,
        {"city": "SHA", "amount": 7},
        ["old", "slow"],
    )
    assert (hundred.body, hundred.sequence, hundred.key) == (b"100", 100, "k100")


async def test_a_fetch_gives_as_many_as_it_asks_for_and_the_next_one_continues(client: plait.Client) -> None:
    await send_orders(client, 160)
    async with client.reader("orders", start="earliest", where="city = 'SHA'") as reader:
        found: list[int] = []
        while len(found) < 80:
            messages = await reader.fetch(7, wait=20)
            assert len(messages) <= 7
            found += [int(message.body) for message in messages]
        assert found == list(range(1, 160, 2))


async def test_a_waiting_reader_gets_new_messages_that_match(client: plait.Client) -> None:
    await client.send("orders", b"0", headers={"amount": 0})
    async with client.reader("orders", where="amount > 5") as reader:
        waiting = asyncio.ensure_future(reader.fetch(1, wait=20))
        for number in (1, 2, 9):
            await client.send("orders", b"%d" % number, headers={"amount": number})
        assert [message.body for message in await waiting] == [b"9"]


async def test_one_request_examines_a_bounded_part_and_the_reader_continues(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    read = filtered_read.read_filtered

    def counted(*arguments: Any) -> Any:
        batch = read(*arguments)
        calls.append(batch.full)
        return batch

    monkeypatch.setattr(filtered_read, "read_filtered", counted)
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 10)
    await send_orders(client, 160)
    assert await numbers(client, where="amount = 159") == [159]
    assert sum(calls) >= 7


async def test_a_reader_whose_wait_ends_does_not_examine_the_same_messages_again(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(pull_wait_seconds=0.05)
    async with broker.connect(limits=limits) as client:
        await send_orders(client, 20)
        async with client.reader("orders", start="earliest", where="amount > 1000") as reader:
            assert await reader.fetch(10, wait=0.2) == []
            assert reader.position == ["sequence", 20]


@pytest.mark.parametrize(
    ("filters", "error", "text"),
    [
        ({"where": "amount >"}, plait.InvalidFilter, "character 9"),
        ({"where": "a" * 5000}, plait.InvalidArgument, "FILTER_LENGTH_MAX"),
        ({"where": ""}, plait.InvalidArgument, "not a condition"),
        ({"tags": ["x"] * 17}, plait.InvalidArgument, "TAGS_MAX"),
    ],
)
async def test_a_wrong_filter_is_refused_when_the_reader_opens(
    client: plait.Client, filters: dict[str, Any], error: type[plait.PlaitError], text: str
) -> None:
    await client.send("orders", b"")
    with pytest.raises(error, match=text):
        async with client.reader("orders", **filters):
            pass


def test_blocking_code_has_filters(plait_broker: EmbeddedBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("orders", b"1", headers={"amount": 1})
        client.send("orders", b"2", headers={"amount": 2})
        with client.reader("orders", start="earliest", where="amount = 2") as reader:
            assert [message.body for message in reader.fetch(5, wait=20)] == [b"2"]
