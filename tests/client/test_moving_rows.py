"""Links break and routes change while rows are sent: every row of a key is stored once and in order (R7, R8)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PlayedMeta, config_of

_subjects = itertools.count()

#: The steps of a script: post rows (count, number of keys), let turns of the loop pass, break the link of a node,
#: change the number of partitions, and refresh the route without a refusal.
STEPS = st.one_of(
    st.tuples(st.just("post"), st.integers(1, 60), st.integers(1, 30)),
    st.tuples(st.just("many"), st.integers(1, 60), st.integers(1, 30)),
    st.tuples(st.just("pass"), st.integers(1, 6)),
    st.tuples(st.just("break"), st.integers(0, 2)),
    st.tuples(st.just("change"), st.integers(1, 7)),
    st.tuples(st.just("refresh")),
)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[EmbeddedBroker]]:
    """Two broker groups in their own threads, for all scripts."""
    first, second = (EmbeddedBroker(config=config_of(group), metas=()) for group in ("g1", "g2"))
    with first, second:
        yield [first, second]


async def run(brokers: list[EmbeddedBroker], order: str, script: list[tuple[object, ...]]) -> None:
    meta = PlayedMeta(brokers, f"s{next(_subjects)}", order)
    await meta.open(2)
    sent: dict[str, list[bytes]] = {}
    numbers = itertools.count()
    many: list[asyncio.Future[object]] = []

    def rows(count: int, keys: int) -> list[tuple[str, bytes]]:
        made = [(f"k{n % keys}", b"%d" % n) for n in itertools.islice(numbers, count)]
        for key, body in made:
            sent.setdefault(key, []).append(body)
        return made

    async with meta.client(limits=EAGER) as client:
        changing: asyncio.Future[None] = asyncio.ensure_future(asyncio.sleep(0))
        for what, *arguments in script:
            if what == "post":
                for key, body in rows(*arguments):  # type: ignore[arg-type]
                    client.post(meta.subject, body, key=key)
            elif what == "many":
                # One after another: concurrent sends have no order.
                await asyncio.gather(*many)
                await client.flush()
                keys, bodies = zip(*rows(*arguments), strict=True)  # type: ignore[arg-type]
                many = [asyncio.ensure_future(client.send_many(meta.subject, bodies, keys=keys))]
                await asyncio.sleep(0)
            elif what == "pass":
                for _ in range(arguments[0]):  # type: ignore[call-overload]
                    await asyncio.sleep(0)
            elif what == "break":
                nodes = list(dict.fromkeys([client._node, *client._router._nodes.values()]))
                link = nodes[arguments[0] % len(nodes)].link  # type: ignore[operator]
                if link is not None:
                    link.abort()
            elif what == "refresh":
                await changing
                await client._router.refresh(meta.subject)
            else:
                await changing
                changing = asyncio.ensure_future(meta.change(arguments[0]))  # type: ignore[arg-type]
        await changing
        await asyncio.gather(*many)
        await client.flush()
    assert await meta.by_key() == sent
    await meta.close()


@pytest.mark.parametrize("order", ["strict", "best_tried"])
@settings(max_examples=40, deadline=None)
@given(script=st.lists(STEPS, min_size=1, max_size=40))
def test_every_row_of_a_key_is_stored_once_and_in_order(
    pair: list[EmbeddedBroker], order: str, script: list[tuple[object, ...]]
) -> None:
    asyncio.run(run(pair, order, script))


@pytest.mark.parametrize("order", ["strict", "best_tried"])
def test_rows_are_stored_once_while_partitions_change_and_links_break(pair: list[EmbeddedBroker], order: str) -> None:
    script: list[tuple[object, ...]] = []
    for turn, count in enumerate((4, 7, 3, 1, 2)):
        script += [("post", 60, 30), ("pass", turn), ("change", count), ("post", 60, 30)]
        script += [("refresh",), ("post", 60, 30)] if turn % 2 else []
        for step in range(6):
            script += [("post", 60, 29 - turn), ("pass", 1 + step), ("break", step), ("post", 20, 7), ("pass", 2)]
        script += [("many", 300, 11)]
    asyncio.run(run(pair, order, script))
