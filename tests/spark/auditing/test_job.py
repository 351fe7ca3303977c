"""The audit as a Spark job: the same report as without Spark, with progress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import plait.spark
from plait.errors import DamageError
from plait.spark.inputs import log_audit as live
from plait.testing import EmbeddedBroker
from tests.spark.auditing.conftest import Audit
from tests.spark.auditing.defects import swapped_acks
from tests.spark.auditing.test_live import SUBJECT, consume, send

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


async def make_data(data: Path) -> None:
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        for _ in range(20):
            await send(client, 20)
        async with (
            client.consumer(SUBJECT, group="billing") as shared,
            client.consumer(SUBJECT, group="mail", ordered=True) as ordered,
        ):
            await consume(shared, 400)
            await consume(ordered, 350)


class Steps:
    """Receives progress."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def step(self, name: str, total: int | None = None, unit: str = "") -> None:
        self.names.append(name)

    def update(self, done: int) -> None:
        assert done >= 0


async def test_spark_and_a_single_process_give_the_same_report(
    tmp_path: Path, spark: SparkSession, audit: Audit, monkeypatch: pytest.MonkeyPatch
):
    await make_data(tmp_path)
    monkeypatch.setattr(live, "BLOCK_SIZE", 4096)
    steps = Steps()
    report = plait.spark.audit(tmp_path, spark=spark, progress=steps)
    assert report == audit(tmp_path)
    assert report.held
    assert [group.acked for group in report.groups()] == [400, 350]
    assert steps.names[:2] == ["looking at the message log", "reading the action log"]


async def by_two_owners(client: plait.Client) -> None:
    """Eight large messages of two keys, sent one by one; each of two consumers acks four."""
    for half in range(2):
        async with client.consumer(SUBJECT, group="mail", ordered=True) as ordered:
            for number in range(4 * half, 4 * half + 4):
                await client.send(SUBJECT, bytes(2048), key=f"k-{number % 2}")
                await consume(ordered, 1)


async def test_swapped_acks_in_two_blocks_are_found(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
):
    async with EmbeddedBroker(tmp_path / "good") as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await by_two_owners(client)
    swapped_acks(tmp_path / "good", tmp_path / "bad", 1, 7)
    monkeypatch.setattr(live, "BLOCK_SIZE", 4096)
    assert plait.spark.audit(tmp_path / "good", spark=spark).held
    report = plait.spark.audit(tmp_path / "bad", spark=spark)
    assert report.groups()[0].broken == ["out_of_order"]


async def test_an_error_of_a_task_keeps_its_type(tmp_path: Path, spark: SparkSession):
    await make_data(tmp_path)
    (segment,) = (tmp_path / "message").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[data.index(b"k-1k-2")] ^= 1
    segment.write_bytes(data)
    with pytest.raises(DamageError, match="is damaged"):
        plait.spark.audit(tmp_path, spark=spark)
    report = plait.spark.audit(tmp_path, spark=spark, skip_damage=True)
    assert report.subjects[0].missing == 20
