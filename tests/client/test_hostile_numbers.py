"""Invalid numbers in requests: the node refuses them, other clients are not affected, and the node can restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plait.errors import InvalidArgument, PlaitError, ProtocolError
from plait.limits import NUMBER_STEP_MAX, ServerLimits
from plait.model.retry_policy import Retry
from plait.server.operations.partitions import SPAN_NAMES_MAX, SPAN_TIMES_MAX
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from plait.wire import messages as m
from tests.server.raw import PATIENCE_SECONDS, Raw, until
from tests.support.progress import within_cpu_seconds

SUBJECT, GROUP = "orders", "billing"
WANT = (0, 1024, 1, 0)


#: Short leases.
CONFIG = msgspec.structs.replace(TEST_CONFIG, limits=ServerLimits(lease_seconds=0.3))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker(tmp_path / "data", config=CONFIG) as running:
        yield running


async def consumes(node: EmbeddedBroker, number: int, group: str = GROUP) -> None:
    """Check that an ordered member of a group gets a new message."""
    async with node.connect() as client, client.consumer(SUBJECT, group=group, ordered=True) as consumer:
        await client.send(SUBJECT, b"%d" % number, key="k")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                batch = await consumer.fetch(10, wait=1.0)
                await batch.ack()
                if b"%d" % number in [message.body for message in batch]:
                    return


async def refused(node: EmbeddedBroker, request: m.PacketHead) -> PlaitError:
    async with Raw(node.server) as raw:
        await raw.hello("hostile")
        with pytest.raises(PlaitError) as refusal:
            await raw.ask(request)
        return refusal.value


async def lease(node: EmbeddedBroker, *fields: Any) -> PlaitError | None:
    """The error of a lease request with these fields; None: it was granted."""
    async with Raw(node.server) as raw:
        await raw.hello("hostile")
        session = await raw.attach(SUBJECT, GROUP, "hostile", ordered=True)
        try:
            await raw.ask(m.LeaseRequest(session, *fields))
        except PlaitError as error:
            return error
        finally:
            await raw.ask(m.DetachRequest(session))
    return None


LEASES: list[tuple[Any, ...]] = [
    ([(0, 1024, 2**62 - 1, 0)],),
    ([WANT], [-1]),
    ([WANT], [], [-1]),
    ([(0, 1024, 1, 2**64 - 1)],),
    ([WANT] * 2000,),
    ([WANT], list(range(2**40, 2**40 + 20_000))),
]


async def test_an_invalid_lease_request_harms_no_group_now_or_after_a_restart(node: EmbeddedBroker):
    await consumes(node, 1)
    with within_cpu_seconds(10):
        for number, fields in enumerate(LEASES):
            assert isinstance(await lease(node, *fields), InvalidArgument)
            await consumes(node, 2 + number)
    await node.restart()
    await consumes(node, 10)
    await consumes(node, 11, "another")


@pytest.mark.parametrize("fields", [([WANT] * 1_600_000,), ([WANT], [2**63] * 150_000)], ids=["wants", "parked"])
async def test_an_oversized_lease_request_is_refused_without_decoding(node: EmbeddedBroker, fields: tuple[Any, ...]):
    await consumes(node, 1)
    request = m.LeaseRequest(1, *fields)
    with within_cpu_seconds(3):
        async with Raw(node.server) as raw:
            await raw.hello("hostile")
            raw.request(request)
            error = await raw.ending()
    assert isinstance(error, ProtocolError)
    assert "over the limit" in error.message
    await consumes(node, 2)


FACTS = {"group": "local", "broker": "local", "address": "plait://127.0.0.1:1", "state": "RW", "epoch": 1}


ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("partition.open", {"subject": SUBJECT, "name": SUBJECT, "lps": [(0, 1024)], "version": 2**64 - 1}),
    ("partition.open", {"subject": SUBJECT, "name": SUBJECT, "lps": [(0, 1024)], "version": 2**62}),
    ("partition.seal", {"name": SUBJECT, "lps": [(0, 1024)], "version": 2**64 - 1}),
    ("partition.drop", {"subject": SUBJECT, "name": SUBJECT, "version": 2**64 - 1}),
    ("broker.register", {**FACTS, "partitions": [{"name": "x", "subject": "x", "newest": 2**63 - 2}]}),
    ("broker.register", {**FACTS, "partitions": [{"name": "x", "subject": "x", "newest": -1}]}),
    ("broker.register", {**FACTS, "partitions": [{"name": "x", "subject": "x", "created": 2**64 - 1}]}),
    ("broker.register", {**FACTS, "partitions": [], "epoch": 2**64 - 1}),
    *(
        (operation, {**names, setting: value})
        for setting, values in (
            ("retention_seconds", (float("nan"), float("inf"), 1e308, 0.0, -1.0)),
            ("retention_bytes", (2**64 - 1, 0, -1)),
        )
        for value in values
        for operation, names in (("subject.create", {"subject": "new"}), ("subject.set", {"subject": SUBJECT}))
    ),
    *(
        ("partition.open", {"subject": name, "name": name, "lps": [(0, 1024)], "version": 1, "settings": settings})
        for name in (SUBJECT, "new")
        for settings in ({"retention_seconds": float("inf")}, {"retention_bytes": -1})
    ),
    ("partition.spans", {"names": [SUBJECT], "times": [2**64 - 1]}),
    ("partition.spans", {"names": [SUBJECT] * (SPAN_NAMES_MAX + 1), "times": []}),
    ("partition.spans", {"names": [SUBJECT], "times": [1] * (SPAN_TIMES_MAX + 1)}),
    ("partition.cuts", {"ranges": [(SUBJECT, 0, 2**64 - 1, 1)]}),
]


async def test_an_invalid_broker_order_is_refused_and_the_node_restarts(node: EmbeddedBroker):
    await consumes(node, 1)
    for operation, arguments in ORDERS:
        assert isinstance(await refused(node, m.AdminRequest(operation, arguments)), InvalidArgument), (
            operation,
            arguments,
        )
    node.server.broker_host.upkeep.housekeep()
    await consumes(node, 2)
    await node.restart()
    await consumes(node, 3)


@pytest.mark.parametrize("time", [2**64 - 1, -(2**63)])
async def test_an_extreme_read_time_is_clamped(node: EmbeddedBroker, time: int):
    await consumes(node, 1)
    # Write some consume log records to a file.
    node.server.broker.snapshots.make()
    async with Raw(node.server) as raw:
        await raw.hello("reader")
        answer = await raw.ask(m.ReadRequest(SUBJECT, ["time", time], 10, 1_000, 0.0))
    assert answer.next == 1


async def test_an_extreme_expiry_age_is_refused(node: EmbeddedBroker):
    await consumes(node, 1)
    for age in (1e308, float("inf")):
        with pytest.raises(InvalidArgument, match="expires"):
            Retry(expires=age)


async def test_the_meta_server_ignores_a_far_too_high_change_number(node: EmbeddedBroker, caplog: Any):
    """The registration is accepted: a broker whose log has such a number must be able to start."""
    facts = {**FACTS, "group": "g2", "broker": "b2", "partitions": [{"name": "x", "subject": "x", "newest": 2**62}]}
    for _ in range(2):
        async with Raw(node.server) as raw:
            await raw.hello("hostile")
            await raw.ask(m.AdminRequest("broker.register", facts))
    assert "too far ahead" in caplog.text
    # The broker receives the change number with its next heartbeat, and takes orders with it.
    await until(lambda: node.server.broker.numbers.known > NUMBER_STEP_MAX)
    async with node.connect() as client:
        await client.admin.create_subject("next", groups=[CONFIG.group])
    assert 0 < node.server.broker.subjects["next"].row.route <= 3 * NUMBER_STEP_MAX
    await consumes(node, 1)


async def test_many_partitions_and_times_are_described_at_once(node: EmbeddedBroker):
    async with node.connect() as client:
        for number in range(300):
            await client.send(SUBJECT, b"%d" % number)
    names = [SUBJECT] * SPAN_NAMES_MAX
    with within_cpu_seconds(1):
        async with Raw(node.server) as raw:
            await raw.hello("spark")
            await raw.ask(m.AdminRequest("partition.spans", {"names": names, "times": list(range(SPAN_TIMES_MAX))}))
