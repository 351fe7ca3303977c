"""The lag of an ordered group over several partitions."""

from __future__ import annotations

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, config_of, fetch_all
from tests.client.test_expanding import settled

KEYS = [f"k{n}" for n in range(100)]


async def test_lag_is_exact_over_several_partitions_and_after_an_expansion() -> None:
    async with EmbeddedBroker(config=config_of("g1")) as broker, broker.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=2)
        await client.send_many("s", [b"x"] * 100, keys=KEYS)
        assert await lag(client) is None
        async with client.consumer("s", group="g", ordered=True) as consumer:
            messages = await fetch_all(consumer, 100)
            for message in messages[:60]:
                await message.ack()
            await consumer.flush()
            assert await lag(client) == 40
            for message in messages[60:]:
                await message.ack()
            await consumer.flush()
            assert await lag(client) == 0
            await client.admin.expand_subject("s", 4)
            await settled(client, "s")
            assert await lag(client) == 0
            await client.send_many("s", [b"y"] * 100, keys=KEYS)
            for message in await fetch_all(consumer, 100):
                await message.ack()
            await consumer.flush()
            assert await lag(client) == 0


async def lag(client: plait.Client) -> int | None:
    """The exact lag of the only group; None: there is no group."""
    found = await client.admin.groups("s")
    if not found:
        return None
    [listed] = found
    described = await client.admin.group("s", "g")
    assert not described.estimated
    assert listed.lag == described.lag or listed.estimated
    return described.lag
