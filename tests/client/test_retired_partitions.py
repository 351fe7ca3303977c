"""A retired partition does not disturb the readers and consumers of its subject.

A group that only retired partitions knew is not new: ``start=`` does not apply to it until it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import plait
import plait.sync
from plait.testing import BlockingBroker, EmbeddedBroker, ManualClock
from tests.client.support import EAGER, PATIENCE_SECONDS, wait_until

LATEST: dict[str, Any] = {"group": "g", "start": "latest"}
KINDS: dict[str, dict[str, Any]] = {
    "latest": LATEST,
    "time": {"group": "g", "start": datetime(2100, 1, 1, tzinfo=UTC)},
    "ordered": {**LATEST, "ordered": True},
    "broadcast": {"broadcast": True},
}


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
    with plait.sync.connect(broker.address, client_id="fixed", limits=EAGER) as connected:
        yield connected


def retire(broker: BlockingBroker, admin: plait.sync.Client, partitions: list[str]) -> None:
    """Change the route to these partitions, wait until the others are retired, and send one message."""
    admin.admin.expand_subject("s", partitions)
    wait_until(lambda: not admin.admin.route("s").moving)
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
        while {str(each.partition) for each in consumer._inner._fetcher.clients} != set(partitions):
            consumer.fetch(1, wait=0.05)


def bodies(client: plait.sync.Client, settings: dict[str, Any], count: int = 1) -> list[bytes]:
    """Fetch and ack the first messages of a consumer."""
    with client.consumer("s", **settings) as consumer:
        batch = consumer.fetch(count, wait=PATIENCE_SECONDS)
        batch.ack()
        return [message.body for message in batch]


def begin(client: plait.sync.Client, settings: dict[str, Any]) -> None:
    client.admin.create_subject("s", retention=60.0, partitions=1)
    with client.consumer("s", **settings):
        pass
    client.send("s", b"expires")


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_stopped_group_gets_the_messages_of_the_partition_that_replaced_a_retired_one(
    broker: BlockingBroker, admin: plait.sync.Client, client: plait.sync.Client, settings: dict[str, Any]
) -> None:
    begin(client, settings)
    retire(broker, admin, ["s#1@g1"])
    assert bodies(client, settings) == [b"new"]


def test_a_group_is_remembered_after_several_route_changes(
    broker: BlockingBroker, admin: plait.sync.Client, client: plait.sync.Client
) -> None:
    begin(client, LATEST)
    retire(broker, admin, ["s#1@g1"])
    retire(broker, admin, ["s#2@g1"])
    assert bodies(client, LATEST) == [b"new"]


def test_a_group_is_not_new_to_a_client_with_an_old_route(
    broker: BlockingBroker, admin: plait.sync.Client, client: plait.sync.Client
) -> None:
    begin(client, LATEST)
    admin.admin.expand_subject("s", ["s#1@g1"])
    wait_until(lambda: not admin.admin.route("s").moving)
    client.admin.route("s")
    client.send("s", b"expires, too")
    retire(broker, admin, ["s#1@g1"])
    assert bodies(client, LATEST) == [b"new"]


def test_a_deleted_group_is_new(broker: BlockingBroker, admin: plait.sync.Client, client: plait.sync.Client) -> None:
    begin(client, LATEST)
    retire(broker, admin, ["s#1@g1"])
    client.admin.delete_group("s", "g")
    with pytest.raises(plait.GroupNotFound):
        client.admin.delete_group("s", "g")
    with client.consumer("s", **LATEST) as consumer:
        client.send("s", b"newer")
        assert [message.body for message in consumer.fetch(9, wait=PATIENCE_SECONDS)] == [b"newer"]


def test_a_recreated_subject_knows_no_group(
    broker: BlockingBroker, admin: plait.sync.Client, client: plait.sync.Client
) -> None:
    begin(client, LATEST)
    retire(broker, admin, ["s#1@g1"])
    admin.admin.delete_subject("s")
    admin.admin.create_subject("s", partitions=1)
    admin.send("s", b"old")
    with client.consumer("s", **LATEST) as consumer:
        client.send("s", b"newer")
        assert [message.body for message in consumer.fetch(9, wait=PATIENCE_SECONDS)] == [b"newer"]
