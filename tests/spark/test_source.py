"""``format("plait")``: messages as rows of a DataFrame.

Most tests use the reader's classes alone; a few use a real session, for what Spark adds: types, filters, errors, tasks.
"""

from __future__ import annotations

import pickle
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from xxhash import xxh3_64_intdigest

import plait.sync
from plait.client.send.open_rows import hash_keys
from plait.client.types import MessageId
from plait.errors import DamageError, DataDirError, FrameError, InvalidArgument, SubjectNotFound
from plait.storage.disk import RealDisk
from plait.storage.reading.log_chunks import WantedRows
from tests.support.broker_node import Node, Producer

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from plait.spark.source import spark_columns as columns_module
from plait.spark.source.data_source import PlaitDataSource
from plait.spark.source.filters import narrow
from plait.spark.source.spark_columns import COLUMNS
from tests.spark.support import batch_reader, batches_of, column, fill, rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# --- columns ------------------------------------------------------------------------------------


def test_every_column_has_what_the_client_sent_and_its_receipt(client: plait.sync.Client, place: dict[str, Any]):
    before = datetime.now(UTC)
    headers = {"city": "BJS", "amount": 5, "rate": 0.5, "paid": True}
    receipts = [
        client.send("orders", b"plain"),
        client.send("orders", b"full", key="order-1", tags=["new", "größer"], headers=headers),
        client.send("orders", b"", key=17),
    ]
    rows = rows_of(batch_reader(**place))
    assert [row["message_id"] for row in rows] == [str(receipt.message_id) for receipt in receipts]
    assert [row["partition"] for row in rows] == [str(receipt.partition) for receipt in receipts]
    assert [row["sequence"] for row in rows] == [0, 1, 2]
    assert [row["subject"] for row in rows] == ["orders"] * 3
    assert [row["body"] for row in rows] == [b"plain", b"full", b""]
    assert [row["key"] for row in rows] == [None, "order-1", "17"]
    assert [row["tags"] for row in rows] == [None, ["new", "größer"], None]
    texts = [("city", "BJS"), ("amount", "5"), ("rate", "0.5"), ("paid", "true")]
    assert [row["headers"] for row in rows] == [None, texts, None]
    slots = [None, xxh3_64_intdigest(b"order-1") % 1024, xxh3_64_intdigest(b"17") % 1024]
    assert [row["logical_partition"] for row in rows] == slots
    for row in rows:
        assert before <= row["send_time"] <= row["store_time"] <= datetime.now(UTC)


def test_the_columns_of_a_batch_are_those_that_spark_expects(tmp_path: Path):
    fill(tmp_path, [b"a"])
    reader = batch_reader(path=tmp_path)
    schema = PlaitDataSource({"path": str(tmp_path), "subject": "orders"}).schema()
    assert schema.names == list(COLUMNS)
    (batch,) = batches_of(reader)
    assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))


COLUMN_SETS: list[dict[str, Any]] = [
    {},
    {"send_time": 1_700_000_000_000_000},
    {"keys": ["k1", "", "k3"], "key_hashes": hash_keys(["k1", "", "k3"], 3)},
    {"tags": [b"\x1fa\x1f", b"", b"\x1fb\x1fc\x1f"]},
    {"headers": [b"", b"\x81\xa1a\x01", b""], "compression": "zstd"},
]


@pytest.mark.parametrize("together", [True, False])
def test_frames_with_different_columns_give_the_same_rows_whether_joined_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
):
    if not together:
        monkeypatch.setattr(columns_module, "BATCH_COUNT", 1)
    node = Node(RealDisk(tmp_path), message_segment_size=1 << 20)
    producer = Producer(0xABC)
    for columns in COLUMN_SETS:
        node.submit(producer.frame("orders", b"x" * 600, b"", b"z", **columns))
        node.turn()
    node.broker.stop()
    batches = batches_of(batch_reader(path=tmp_path))
    assert len(batches) == (1 if together else len(COLUMN_SETS))
    table = pa.Table.from_batches(batches)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    none = [None] * 3
    assert columns["sequence"] == list(range(15))
    assert columns["body"] == [b"x" * 600, b"", b"z"] * 5
    assert columns["message_id"] == [str(MessageId(0xABC, number)) for number in range(1, 16)]
    assert columns["key"] == [*none, *none, "k1", None, "k3", *none, *none]
    assert columns["tags"] == [*none * 3, ["a"], None, ["b", "c"], *none]
    assert columns["headers"] == [*none * 4, None, [("a", "1")], None]
    sent = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert columns["send_time"] == [*none, sent, sent, sent, *none * 3]
    slots = [xxh3_64_intdigest(key) % 1024 for key in (b"k1", b"k3")]
    assert columns["logical_partition"] == [*none * 2, slots[0], None, slots[1], *none * 2]


