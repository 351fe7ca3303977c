"""Acks, nacks and attaches with very many separate ranges are sent in requests of a bounded size."""

from __future__ import annotations

import pytest

import plait
from plait.client.consume.outcomes import split_ack, split_nack
from plait.limits import FAILED_RANGES_MAX, REQUEST_RANGES_MAX
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.support import fetch_all, numbers, send

#: So many rows that every other one makes more ranges than one request takes.
MANY = 2 * REQUEST_RANGES_MAX + 100


async def test_acks_and_nacks_of_every_other_message_are_stored(client: plait.Client) -> None:
    await send(client, MANY)
    async with client.consumer("s", group="g", prefetch=MANY) as consumer:
        held = await fetch_all(consumer, MANY)
        for message in held[::2]:
            message.ack()
        await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == MANY // 2
        for message in held[1::2]:
            message.nack(delay=0)
        await consumer.flush()
        again = await fetch_all(consumer, MANY // 2)
        assert numbers(again) == list(range(1, MANY, 2))
        assert {message.attempt for message in again} == {2}
        for message in again:
            message.ack()
    assert (await client.admin.group("s", "g")).lag == 0


async def test_a_consumer_that_holds_every_other_message_attaches_again(
    broker: EmbeddedBroker, client: plait.Client, caplog: pytest.LogCaptureFixture
) -> None:
    await send(client, MANY + 10)
    async with client.consumer("s", group="g", prefetch=MANY + 10) as consumer:
        held = await fetch_all(consumer, MANY)
        for message in held[::2]:
            message.ack()
        await consumer.flush()
        await broker.restart()
        # The broker keeps the rows that one request names. The other rows and the prefetched ones are redelivered.
        rest = (MANY // 2) - REQUEST_RANGES_MAX
        again = await fetch_all(consumer, rest + 10)
        assert sorted(numbers(again)) == [*numbers(held[1::2])[-rest:], *range(MANY, MANY + 10)]
        for message in [*held[1::2], *again]:
            message.ack()
    assert (await client.admin.group("s", "g")).lag == 0
    assert f"form {MANY // 2} separate ranges, and an attach request takes {REQUEST_RANGES_MAX}" in caplog.text


def ranges(count: int) -> list[tuple[int, int, int]]:
    return [(2 * n, 2 * n + 1, 1) for n in range(count)]


@pytest.mark.parametrize("tagged", [False, True])
def test_a_split_request_has_the_same_ranges_and_tags(tagged: bool) -> None:
    count = 2 * REQUEST_RANGES_MAX + 1
    tags = list(range(count)) if tagged else []
    acks = list(split_ack(m.AckRequest(5, ranges(count), tags)))
    assert [len(ack.ranges) for ack in acks] == [REQUEST_RANGES_MAX, REQUEST_RANGES_MAX, 1]
    assert [each for ack in acks for each in ack.ranges] == ranges(count)
    assert [tag for ack in acks for tag in ack.tags] == tags
    nacks = list(split_nack(m.NackRequest(5, ranges(count), 2.0, tags=tags)))
    assert max(len(nack.ranges) for nack in nacks) == FAILED_RANGES_MAX
    assert [each for nack in nacks for each in nack.ranges] == ranges(count)
    assert [tag for nack in nacks for tag in nack.tags] == tags
    assert {(nack.session, nack.delay) for nack in nacks} == {(5, 2.0)}


def test_returns_by_logical_partition_are_split_too() -> None:
    count = REQUEST_RANGES_MAX + 1
    nack = m.NackRequest(
        5, ranges(3), counted=False, tags=[1, 2, 3], lps=[(0, 9)], lp_ranges=ranges(count), lp_tags=[4] * count
    )
    parts = list(split_nack(nack))
    assert [len(part.ranges) + len(part.lp_ranges) for part in parts] == [REQUEST_RANGES_MAX, 1, 3]
    assert [part.lps for part in parts] == [[(0, 9)], [(0, 9)], []]
    assert [tag for part in parts for tag in part.lp_tags] == [4] * count
    # An empty nack ends suspended pulls.
    empty = m.NackRequest(5, [], counted=False)
    assert list(split_nack(empty)) == [empty]
