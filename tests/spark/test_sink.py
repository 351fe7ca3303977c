"""``df.write.format("plait")`` and ``writeStream``: every row once, in order; a batch is all or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import plait.sync
from plait.errors import InvalidArgument
from plait.testing import BlockingBroker, EmbeddedBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

#: Divisible by three, so that three tasks have the same number of rows.
ROWS = 2_100


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


def orders(spark: SparkSession, rows: int = ROWS, tasks: int = 3) -> DataFrame:
    """Rows whose bodies count up within each task."""
    numbers = spark.range(0, rows, 1, tasks)
    return numbers.selectExpr("concat('k', id % 7) as key", "cast(id as string) as body")


def save(frame: DataFrame, broker: BlockingBroker, subject: str | None = None, **options: Any) -> None:
    writer = frame.write.format("plait").mode("append").option("server", broker.address).options(**options)
    (writer.option("subject", subject) if subject else writer).save()


def messages(broker: BlockingBroker, subject: str) -> list[plait.Message]:
    """All visible messages."""
    found: list[plait.Message] = []
    with (
        plait.sync.connect(broker.address) as client,
        client.reader(subject, start="earliest") as reader,
    ):
        while batch := reader.fetch(10_000, wait=0.0):
            found += batch
    return found


def stages(broker: BlockingBroker) -> int:
    return len(broker._broker.server.broker.stages)


# --- batch ------------------------------------------------------------------------------------------


def test_every_row_is_sent_once(spark: SparkSession, broker: BlockingBroker):
    save(orders(spark), broker, "batch.orders")
    found = messages(broker, "batch.orders")
    assert sorted(int(message.body) for message in found) == list(range(ROWS))
    assert {message.key for message in found} == {f"k{n}" for n in range(7)}
    assert stages(broker) == 0


def test_all_columns_arrive(spark: SparkSession, broker: BlockingBroker):
    frame = spark.createDataFrame(
        [
            ("batch.columns", bytearray(b"\x00\xff"), 42, ["new", "vip"], {"city": "BJS", "n": "5"}),
            (None, bytearray(b"plain"), None, None, None),
        ],
        "subject string, body binary, key bigint, tags array<string>, headers map<string,string>",
    )
    save(frame.coalesce(1), broker, "batch.other")
    [message] = messages(broker, "batch.columns")
    assert (message.body, message.key, message.tags) == (b"\x00\xff", "42", ["new", "vip"])
    assert message.headers == {"city": "BJS", "n": "5"}
    [plain] = messages(broker, "batch.other")
    assert (plain.body, plain.key, plain.tags, plain.headers) == (b"plain", None, [], {})


def test_delayed_rows_wait(spark: SparkSession, broker: BlockingBroker):
    frame = spark.createDataFrame(
        [("late", timedelta(hours=1)), ("now", None)], "body string, delay interval day to second"
    )
    save(frame, broker, "batch.delayed")
    assert [message.body for message in messages(broker, "batch.delayed")] == [b"now"]
    with plait.sync.connect(broker.address) as client:
        assert len(client.admin.scheduled("batch.delayed")) == 1


def test_a_failed_save_makes_no_message_visible(spark: SparkSession, broker: BlockingBroker):
    bad = orders(spark).selectExpr("key", f"if(body = '{ROWS - 1}', null, body) as body")
    with pytest.raises(Exception, match="column 'body' has 1 null"):
        save(bad, broker, "batch.failed")
    with plait.sync.connect(broker.address) as client:
        client.send("batch.failed", b"after")
    assert [message.body for message in messages(broker, "batch.failed")] == [b"after"]
    assert stages(broker) == 0


def test_a_save_without_rows_succeeds(spark: SparkSession, broker: BlockingBroker):
    save(orders(spark).where("false"), broker, "batch.nothing")
    assert stages(broker) == 0


SERVER = {"server": "plait://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "option 'server' is missing"),
        (SERVER, "option 'subject' is missing"),
        ({**SERVER, "subject": "no spaces"}, "subject name"),
        ({**SERVER, "subject": "s", "topic": "t"}, "unknown option 'topic'"),
        ({**SERVER, "subject": "s", "compression": "zip"}, "compression 'zip'"),
        ({**SERVER, "subject": "s", "path": "/data"}, "not to a path"),
    ],
)
def test_invalid_options_are_reported_immediately(options: dict[str, str], text: str):
    pytest.importorskip("pyspark")
    from plait.spark.sink.writer import WriteOptions

    schema = pa.schema({"body": pa.binary()})
    with pytest.raises(InvalidArgument, match=text):
        WriteOptions.parse(options, schema, overwrite=False)
    with pytest.raises(InvalidArgument, match="cannot be overwritten"):
        WriteOptions.parse({**SERVER, "subject": "s"}, schema, overwrite=True)


# --- streaming --------------------------------------------------------------------------------------


def stream(spark: SparkSession, source: Path, broker: BlockingBroker, subject: str, checkpoint: Path) -> StreamingQuery:
    """Stream Parquet files, two per batch, to a subject."""
    frame = spark.readStream.schema("key string, body string").option("maxFilesPerTrigger", 2).parquet(str(source))
    return (
        frame.writeStream.format("plait")
        .option("server", broker.address)
        .option("subject", subject)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(60)
    error = query.exception()
    assert error is None, error


def add(spark: SparkSession, source: Path, start: int, stop: int) -> None:
    frame = spark.range(start, stop, 1, 1)
    frame.selectExpr("concat('k', id % 7) as key", "cast(id as string) as body").write.mode("append").parquet(
        str(source)
    )


def test_a_stream_continues_where_it_stopped(spark: SparkSession, broker: BlockingBroker, tmp_path: Path):
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for n in range(3):
        add(spark, source, 100 * n, 100 * n + 100)
    finish(stream(spark, source, broker, "stream.on", checkpoint))
    add(spark, source, 300, 400)
    finish(stream(spark, source, broker, "stream.on", checkpoint))
    found = messages(broker, "stream.on")
    assert Counter(int(message.body) for message in found) == Counter(range(400))
    assert stages(broker) == 0


def test_a_committed_batch_is_not_committed_again_whatever_rows_it_has(
    spark: SparkSession, broker: BlockingBroker, tmp_path: Path
):
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    add(spark, source, 0, 100)
    finish(stream(spark, source, broker, "stream.again", checkpoint))
    # The driver dies before it records that batch 0 is committed, and the file changes.
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    for part in source.glob("*.parquet"):
        spark.range(500, 510).selectExpr("'x' as key", "cast(id as string) as body").toPandas().to_parquet(part)
        part.with_name(f".{part.name}.crc").unlink(missing_ok=True)
    add(spark, source, 100, 150)
    finish(stream(spark, source, broker, "stream.again", checkpoint))
    found = messages(broker, "stream.again")
    assert Counter(int(message.body) for message in found) == Counter(range(150))
    assert stages(broker) == 0


def test_a_decided_commit_is_carried_out_after_a_failure(spark: SparkSession, broker: BlockingBroker, tmp_path: Path):
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    add(spark, source, 0, 100)
    # Brokers refuse to publish, so the driver fails after the decision.
    publisher = broker._broker.server.broker.publisher
    publish = publisher.publish

    def refuse(*_: Any) -> None:
        raise InvalidArgument("not now")

    publisher.publish = refuse  # type: ignore[method-assign]
    query = stream(spark, source, broker, "stream.decided", checkpoint)
    with pytest.raises(Exception, match="not now"):
        query.awaitTermination(60)
    publisher.publish = publish  # type: ignore[method-assign]
    finish(stream(spark, source, broker, "stream.decided", checkpoint))
    assert Counter(int(message.body) for message in messages(broker, "stream.decided")) == Counter(range(100))
    assert stages(broker) == 0
