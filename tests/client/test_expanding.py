"""The number of partitions changes while clients send, with real meta servers and brokers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import plait
from plait.frame.columns import Column
from plait.frame.view import frames_in
from plait.model.logical_partitions import lp_of_key
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.support import EAGER, PATIENCE_SECONDS

KEYS = [f"k{n}" for n in range(40)]


async def wait_for(client: plait.Client, condition: Any) -> None:
    """Wait until the condition holds for the meta server's list of brokers."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition(await client.admin.brokers()):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def settled(client: plait.Client, subject: str) -> None:
    """Wait until the route has reached its target."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await client.admin.route(subject)).reached:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def rows_of(client: plait.Client, name: str, group: str) -> list[tuple[int, str, bytes]]:
    """(sequence, key, body) of each stored row of a partition."""
    link = await (await client._router.group_node(group)).ready()
    rows: list[tuple[int, str, bytes]] = []
    position = 0
    while True:
        answer, payload = await link.request_payload(m.ReadRequest(name, ("sequence", position), 100_000, 1 << 24, 0.0))
        for frame in frames_in(bytes(payload)):
            keys, bodies = frame.binary(Column.KEY).to_pylist(), frame.binary(Column.BODY).to_pylist()
            rows += [(frame.base + n, keys[n].decode(), bodies[n]) for n in range(frame.count)]
        if answer.next == position:
            return rows
        position = answer.next


async def by_key(client: plait.Client, subject: str) -> dict[str, list[bytes]]:
    """The stored bodies of each key, in the order of the spans of its LP."""
    route = await client._router.refresh(subject)
    stored = [await rows_of(client, *name) for name in route.partitions]
    found: dict[str, list[bytes]] = {}
    for key in {row[1] for rows in stored for row in rows}:
        [spans] = [spans for first, end, spans in route.histories if first <= lp_of_key(key) < end]
        starts: dict[int, int] = {}
        for where, fence in spans:
            start = starts.get(where, 0)
            found.setdefault(key, []).extend(
                body
                for sequence, text, body in stored[where]
                if text == key and start <= sequence and (fence is None or sequence < fence)
            )
            starts[where] = fence or 0
    return found


@pytest.mark.parametrize("order", ["strict", "best_tried"])
async def test_keys_keep_their_order_while_partitions_are_added_and_removed(
    nodes: list[EmbeddedBroker], order: Any
) -> None:
    limits = msgspec.structs.replace(EAGER, send_retry_max_seconds=0.05)
    async with nodes[0].connect() as admin, nodes[0].connect(limits=limits) as client:
        await admin.admin.create_subject("s", partitions=2, order=order)
        posted: dict[str, list[bytes]] = {key: [] for key in KEYS}
        done = False

        async def post() -> None:
            number = 0
            while not done:
                for key in KEYS:
                    posted[key].append(b"%d" % number)
                    client.post("s", b"%d" % number, key=key)
                    number += 1
                if number % (10 * len(KEYS)) == 0:
                    await client.flush()
                await asyncio.sleep(0)

        posting = asyncio.ensure_future(post())
        for count in (4, 7, 3):
            await admin.admin.expand_subject("s", count)
            await settled(admin, "s")
        done = True
        await posting
        await client.flush()
        assert await by_key(admin, "s") == posted
        route = await admin.admin.route("s")
        assert sum(1 for share in route.partitions if share.takes) == 3
