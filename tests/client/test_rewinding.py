"""Rewinding groups through the client: previews, several partitions and brokers, route changes, failures on the way."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
import plait.sync
from plait.client.admin.rewind_admin import RewindAdmin
from plait.testing import EmbeddedBroker, ManualClock
from tests.client.support import EAGER, PATIENCE_SECONDS, config_of, fetch_all, wait_until
from tests.client.test_emptied_brokers import nodes
from tests.client.test_expanding import settled
from tests.client.test_retired_partitions import retire

__all__ = ["nodes"]

KEYS = [f"k{n}" for n in range(12)]


@pytest.fixture
async def client(nodes: list[EmbeddedBroker]) -> AsyncIterator[plait.Client]:
    async with nodes[0].connect(limits=msgspec.structs.replace(EAGER, request_seconds=1.0)) as connected:
        yield connected


async def send(client: plait.Client, rounds: range) -> None:
    for number in rounds:
        await client.send_many("s", [b"%d" % number] * len(KEYS), keys=KEYS)


async def handle(client: plait.Client, count: int, **settings: Any) -> dict[str, list[int]]:
    """Handle messages; the numbers of each key in the order in which they were handled."""
    handled: dict[str, list[int]] = defaultdict(list)
    async with client.consumer("s", group="g", **settings) as consumer:
        while sum(map(len, handled.values())) < count:
            for message in await consumer.fetch(50, wait=PATIENCE_SECONDS):
                handled[str(message.key)].append(int(message.body))
                await message.ack()
        await consumer.flush()
    return handled


async def test_an_ordered_group_is_rewound_over_route_changes_with_each_key_in_order(client: plait.Client) -> None:
    await client.admin.create_subject("s", partitions=1, order="strict")
    for step in range(4):
        await send(client, range(10 * step, 10 * step + 10))
        await client.admin.expand_subject("s", (3, 2, 4, 1)[step])
        await settled(client, "s")
    await send(client, range(40, 45))
    count = 45 * len(KEYS)
    await handle(client, count, ordered=True)
    for _ in range(3):
        while not (await client._router.refresh("s")).passed.get("g"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        found = await client.admin.rewind_group("s", "g", "earliest")
        assert (found.again, found.handled, found.open, found.skipped) == (count, count, 0, 0)
        # The same client: its route says that the group has finished the earlier partitions.
        handled = await handle(client, count, ordered=True)
        assert handled == {key: list(range(45)) for key in KEYS}


async def test_a_preview_changes_nothing_and_a_repeated_rewind_has_the_same_position(client: plait.Client) -> None:
    await client.admin.create_subject("s", partitions=2)
    await send(client, range(5))
    await handle(client, 5 * len(KEYS))
    before = await client.admin.group("s", "g")
    shown = await client.admin.rewind_group("s", "g", "-1h", preview=True)
    assert (shown.again, shown.handled) == (60, 60)
    assert shown.between is not None
    assert shown.between[0] <= shown.between[1]
    assert (await client.admin.group("s", "g")).next == before.next
    for again in (60, 0):
        assert (await client.admin.rewind_group("s", "g", shown.to)).again == again
    with pytest.raises(plait.InvalidArgument, match="to is None"):
        await client.admin.rewind_group("s", "g", None)  # type: ignore[arg-type]
    skipped = await client.admin.rewind_group("s", "g", "latest")
    assert (skipped.skip, skipped.skipped, skipped.again) == (True, 60, 0)
    assert (await client.admin.group("s", "g")).lag == 0


async def test_a_rewind_that_one_broker_missed_is_reported_and_can_be_repeated(
    client: plait.Client, nodes: list[EmbeddedBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.admin.create_subject("s", partitions=2)
    await send(client, range(5))
    await handle(client, 5 * len(KEYS))
    act, away = RewindAdmin._rewind, nodes[1]

    async def stopped_before(self: RewindAdmin, *arguments: Any) -> Any:
        await away.stop()
        return await act(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RewindAdmin, "_rewind", stopped_before)
        with pytest.raises(plait.RewindIncomplete, match="rewound to earliest in 1 of 2 partitions") as refused:
            await client.admin.rewind_group("s", "g", "earliest")
    [done], [failed] = refused.value.details["done"], refused.value.details["failed"]
    assert (done.rpartition("@")[2], failed.rpartition("@")[2]) == ("g1", "g2")
    with pytest.raises(plait.PlaitError):
        await client.admin.rewind_group("s", "g", "earliest")
    await away.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                found = await client.admin.rewind_group("s", "g", "earliest")
                break
            except plait.PlaitError:
                await asyncio.sleep(0)
    assert {each.partition: each.again > 0 for each in found.partitions} == {done: False, failed: True}
    assert len(await all_of(client, 60)) == 60


async def all_of(client: plait.Client, count: int) -> list[plait.Message]:
    async with client.consumer("s", group="g") as consumer:
        return await fetch_all(consumer, count)


def test_messages_of_partitions_that_left_the_route_are_said_not_to_come_again(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tmp_path, clock=ManualClock(), config=config_of("g1")) as broker,
        plait.sync.connect(broker.address) as client,
    ):
        client.admin.create_subject("s", retention=60.0, partitions=1)
        client.send_many("s", [b"old"] * 20)
        with client.consumer("s", group="g") as consumer:
            for _ in range(2):
                consumer.fetch(10, wait=PATIENCE_SECONDS).ack()
        assert client.admin.rewind_group("s", "g", "earliest", preview=True).again == 20
        assert not client.admin.rewind_group("s", "g", "earliest", preview=True).left_route
        retire(broker, client, ["s#9@g1"])
        with client.consumer("s", group="g") as consumer:
            consumer.fetch(10, wait=PATIENCE_SECONDS).ack()
        wait_until(lambda: not client.admin.group("s", "g").online)
        found = client.admin.rewind_group("s", "g", "earliest")
        assert (found.again, found.left_route) == (1, True)
