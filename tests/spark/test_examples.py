"""The examples for users, run on a real session and a real broker."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import plait.sync
from plait.testing import BlockingBroker, EmbeddedBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def order(city: str | None, amount: float, second: int) -> bytes:
    at = datetime(2030, 1, 1, 12, second // 60, second % 60, tzinfo=UTC)
    return json.dumps({"city": city, "amount": amount, "at": at.isoformat()}).encode()


def test_revenue_by_minute_is_stored_shown_and_sent_once(
    spark: SparkSession, broker: BlockingBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    revenue = example("revenue")
    given = ["--server", broker.address, "--subject", "order.events", "--to", "order.revenue", "--once"]
    given += ["--state", str(tmp_path)]
    with plait.sync.connect(broker.address) as client:
        events = [order("BJS", 5, 1), order("BJS", 2.5, 59), order("SHA", 1, 30), order("SHA", 4, 61)]
        # Events without a city do not stop the query.
        client.send_many("order.events", [*events, order("", 1, 1), order(None, 2, 2)])
        revenue.main(given)
        # The event that closes the first minute is sent while nothing runs; a second run sends nothing twice.
        client.send("order.events", order("BJS", 9, 200))
        capsys.readouterr()
        revenue.main(given)
        with client.reader("order.revenue", start="earliest") as reader:
            sent = [(message.key, json.loads(message.body)) for message in reader.fetch(100, wait=0.0)]
    first = "2030-01-01T12:00:00.000Z"
    assert sorted((key or "", figure["minute"], figure["revenue"], figure["orders"]) for key, figure in sent) == [
        ("", first, 1.0, 1),
        ("", first, 2.0, 1),
        ("BJS", first, 7.5, 2),
        ("SHA", first, 1.0, 1),
        ("SHA", "2030-01-01T12:01:00.000Z", 4.0, 1),
    ]
    assert spark.read.parquet(str(tmp_path / "minutes")).count() == 5
    shown = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|2030")]
    assert [(city.strip(), float(amount)) for _, city, amount, _ in shown] == [
        ("NULL", 2.0),
        ("", 1.0),
        ("BJS", 7.5),
        ("SHA", 1.0),
        ("SHA", 4.0),
    ]


def test_dead_letters_are_reported_by_reason(
    spark: SparkSession, broker: BlockingBroker, capsys: pytest.CaptureFixture[str]
):
    dead_letters = example("dead_letters")
    with plait.sync.connect(broker.address) as client:
        client.send_many("order.book", [b"%d" % n for n in range(10)], keys=[f"order-{n}" for n in range(10)])
        with client.consumer("order.book", group="billing") as consumer:
            batch = consumer.fetch(100, wait=1.0)
            for message in batch[:3]:
                message.reject(ValueError("no amount"))
            batch[3].reject(KeyError("city"))
            batch.ack()
    found = dead_letters.letters(spark, broker.address, "order.book", "billing")
    source = spark.read.format("plait").option("server", broker.address).option("subject", "order.book")
    rows = dead_letters.report(found, source.option("columns", "store_time").load()).collect()
    # An hour may end while the test runs; messages that died together are in one frame, and so in one hour.
    assert [(row.type, row.dead, row.keys, row.messages, row.share) for row in rows] == [
        ("ValueError", 3, ["order-0", "order-1", "order-2"], 10, 0.3),
        ("KeyError", 1, ["order-3"], 10, 0.1),
    ]
    dead_letters.main(["--server", broker.address, "order.book", "billing"])
    shown = capsys.readouterr().out
    assert "|type      |handler|dead|attempts|keys" in shown
    assert "|[order-0, order-1, order-2]|10      |0.3  |" in shown
    # Dead letters are retained after their messages have expired.
    expired = spark.createDataFrame([], "store_time timestamp")
    rows = dead_letters.report(found, expired).collect()
    assert [(row.type, row.dead, row.messages, row.share) for row in rows] == [
        ("ValueError", 3, None, None),
        ("KeyError", 1, None, None),
    ]
