"""A retired partition does not disturb the readers and consumers of its subject."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plait
import plait.sync
from plait.testing import BlockingBroker, EmbeddedBroker, ManualClock
from tests.client.support import PATIENCE_SECONDS


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BlockingBroker]:
    with EmbeddedBroker(tmp_path / "data", clock=ManualClock()) as running:
        yield running


@pytest.fixture
def admin(broker: BlockingBroker) -> Iterator[plait.sync.Client]:
    with plait.sync.connect(broker.address) as client:
        yield client


@pytest.fixture
def client(broker: BlockingBroker) -> Iterator[plait.sync.Client]:
    """A client that refreshes its route only after a refusal; its periodic refresh is half a minute away."""
    with plait.sync.connect(broker.address) as connected:
        yield connected


def retire(broker: BlockingBroker, admin: plait.sync.Client, partitions: list[str]) -> None:
    """Change the route to these partitions, wait until the others are retired, and send one message."""
    admin.admin.expand_subject("s", partitions)
    while admin.admin.route("s").moving:
        pass
    broker.advance(100.0)
    while len(admin.admin.route("s").partitions) > len(partitions):
        broker.advance(1.0)
    admin.send("s", b"new")


@pytest.mark.parametrize("partitions", [["s#9@g1"], ["s@g1", "s#9@g1"]], ids=["all", "some"])
def test_a_reader_continues_without_a_retired_partition(
    broker: BlockingBroker, admin: plait.sync.Client, client: plait.sync.Client, partitions: list[str]
) -> None:
    admin.admin.create_subject("s", retention=60.0, partitions=2)
    admin.send_many("s", [b"old"] * 20, keys=list(range(20)))
    with client.reader("s", start="earliest") as reader:
        read = 0
        while read < 20:
            read += len(reader.fetch(20, wait=PATIENCE_SECONDS))
        retire(broker, admin, partitions)
        assert [message.body for message in reader.fetch(1, wait=PATIENCE_SECONDS)] == [b"new"]


@pytest.mark.parametrize("kind", [{}, {"ordered": True}], ids=["shared", "ordered"])
@pytest.mark.parametrize("partitions", [["s#9@g1"], ["s@g1", "s#9@g1"]], ids=["all", "some"])
def test_a_consumer_with_an_old_route_does_not_wait_for_a_retired_partition(
    broker: BlockingBroker,
    admin: plait.sync.Client,
    client: plait.sync.Client,
    partitions: list[str],
    kind: dict[str, Any],
) -> None:
    admin.admin.create_subject("s", retention=60.0, partitions=2)
    client.send_many("s", [b"old"] * 20, keys=list(range(20)))
    retire(broker, admin, partitions)
    with client.consumer("s", "g", **kind) as consumer:
        assert [message.body for message in consumer.fetch(1, wait=PATIENCE_SECONDS)] == [b"new"]
        # The message may come from the partition that stays, before the consumer has the new route.
        while {str(each.partition) for each in consumer._inner._clients} != set(partitions):
            consumer.fetch(1, wait=0.05)
