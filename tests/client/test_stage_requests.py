"""Requests about stages and batches: the server refuses invalid ones and continues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import plait
from plait.client.send.row_columns import RowColumns
from plait.client.staged.stage_writer import StageWriter, ask
from plait.errors import Expired, InvalidArgument, InvalidName, OutOfSequence, Timeout
from plait.limits import STAGES_PAGE_MAX
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from plait.wire.admin.partitions import DROP_STAGES, FORGET_BATCHES, PUBLISH_STAGES
from tests.cli.commands import plait as run_plait
from tests.client.support import EAGER

OPEN = {"name": "orders", "producer": 7, "query": "q", "batch": 0}


@pytest.mark.parametrize(
    ("operation", "arguments", "error", "text"),
    [
        ("stage.open", OPEN | {"name": "a b"}, InvalidName, "partition name"),
        ("stage.open", OPEN | {"query": ""}, InvalidName, "query name"),
        ("stage.open", OPEN | {"producer": -1}, InvalidArgument, "-1 is invalid"),
        ("stage.open", OPEN | {"producer": 1 << 63}, InvalidArgument, "is invalid"),
        ("stage.open", OPEN | {"state": "publishing"}, InvalidArgument, "state"),
        ("stage.complete", {"stages": [(8, 1)]}, Expired, "has expired or was dropped"),
        ("stage.publish", {"stages": [(8, -1)]}, InvalidArgument, "-1 is invalid"),
        ("stage.publish", {"stages": [(8, 1)] * (STAGES_PAGE_MAX + 1)}, InvalidArgument, "exceed the limit"),
        ("stage.publish", {"stages": "all"}, InvalidArgument, "stage.publish"),
        ("stage.drop", {"producers": [-5]}, InvalidArgument, "-5 is invalid"),
        ("stage.read", {"producer": 8, "start": 0}, Expired, "does not exist here"),
        ("commit.decide", {"query": "q", "batch": -1, "stages": []}, InvalidArgument, "batch -1"),
        ("commit.decide", {"query": "no spaces", "batch": 0, "stages": []}, InvalidName, "query name"),
        ("commit.veto", {"query": "q", "batch": 0}, InvalidArgument, "producer"),
    ],
)
async def test_invalid_requests_are_refused(
    client: plait.Client, operation: str, arguments: dict[str, Any], error: type[Exception], text: str
):
    node = client._router.meta
    with pytest.raises(error, match=text):
        await node.request(m.AdminRequest(operation, arguments))
    assert (await client.admin.server())["stages"] == 0


async def test_publishing_or_dropping_an_unknown_stage_has_no_effect(client: plait.Client):
    node = client._router.meta
    assert await ask(node, PUBLISH_STAGES, stages=[(8, 1)]) is None
    assert await ask(node, DROP_STAGES, producers=[8]) == 0
    assert await ask(node, FORGET_BATCHES, query="q", batch=3) == 0


async def test_a_broker_that_lost_its_log_tail_stores_no_row_under_a_reused_number(tmp_path: Path):
    # With one frame in flight at a time, every written row has its reply.
    limits = msgspec.structs.replace(EAGER, send_seconds=0.1, in_flight_frames=1)
    async with EmbeddedBroker(tmp_path / "data", metas=()) as broker, broker.connect(limits=limits) as client:
        await client.send("orders", b"before")
        shutil.copytree(broker.data, tmp_path / "durable")
        writer = StageWriter(client, "orders", "q", 0)
        await writer.write(RowColumns(pa.array([b"a"], pa.binary())))
        (number,) = [each.id for each in broker.server.broker.partitions.values() if each.row.stage is not None]
        await broker.kill()
        shutil.rmtree(broker.data)
        shutil.copytree(tmp_path / "durable", broker.data)
        await broker.start()
        await client.send("payments", b"p")
        payments = broker.server.broker.subjects["payments"]
        assert payments.id == number
        # The earlier rows are lost, so every resend finds a gap.
        with pytest.raises((OutOfSequence, Timeout)):
            await writer.write(RowColumns(pa.array([b"b"], pa.binary())))
        assert payments.next == 1


async def test_the_doctor_accepts_a_data_directory_with_stages(broker: EmbeddedBroker, client: plait.Client):
    writer = StageWriter(client, "orders", "q", 0)
    await writer.write(RowColumns(pa.array([b"a", b"b"], pa.binary())))
    await writer.complete()
    await broker.kill()
    done = run_plait("doctor", str(broker.data))
    assert done.returncode == 0, done.stdout
    await broker.start()
    assert len(broker.server.broker.stages) == 1