def test_message_ids_of_a_frame_with_many_producers_are_correct(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    ids = []
    producers = [Producer(number) for number in (1, 0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF)]
    for _ in range(4):
        for producer in producers:
            ids.append(str(MessageId(producer.id, producer.next)))
            node.submit(producer.frame("orders", b"x"))
    node.turn()
    assert len(node.partition("orders").consume_log) == 1
    node.broker.stop()
    assert column("message_id", path=tmp_path) == ids


def test_small_frames_are_joined_and_large_ones_are_not_when_few_columns_are_read(tmp_path: Path):
    fill(tmp_path, *([b"x"] * count for count in [*[100] * 82, 2500, 2500, 100]))

    def counts(**options: str) -> list[int]:
        return [batch.num_rows for batch in batches_of(batch_reader(path=tmp_path, minPartitions=1, **options))]

    assert counts(columns="body") == [8200, 2500, 2500, 100]
    assert counts() == [8200, 5100]


def test_a_frame_of_very_many_rows_is_returned_in_parts(tmp_path: Path):
    fill(tmp_path, [b"x"] * 150_000)
    batches = batches_of(batch_reader(path=tmp_path, columns="sequence"))
    assert max(batch.num_rows for batch in batches) <= 65_536
    assert pa.Table.from_batches(batches).column("sequence").to_pylist() == list(range(150_000))


def test_rows_that_do_not_decode_are_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path, [b"a"])

    def broken(*_: Any) -> None:
        raise FrameError("a row is not UTF-8")

    monkeypatch.setitem(columns_module.COLUMNS, "key", COLUMNS["key"]._replace(build=broken))
    with pytest.raises(DamageError, match=r"\.log is damaged.*a row is not UTF-8.*plait doctor"):
        column("key", path=tmp_path)


@pytest.mark.parametrize("malformed", [b"\xc1", b"hello", b"\x81\xa1\xff\x01", b"\x81\xa1a\xc0", b"\x81\xa0\x01"])
def test_malformed_headers_are_shown_as_such_and_do_not_affect_other_rows(tmp_path: Path, malformed: bytes):
    fill(tmp_path, [b"a", b"b", b"c"], headers=[b"\x81\xa1n\x01", malformed, b"\x80"])
    found = rows_of(batch_reader(path=tmp_path))
    assert [row["body"] for row in found] == [b"a", b"b", b"c"]
    assert [row["headers"] for row in found] == [[("n", "1")], [("plait-unreadable", malformed.hex())], []]


SERVER = {"path": "", "server": "plait://127.0.0.1:1"}

# --- options ------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Three subjects in turns, in several segments."""
    node = Node(RealDisk(tmp_path))
    for number in range(150):
        node.clock.advance(1.0)
        node.send(("orders", "orders.eu", "refunds")[number % 3], b"%d" % number)
    node.broker.create_subject("empty")
    node.turn()
    node.broker.stop()
    assert len(list((tmp_path / "message").iterdir())) > 2
    return tmp_path


@pytest.mark.parametrize(
    ("subject", "subjects"),
    [
        ("orders", {"orders"}),
        ("orders, refunds", {"orders", "refunds"}),
        ("orders*", {"orders", "orders.eu"}),
        ("refunds,orders.*", {"orders.eu", "refunds"}),
        ("*", {"orders", "orders.eu", "refunds"}),
    ],
)
def test_subjects_are_selected_by_name_list_or_prefix(stored: Path, subject: str, subjects: set[str]):
    assert Counter(column("subject", path=stored, subject=subject)) == dict.fromkeys(subjects, 50)


