"""A reader with a filter: it gets the messages that match, in order, from stored and from new messages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import plait
import plait.sync
from plait.broker.partitions import filtered_read
from plait.broker.partitions.partition import ReadBatch
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


async def test_a_fetch_that_does_not_wait_examines_a_part_and_the_next_one_continues(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 1)
    await send_orders(client, 160)
    async with client.reader("orders", start="earliest", where="amount = 159") as reader:
        # The first frame has 80 messages, each of the others has one.
        for end in (80, 81, 82):
            assert await reader.fetch(10, wait=0) == []
            assert reader.position == ["sequence", end]
        [message] = await reader.fetch(10, wait=20)
        assert message.body == b"159"


@pytest.fixture
def endless_search(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No search of the broker gets on. The event is set when one begins."""
    begun = asyncio.Event()

    def endless(partition: Any, log: Any, start: int, *rest: Any) -> ReadBatch:
        begun.set()
        return ReadBatch(start, full=True)

    monkeypatch.setattr(filtered_read, "read_filtered", endless)
    return begun


async def test_a_fetch_ends_with_its_time(client: plait.Client, endless_search: asyncio.Event) -> None:
    await send_orders(client, 20)
    async with client.reader("orders", start="earliest", where="amount = 19") as reader, asyncio.timeout(10):
        assert await reader.fetch(10, wait=0.1) == []
        assert await reader.fetch(10, wait=0) == []


async def test_a_closed_reader_sends_no_more_requests(broker: EmbeddedBroker, endless_search: asyncio.Event) -> None:
    async with broker.connect(limits=plait.ClientLimits(pull_wait_seconds=0.05)) as client:
        await send_orders(client, 20)
        async with client.reader("orders", start="earliest", where="amount = 19") as reader:
            endless_search.clear()
            fetching = asyncio.ensure_future(reader.fetch(10, wait=60))
            await endless_search.wait()
            await reader.close()
            with pytest.raises(plait.Closed):
                async with asyncio.timeout(10):
                    await fetching


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


async def test_a_read_that_fails_frees_its_poll(
    client: plait.Client, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise plait.LimitExceeded("too much")

    await client.send("orders", b"")
    async with client.reader("orders", start="earliest", where="amount = 1") as reader:
        monkeypatch.setattr(filtered_read, "read_filtered", failing)
        with pytest.raises(plait.LimitExceeded):
            await reader.fetch(1, wait=5)
    assert [dict(connection.polls) for connection in broker.server.connections if connection.polls] == []


def test_filters_do_not_load_pandas() -> None:
    """It takes a quarter of a second of the broker's loop."""
    code = """
import sys, msgspec, numpy as np
from plait.filter.message_filter import compile_filter
from plait.frame import FrameView, build_frame
from plait.model.filter_terms import FilterTerms
rows = [msgspec.msgpack.encode(each) for each in ({"a": 1, "b": "x"}, {"a": 0.5}, {"a": "y"})]
frame = FrameView(build_frame([b""] * 3, producer=1, first=1, headers=rows).tobytes())
for where in ("a IN (1, 0.5, 'y')", "b LIKE '%x'", "b < 'y' OR a > 5"):
    compile_filter(FilterTerms(where=where)).rows(frame)
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocking_code_has_filters(plait_broker: EmbeddedBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("orders", b"1", headers={"amount": 1})
        client.send("orders", b"2", headers={"amount": 2})
        with client.reader("orders", start="earliest", where="amount = 2") as reader:
            assert [message.body for message in reader.fetch(5, wait=20)] == [b"2"]
