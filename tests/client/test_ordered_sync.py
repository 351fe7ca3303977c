"""Ordered consumers of the blocking client."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

import plait
import plait.sync
from plait.testing import BlockingBroker, EmbeddedBroker
from tests.client.support import PATIENCE_SECONDS

KEYS = [f"key-{n}" for n in range(5)]


@pytest.fixture(scope="module")
def broker() -> object:
    with EmbeddedBroker() as running:
        yield running


def send(client: plait.sync.Client, subject: str, count: int) -> dict[str, list[int]]:
    keys = [KEYS[n % len(KEYS)] for n in range(count)]
    client.send_many(subject, [b"%d" % n for n in range(count)], keys=keys)
    return {key: list(range(at, count, len(KEYS))) for at, key in enumerate(KEYS)}


def test_a_loop_over_messages_gets_each_key_in_order(broker: BlockingBroker) -> None:
    with plait.sync.connect(broker.address) as client:
        expected = send(client, "one", 50)
        seen: dict[str, list[int]] = defaultdict(list)
        with client.consumer("one", group="g", ordered=True) as consumer:
            for _ in range(50):
                message = next(consumer)
                assert message.key is not None
                seen[message.key].append(int(message.body))
                message.ack()
            consumer.flush()
        assert seen == expected
        assert client.admin.group("one", "g").lag == 0


def test_threads_share_a_consumer_but_never_a_key(broker: BlockingBroker) -> None:
    with plait.sync.connect(broker.address) as client:
        expected = send(client, "many", 100)
        seen: dict[str, list[int]] = defaultdict(list)
        busy: set[str] = set()
        errors: list[str] = []
        left = threading.Semaphore(100)

        def work() -> None:
            while left.acquire(blocking=False):
                message = next(consumer)
                assert message.key is not None
                if message.key in busy:
                    errors.append(f"{message.key} twice")
                busy.add(message.key)
                seen[message.key].append(int(message.body))
                busy.discard(message.key)
                message.ack()

        with client.consumer("many", group="g", ordered=True) as consumer:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_SECONDS)
        assert (errors, seen) == ([], expected)


def test_batches_and_tables_are_fetched_in_order(broker: BlockingBroker) -> None:
    with plait.sync.connect(broker.address) as client:
        send(client, "batch", 20)
        with client.consumer("batch", group="g", ordered=True, handling=60) as consumer:
            batch = consumer.fetch(5, wait=PATIENCE_SECONDS)
            assert [int(message.body) for message in batch] == [0, 1, 2, 3, 4]
            assert len(consumer.fetch_arrow(20, wait=0)) == 0
            batch.ack()
            table = consumer.fetch_arrow(20, wait=PATIENCE_SECONDS)
            assert len(table) == 15
            table.ack()
        assert client.admin.group("batch", "g").lag == 0