def test_option_names_are_case_insensitive(stored: Path):
    source = PlaitDataSource({"PATH": str(stored), "Subject": "orders", "COLUMNS": "body"})
    assert source.schema().names == ["body"]


def test_columns_are_read_in_the_requested_order_and_the_group_is_part_of_a_partitions_name(stored: Path):
    row = {"body": b"0", "partition": "orders@g1", "sequence": 0}
    (first, *_) = rows_of(batch_reader(path=stored, columns="body, partition, sequence"))
    assert list(first.items()) == list(row.items())
    assert column("partition", path=stored, group="east")[0] == "orders@east"
    source = PlaitDataSource({"PATH": str(stored), "Subject": "orders", "COLUMNS": "body"})
    assert source.schema().names == ["body"], "option names are case-insensitive"


def test_more_partitions_are_planned_on_request(tmp_path: Path):
    fill(tmp_path, *[[bytes(1024)] * 512] * 12)
    for wanted in (1, 2, 4):
        reader = batch_reader(path=tmp_path, minPartitions=wanted, columns="sequence")
        assert len(reader.partitions()) == wanted
        assert [row["sequence"] for row in rows_of(reader)] == list(range(12 * 512))


def test_a_subject_without_messages_has_no_rows(stored: Path):
    reader = batch_reader(path=stored, subject="empty")
    assert list(reader.partitions()) == []
    assert list(reader.read(InputPartition(None))) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "option 'path' is missing"),
        ({"path": "file://data"}, "path 'file://data' names a host; a local path is file:///data"),
        ({"subject": " "}, "option 'subject' is missing"),
        ({"subject": "no spaces"}, "'no spaces' is not allowed"),
        ({"columns": "body,nothing"}, "unknown column 'nothing'; the columns are subject, partition"),
        ({"columns": "body,body"}, "name a column twice"),
        ({"minPartitions": "0"}, "minPartitions '0'"),
        ({"minPartitions": "many"}, "minPartitions 'many'"),
        ({"failOnDamage": "perhaps"}, "failOnDamage 'perhaps' is neither"),
        ({"group": "a b"}, "group name 'a b'"),
        ({"subjects": "orders"}, "unknown option 'subjects'; the options are path, server, subject"),
        ({"bytesPerSecond": "5"}, "'bytesPerSecond' does not apply to 'path'"),
        ({"server": "plait://127.0.0.1:1"}, "options 'path' .* and 'server' .* exclude each other"),
        ({**SERVER, "group": "g2"}, "option 'group' does not apply to 'server'"),
        ({**SERVER, "server": "no address/"}, "'no address/' is not understood"),
        ({**SERVER, "bytesPerSecond": "fast"}, "bytesPerSecond 'fast' is not a whole number"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss 'maybe' is neither"),
        ({"maxBytesPerTrigger": "5"}, "'maxBytesPerTrigger' is for readStream"),
        ({"startingOffsets": "yesterday"}, "invalid startingOffsets 'yesterday'; use earliest"),
        ({"startingOffsets": "{"}, "startingOffsets '{' is not JSON"),
        ({"endingOffsets": '{"orders": 5}'}, "endingOffsets names 'orders'; give the name of a partition"),
        ({"endingOffsets": '{"orders@g1": -1}'}, "invalid offset -1 of 'orders@g1' .*>= 0"),
        ({"endingOffsets": '{"orders@g1": {"seq": 1}}'}, "invalid offset .* use a sequence or"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_is_valid(stored: Path, options: dict[str, str], message: str):
    with pytest.raises(InvalidArgument, match=message):
        batch_reader(**{"path": stored, **options})


def test_a_path_may_be_a_file_uri(stored: Path):
    expected = rows_of(batch_reader(path=stored))
    place = stored / "a b#c"
    place.symlink_to(stored)
    for uri in (place.as_uri(), f"file:{place}", f"file://localhost{place}"):
        assert rows_of(batch_reader(path=uri)) == expected
    with pytest.raises(DataDirError, match="there is no directory"):
        batch_reader(path=f"{place.as_uri()}/nowhere")


def test_an_unreadable_path_is_reported_before_planning(tmp_path: Path):
    for path, message in ((tmp_path / "nowhere", "there is no directory"), (tmp_path, "not a Plait data directory")):
        with pytest.raises(DataDirError, match=message):
            batch_reader(path=path)


def test_an_unknown_subject_is_an_error_that_lists_the_known_ones(stored: Path):
    with pytest.raises(SubjectNotFound, match=r"'order' is not in .*there are empty, orders, orders.eu, refunds"):
        batch_reader(path=stored, subject="order").partitions()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (StructType().add("nothing", "string"), "unknown column 'nothing'"),
        (StructType().add("body", "string"), "column 'body' is binary, not string"),
        (StructType().add("key", "string", nullable=False), "column 'key' can be null"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(stored: Path, schema: StructType, message: str):
    with pytest.raises(InvalidArgument, match=message):
        PlaitDataSource({"path": str(stored), "subject": "orders"}).reader(schema)


# --- filters ------------------------------------------------------------------------------------

TIME = datetime(2023, 11, 14, 22, 14, 0, 123456, tzinfo=UTC)
MICROS = 1_700_000_040_123_456


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (EqualTo(("subject",), "a"), {"subjects_only": frozenset({"a"})}),
        (In(("subject",), ("a", "b")), {"subjects_only": frozenset({"a", "b"})}),
        (EqualTo(("partition",), "a@g1"), {"partitions_only": frozenset({"a"})}),
        (EqualTo(("partition",), "a@g2"), {"partitions_only": frozenset()}),
        (EqualTo(("sequence",), 7), {"sequence_min": 7, "sequence_max": 7}),
        (In(("sequence",), (9, 7)), {"sequence_min": 7, "sequence_max": 9}),
        (GreaterThan(("sequence",), 7), {"sequence_min": 8}),
        (GreaterThanOrEqual(("sequence",), 7), {"sequence_min": 7}),
        (LessThan(("sequence",), 7), {"sequence_max": 6}),
        (LessThanOrEqual(("sequence",), 7), {"sequence_max": 7}),
        (GreaterThan(("store_time",), TIME), {"time_min": MICROS + 1}),
        (LessThanOrEqual(("store_time",), TIME), {"time_max": MICROS}),
        (EqualTo(("send_time",), TIME), {}),
        (EqualTo(("key",), "a"), {"keys": frozenset({"a"})}),
        (In(("key",), ("a", None)), {"keys": frozenset({"a"})}),
        (EqualNullSafe(("key",), None), {}),
        (EqualTo(("message_id",), "00000000000000ff-7"), {"message_ids": frozenset({(255, 7)})}),
        (EqualTo(("message_id",), "ff-7"), {"message_ids": frozenset()}),
        (EqualTo(("sequence",), None), {}),
        (Not(EqualTo(("sequence",), 7)), {}),
        (GreaterThan(("store_time",), TIME.replace(tzinfo=None)), {}),
    ],
)
def test_a_filter_becomes_bounds_for_reading(condition: Filter, expected: dict[str, Any]):
    narrowed = narrow(WantedRows(), condition, "g1")
    assert narrowed == WantedRows(**expected)


def test_filters_narrow_each_other_and_never_widen():
    wanted = WantedRows()
    for condition in (
        GreaterThan(("sequence",), 5),
        GreaterThan(("sequence",), 3),
        LessThan(("sequence",), 9),
        LessThan(("sequence",), 90),
        In(("subject",), ("a", "b")),
        In(("subject",), ("b", "c")),
    ):
        wanted = narrow(wanted, condition, "g1")
    assert (wanted.sequence_min, wanted.sequence_max, wanted.subjects_only) == (6, 8, frozenset({"b"}))


def test_filtered_rows_are_not_read_and_spark_still_applies_the_filters(stored: Path):
    reader = batch_reader(path=stored, columns="sequence", minPartitions=1)
    # In the middle of the first segment, because a chunk is in one segment.
    filters: list[Filter] = [GreaterThanOrEqual(("sequence",), 10), LessThan(("sequence",), 12)]
    assert list(reader.pushFilters(filters)) == filters
    travelled = pickle.loads(pickle.dumps(reader))
    (partition,) = pickle.loads(pickle.dumps(list(travelled.partitions())))
    rows = [row["sequence"] for batch in travelled.read(partition) for row in batch.to_pylist()]
    assert rows == [10, 11]


# --- with Spark ---------------------------------------------------------------------------------


def load(spark: SparkSession, path: Path, **options: Any) -> DataFrame:
    return spark.read.format("plait").options(**{"subject": "orders", **options}).load(str(path))


def test_spark_reads_what_a_live_server_has_stored(
    spark: SparkSession, client: plait.sync.Client, place: dict[str, Any]
):
    keys = [f"order-{number % 100}" for number in range(20_000)]
    receipts = client.send_many("orders", [b"body %d" % n for n in range(20_000)], keys=keys)
    receipt = client.send("orders", b"last", tags=["a", "b"], headers={"n": 1})

    def frame(**options: Any) -> DataFrame:
        return spark.read.format("plait").options(subject="orders", minPartitions=3, **place, **options).load()

    table = frame(columns="sequence,message_id,key,body").orderBy("sequence").toArrow()
    (row,) = frame().where("sequence = 20000").collect()
    assert frame().where("key = 'order-42'").count() == 200
    client.send("orders", b"later")
    assert frame().count() == 20_002
    with pytest.raises(AnalysisException, match=r"sequences 20002 to 20009 are missing.*failOnDataLoss=false"):
        frame(endingOffsets='{"orders@g1": 20010}').count()
    assert table.column("sequence").to_pylist() == list(range(20_001))
    assert table.column("body").to_pylist() == [*[b"body %d" % n for n in range(20_000)], b"last"]
    assert table.column("key").to_pylist() == [*keys, None]
    ids = [str(receipt.message_id) for receipt in [*receipts, receipt]]
    assert table.column("message_id").to_pylist() == ids
    assert (row.tags, row.headers, bytes(row.body)) == (["a", "b"], {"n": "1"}, b"last")
    assert abs(row.store_time.astimezone(UTC) - datetime.now(UTC)) < timedelta(minutes=5)


def test_spark_filters_subjects_sequences_and_times(spark: SparkSession, stored: Path):
    frame = load(spark, stored, subject="*")
    assert frame.where("subject = 'refunds' and sequence between 10 and 12").count() == 3
    assert frame.where(F.col("partition").isin("orders@g1", "orders.eu@g1")).count() == 100
    middle = frame.where("subject = 'orders'").orderBy("sequence").collect()[25].store_time
    assert frame.where((F.col("subject") == "orders") & (F.col("store_time") >= middle)).count() == 25
    assert frame.where("sequence > 1000").count() == 0


def test_spark_takes_a_schema_for_columns(spark: SparkSession, stored: Path):
    frame = spark.read.format("plait").schema("body binary, sequence bigint").option("subject", "orders")
    assert frame.load(str(stored)).where("sequence = 1").collect()[0].body == b"3"
    assert load(spark, stored, subject="empty").count() == 0


def test_spark_shows_errors(spark: SparkSession, stored: Path):
    with pytest.raises(AnalysisException, match="option 'subject' is missing"):
        spark.read.format("plait").load(str(stored))
    with pytest.raises(AnalysisException, match="subject 'gone' is not in"):
        load(spark, stored, subject="gone").count()


def test_spark_fails_on_damage_or_skips_it(spark: SparkSession, stored: Path):
    path = sorted((stored / "message").iterdir())[0]
    data = bytearray(path.read_bytes())
    # A frame in the middle of the written part of the segment.
    place = data.index(b"PL", len(data.rstrip(b"\0")) // 2)
    data[place + 90] ^= 0xFF
    path.write_bytes(data)
    subjects = {"subject": "*", "columns": "body"}
    with pytest.raises(PythonException, match=rf"{path.name} is damaged.*plait doctor"):
        load(spark, stored, **subjects).count()
    assert load(spark, stored, failOnDamage=False, **subjects).count() == 149
