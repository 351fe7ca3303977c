"""``readStream``: offsets that Spark can store, and batches that are the same whenever they are read."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import plait.sync
from plait.clock import ManualClock
from plait.errors import DataLost, InvalidArgument
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import BlockingBroker

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from tests.spark.support import Stream, batch_reader, lose_tail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Client = plait.sync.Client


def send(client: Client, *sent: bytes) -> None:
    client.send_many("orders", list(sent))


def test_each_batch_has_the_messages_since_the_last(place: dict[str, Any], client: Client):
    send(client, b"a", b"b")
    stream = Stream(**place)
    assert stream.bodies() == [b"a", b"b"]
    offset = stream.offset
    assert stream.bodies() == []
    assert stream.offset == offset
    send(client, b"c")
    assert stream.bodies() == [b"c"]
    assert stream.offset == {"orders@g1": {"epoch": 1, "id": 1, "sequence": 3}}
    assert offset == {"orders@g1": {"epoch": 1, "from": 0, "id": 1, "sequence": 2}}, "of the first batch"
    assert json.dumps(stream.offset) == json.dumps(stream.offset, sort_keys=True)


def test_a_batch_is_the_same_when_it_is_read_again(place: dict[str, Any], client: Client):
    send(client, b"a", b"b")
    stream = Stream(**place)
    start = stream.offset
    first = stream.step()
    send(client, b"c", b"d")
    assert Stream(start, **place).read(start, stream.offset) == first
    # A new reader, like one that starts from a checkpoint.
    offset = json.loads(json.dumps(stream.offset))
    assert Stream(offset, **place).bodies() == [b"c", b"d"]


def test_a_stream_starts_at_the_given_offsets(place: dict[str, Any], client: Client):
    send(client, b"a", b"b", b"c")
    assert Stream(startingOffsets='{"orders@g1": 1}', **place).bodies() == [b"b", b"c"]
    latest = Stream(startingOffsets="latest", **place)
    assert latest.bodies() == []
    assert Stream(startingOffsets="2001-01-01", **place).bodies() == [b"a", b"b", b"c"]
    send(client, b"d")
    assert latest.bodies() == [b"d"]


def test_a_limit_of_messages_is_exact_and_shared_by_partitions(place: dict[str, Any], client: Client):
    client.admin.create_subject("orders", partitions=3)
    keys = [f"k{number}" for number in range(60)]
    client.send_many("orders", [key.encode() for key in keys], keys=keys)
    stream = Stream(maxMessagesPerTrigger=10, **place)
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(10)
    read: list[dict[str, Any]] = []
    for _ in range(6):
        rows = stream.step()
        assert len(rows) == 10
        assert len({row["partition"] for row in rows}) == 3
        read += rows
    assert stream.step() == []
    assert sorted(row["body"] for row in read) == sorted(key.encode() for key in keys)
    for partition in {row["partition"] for row in read}:
        sequences = [row["sequence"] for row in read if row["partition"] == partition]
        assert sequences == list(range(len(sequences)))
    one = Stream(maxMessagesPerTrigger=1, **place)
    assert [len(one.step()) for _ in range(5)] == [1] * 5


def test_a_limit_of_bytes_ends_at_the_end_of_a_frame_and_allows_at_least_one_frame(
    place: dict[str, Any], client: Client
):
    for number in range(20):
        send(client, *[b"%d" % number + bytes(1000)] * 10)
    stream = Stream(maxBytesPerTrigger=30_000, **place)
    assert stream.reader.getDefaultReadLimit() == ReadMaxBytes(30_000)
    counts = [len(stream.step()) for _ in range(10)]
    assert counts == [*[20] * 10]
    assert Stream(maxBytesPerTrigger=1, **place).step()[-1]["sequence"] == 9
    both = Stream(maxBytesPerTrigger=30_000, maxMessagesPerTrigger=7, **place)
    assert len(both.step()) == 7
    assert len(both.step(ReadAllAvailable())) == 193


def test_a_query_for_available_data_ends_with_the_messages_that_existed_at_its_start(
    place: dict[str, Any], client: Client
):
    send(client, b"a", b"b", b"c")
    stream = Stream(maxMessagesPerTrigger=2, **place)
    stream.reader.prepareForTriggerAvailableNow()
    send(client, b"d")
    assert [stream.bodies() for _ in range(3)] == [[b"a", b"b"], [b"c"], []]


def test_partitions_that_are_added_later_are_read_from_their_start(place: dict[str, Any], client: Client):
    client.admin.create_subject("orders", partitions=1)
    keys = [f"k{number}" for number in range(40)]
    client.send_many("orders", [b"first"] * 40, keys=keys)
    stream = Stream(**place)
    assert len(stream.step()) == 40
    client.admin.expand_subject("orders", 3)
    receipts = client.send_many("orders", [b"second"] * 40, keys=keys)
    while {str(receipt.partition) for receipt in receipts} == {"orders@g1"}:
        receipts = client.send_many("orders", [b"second"] * 40, keys=keys)
    rows = stream.step()
    assert len({row["partition"] for row in rows}) > 1
    assert {row["body"] for row in rows} == {b"second"}
    last = {str(r.partition): r.sequence for r in receipts}
    assert {row["partition"]: row["sequence"] for row in rows} == last
    assert stream.step() == []


def test_each_partition_is_one_task_unless_more_are_requested(plait_broker: BlockingBroker, client: Client):
    client.admin.create_subject("orders", partitions=2)
    keys = [f"k{number}" for number in range(4000)]
    client.send_many("orders", [bytes(1000)] * 4000, keys=keys)
    stream = Stream(server=plait_broker.address)
    end = stream.reader.latestOffset(stream.offset, ReadAllAvailable())
    assert len(stream.reader.partitions(stream.offset, end)) == 2
    many = Stream(server=plait_broker.address, minPartitions=4)
    assert len(many.reader.partitions(stream.offset, end)) == 4


def test_a_reader_is_pickled_without_its_connections(place: dict[str, Any], client: Client):
    send(client, b"a")
    stream = Stream(**place)
    end = stream.reader.latestOffset(stream.offset, ReadAllAvailable())
    (partition,) = pickle.loads(pickle.dumps(list(stream.reader.partitions(stream.offset, end))))
    reader = pickle.loads(pickle.dumps(stream.reader))
    assert [row["body"] for batch in reader.read(partition) for row in batch.to_pylist()] == [b"a"]
    assert stream.reader.reportLatestOffset() == {"orders@g1": {"epoch": 1, "id": 1, "sequence": 1}}
    stream.reader.stop()


# --- lost messages ------------------------------------------------------------------------------


def test_a_recreated_subject_is_detected(place: dict[str, Any], client: Client):
    send(client, b"a", b"b")
    stream, lenient = Stream(**place), Stream(failOnDataLoss=False, **place)
    stream.step()
    lenient.step()
    client.admin.delete_subject("orders")
    send(client, b"c", b"d", b"e")
    with pytest.raises(DataLost, match="deleted and created again"):
        stream.step()
    assert lenient.bodies() == [b"c", b"d", b"e"]


def test_a_loss_is_reported_once_and_no_later_message_is_missed(
    plait_broker: BlockingBroker, client: Client, place: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    for body in (b"a", b"b", b"c"):
        send(client, body)
    stream = Stream(failOnDataLoss=False, **place)
    assert stream.bodies() == [b"a", b"b", b"c"]
    plait_broker.kill()
    lose_tail(plait_broker.data, 2)
    plait_broker.start()
    with caplog.at_level(logging.WARNING, "plait.spark"):
        assert [stream.bodies() for _ in range(3)] == [[], [], []]
    assert caplog.text.count("orders@g1 ends at 1: sequences 1 to 2 of epoch 1 are lost") == 2
    with plait.sync.connect(plait_broker.address) as another:
        send(another, b"d", b"e", b"f")
    assert stream.bodies() == [b"d", b"e", b"f"]


def test_a_batch_that_is_read_again_leaves_rewritten_sequences_to_the_next(
    plait_broker: BlockingBroker, client: Client, place: dict[str, Any]
):
    for body in (b"a", b"b", b"c"):
        send(client, body)
    stream = Stream(failOnDataLoss=False, **place)
    planned = stream.reader.latestOffset(stream.offset, ReadAllAvailable())
    plait_broker.kill()
    lose_tail(plait_broker.data, 2)
    plait_broker.start()
    with plait.sync.connect(plait_broker.address) as another:
        send(another, b"d", b"e", b"f")
    again = [row["body"] for row in stream.read(stream.offset, planned)]
    stream.offset = planned
    assert again + stream.all_bodies() == [b"a", b"d", b"e", b"f"]


def test_a_batch_that_is_read_again_has_no_rows_of_a_recreated_subject(place: dict[str, Any], client: Client):
    send(client, b"a", b"b")
    stream = Stream(failOnDataLoss=False, **place)
    planned = stream.reader.latestOffset(stream.offset, ReadAllAvailable())
    client.admin.delete_subject("orders")
    send(client, b"c", b"d", b"e")
    again = [row["body"] for row in stream.read(stream.offset, planned)]
    stream.offset = planned
    assert again + stream.all_bodies() == [b"c", b"d", b"e"]


def test_a_removed_partition_fails_the_query_or_causes_one_warning(
    plait_broker: BlockingBroker, client: Client, caplog: pytest.LogCaptureFixture
):
    client.send("orders", b"a")
    client.send("orders.eu", b"b")
    place = {"server": plait_broker.address, "subject": "orders*"}
    stream, lenient = Stream(**place), Stream(failOnDataLoss=False, **place)
    stream.step()
    lenient.step()
    client.admin.delete_subject("orders.eu")
    with pytest.raises(DataLost, match=r"orders\.eu@g1 is gone, with its messages from sequence 1 on"):
        stream.step()
    with caplog.at_level(logging.WARNING, "plait.spark"):
        assert [lenient.bodies() for _ in range(3)] == [[], [], []]
    assert caplog.text.count("orders.eu@g1 is gone") == 1
    client.send("orders", b"c")
    assert lenient.bodies() == [b"c"]


def test_messages_that_expired_unread_fail_the_query_or_are_skipped(tmp_path: Path):
    with EmbeddedBroker(tmp_path, clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", retention=60.0)
        client.send("orders", b"a")
        stream, lenient = Stream(server=broker.address), Stream(server=broker.address, failOnDataLoss=False)
        end = stream.reader.latestOffset(stream.offset, ReadAllAvailable())
        broker.advance(100.0)
        client.send("orders", b"b")
        with pytest.raises(DataLost, match="orders@g1 starts at 1: sequences 0 to 0 are expired"):
            stream.step()
        with pytest.raises(DataLost, match="expired"):
            stream.reader.partitions(stream.offset, end)
        assert lenient.bodies() == [b"b"]


def send_to_new_partitions(client: Client, count: int) -> None:
    """Send messages with keys until some go to each of three partitions."""
    keys = [f"k{number}" for number in range(count)]
    while len({str(r.partition) for r in client.send_many("orders", [b"new"] * count, keys=keys)}) < 3:
        pass


def test_expired_messages_of_a_partition_that_the_offset_does_not_name_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The partition was made while the query was stopped, so all of its messages were to be read."""
    with EmbeddedBroker(tmp_path, clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", retention=60.0)
        client.send("orders", b"a")
        stream = Stream(server=broker.address)
        assert stream.bodies() == [b"a"]
        client.admin.expand_subject("orders", 3)
        send_to_new_partitions(client, 20)
        lenient = Stream(stream.offset, server=broker.address, failOnDataLoss=False)
        broker.advance(100.0)
        client.send_many("orders", [b"later"] * 20, keys=[f"k{number}" for number in range(20)])
        with pytest.raises(DataLost, match=r"orders#\d@g1 starts at \d+: sequences 0 to \d+ are expired"):
            Stream(stream.offset, server=broker.address).step()
        assert {*lenient.bodies()} == {b"later"}
        assert lenient.bodies() == []
        # Once per partition, by planning and by reading.
        assert caplog.text.count("sequences 0 to") == 2


@pytest.mark.parametrize("begun", ["with the query", "later"])
def test_a_planned_batch_is_read_again_or_lost_but_never_empty(tmp_path: Path, begun: str):
    """Spark stores where a batch ends; it asks again where the first batch starts."""
    with EmbeddedBroker(tmp_path, clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", retention=60.0)
        if begun == "later":
            first = Stream(server=broker.address)
            start: Any = first.offset
            client.admin.expand_subject("orders", 3)
            send_to_new_partitions(client, 20)
            end = first.reader.latestOffset(start, ReadAllAvailable())
        else:
            client.send_many("orders", [b"a", b"b"])
            first = Stream(server=broker.address)
            end = first.reader.latestOffset(first.offset, ReadAllAvailable())
            start = None
        rows = first.read(first.offset, end)
        again = Stream(start, server=broker.address)
        assert again.read(again.offset, json.loads(json.dumps(end))) == rows != []
        broker.advance(100.0)
        after = Stream(start, server=broker.address)
        place = r"orders@g1" if begun == "with the query" else r"orders#\d@g1"
        with pytest.raises(DataLost, match=place + r" starts at \d+: sequences 0 to \d+ are expired"):
            after.reader.partitions(after.offset, end)
        lenient = Stream(start, server=broker.address, failOnDataLoss=False)
        assert lenient.read(lenient.offset, end) == []


@pytest.mark.parametrize("option", [{"endingOffsets": "latest"}, {"maxMessagesPerTrigger": "0"}])
def test_an_option_for_batch_reads_or_an_invalid_one_is_refused(place: dict[str, Any], option: dict[str, str]):
    with pytest.raises(InvalidArgument, match=f"{next(iter(option))}"):
        Stream(**place, **option)
    with pytest.raises(InvalidArgument, match="maxMessagesPerTrigger"):
        batch_reader(maxMessagesPerTrigger="5", **place)


# --- with Spark ---------------------------------------------------------------------------------


def test_spark_streams_available_messages_in_batches_and_continues_later(
    spark: SparkSession, place: dict[str, Any], client: Client, tmp_path: Path
):
    client.send_many("orders", [b"%d" % n for n in range(1000)], keys=[f"k{n % 10}" for n in range(1000)])
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def run(**trigger: bool) -> int:
        source = spark.readStream.format("plait").options(subject="orders", columns="sequence,body", **place)
        writer = source.option("maxMessagesPerTrigger", 400).load().writeStream
        query = writer.option("checkpointLocation", checkpoint).trigger(**trigger).start(out, "parquet")
        assert query.awaitTermination(60)
        return len([batch for batch in query.recentProgress if batch.numInputRows])

    assert run(availableNow=True) == 3
    client.send_many("orders", [b"%d" % n for n in range(1000, 1100)])
    assert run(availableNow=True) == 1
    # One batch, whatever the limit.
    client.send_many("orders", [b"%d" % n for n in range(1100, 2000)])
    assert run(once=True) == 1
    rows = spark.read.parquet(out).orderBy("sequence").collect()
    assert [(row.sequence, bytes(row.body)) for row in rows] == [(n, b"%d" % n) for n in range(2000)]


def test_a_partition_that_was_read_completely_and_emptied_by_retention_leaves_the_query(tmp_path: Path):
    with EmbeddedBroker(tmp_path, clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", retention=60.0)
        client.send("orders", b"a")
        client.admin.expand_subject("orders", ["orders#1@g1"])
        while client.admin.route("orders").moving:
            pass
        client.send("orders", b"b")
        behind, stream = Stream(server=broker.address), Stream(server=broker.address)
        assert sorted(stream.bodies()) == [b"a", b"b"]
        assert stream.offset["orders@g1"]["sealed"] == 1
        broker.advance(100.0)
        while len(client.admin.route("orders").partitions) > 1:
            broker.advance(1.0)
        client.send("orders", b"c")
        # A query that was stopped meanwhile continues from its checkpoint.
        again = Stream(stream.offset, server=broker.address)
        assert stream.bodies() == again.bodies() == [b"c"]
        assert stream.offset.keys() == {"orders#1@g1"}
        with pytest.raises(DataLost, match=r"orders@g1 is gone, with its messages from sequence 0 on"):
            behind.step()
