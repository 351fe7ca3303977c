"""``where``, ``tags`` and headers as columns: the rows of an unfiltered read, from files, brokers and archives."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import plait.sync
from plait.errors import DamageError, DataLost, InvalidArgument, InvalidFilter
from plait.filter.message_filter import compile_filter
from plait.limits import FILTER_NODES_MAX
from plait.model.filter_terms import filter_terms
from plait.testing import EmbeddedBroker, ManualClock
from plait.testing.embedded_broker import BlockingBroker
from tests.filter.test_conditions import Draw, frame_of
from tests.frame.samples import small_blocks

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    Not,
    StringContains,
)
from pyspark.sql.types import IntegerType, StringType, StructType

from plait.client.read import range_scan
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving import file_writer
from plait.spark.inputs.parquet_files import OpenFile
from plait.spark.source.data_source import PlaitDataSource
from plait.spark.source.filters import condition_of, joined_filter
from tests.spark.archives import archive_here, damage, run_here
from tests.spark.pushed_filters import HEADERS, KINDS, TAGS, compare_pushed, drawn_rows
from tests.spark.support import Stream, batch_reader, bodies, fill, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Sent(NamedTuple):
    """The messages of a data directory, an archive of them, and a broker that serves them."""

    rows: list[dict[str, Any]]
    tags: list[list[str]]
    keys: list[str | None]
    places: dict[str, dict[str, Any]]

    def matching(self, where: str | None, tags: list[str] | None) -> set[bytes]:
        """The bodies that a filter wants, each examined in a frame of its own."""
        terms = filter_terms(where, tags)
        assert terms is not None
        found = compile_filter(terms)
        return {
            b"%d" % number
            for number, row in enumerate(self.rows)
            if found.rows(frame_of([row], [self.keys[number] or ""], [self.tags[number]]))[0]
        }


@pytest.fixture(scope="module", params=["few names", "many names"])
def sent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sent]:
    """Messages in frames with header blocks, with maps, and compressed; with names that no column has."""
    draw, chance, root = Draw(7), random.Random(7), tmp_path_factory.mktemp("filters")
    count = 700
    rows = drawn_rows(draw, chance, count, many_names=request.param == "many names")
    tags = [chance.sample(TAGS, chance.randrange(3)) for _ in range(count)]
    keys = [chance.choice((None, f"order-{chance.randrange(9)}", "größe")) for _ in range(count)]
    with EmbeddedBroker(root / "data") as broker, pytest.MonkeyPatch.context() as patch:
        start = 0
        with small_blocks(16):
            while start < count:
                end = min(start + chance.choice((1, 3, 40, 120)), count)
                with plait.sync.connect(broker.address, compression=chance.choice((None, None, "zstd"))) as client:
                    part = slice(start, end)
                    client.send_many(
                        "orders",
                        [b"%d" % number for number in range(start, end)],
                        keys=keys[part],
                        tags=tags[part],
                        headers=rows[part],
                    )
                start = end
        patch.setattr(archiving, "run_job", run_here)
        patch.setattr(file_writer, "ROW_GROUP_COUNT", 64)
        archive_here(root / "data", root / "archive", now=True)
        places = {"files": {"path": root / "data"}, "archive": {"path": root / "archive"}}
        yield Sent(rows, tags, keys, places | {"broker": {"server": broker.address}})


PLACES = pytest.mark.parametrize("place", ["files", "broker", "archive"])


# --- options ------------------------------------------------------------------------------------


@PLACES
def test_generated_conditions_choose_the_rows_that_match_alone(sent: Sent, place: str, seed: int):
    draw, chance = Draw(seed + 50), random.Random(f"{seed} {place}")
    fields = ("key LIKE 'order-%'", "key IS NULL", "'new' IN tags", '"a b" > 1', "any = 5", "any IS NOT NULL")
    fields += ("n3 = 1", "n3 IS NULL", "store_time >= TIMESTAMP '2020-01-01'", "send_time > store_time", "any >= 0.5")
    for number in range(25):
        where = chance.choice(
            (draw.condition(), f"({draw.condition()}) AND {chance.choice(fields)}", fields[number % 11])
        )
        tags = chance.choice((None, None, ["new"], ["big", "größer"]))
        options = {} if tags is None else {"tags": " , ".join(tags)}
        found = bodies(where=where, **options, **sent.places[place])
        assert len(found) == len(set(found)), where
        assert set(found) == sent.matching(where, tags), where


@PLACES
def test_a_filtered_row_has_the_columns_of_an_unfiltered_read(sent: Sent, place: str):
    where, options = "city = 'BJS' OR any > 3", {"headers": HEADERS, **sent.places[place]}
    wanted = sent.matching(where, ["new", "newer"])
    every = rows_of(batch_reader(**options))
    found = rows_of(batch_reader(where=where, tags="new,newer", **options))
    assert 0 < len(found) < 300
    assert found == [row for row in every if row["body"] in wanted]


@PLACES
def test_header_columns_have_the_values_of_their_type(sent: Sent, place: str):
    fits: dict[str, Callable[[Any], Any]] = {
        "string": lambda value: value if type(value) is str else None,
        "boolean": lambda value: value if type(value) is bool else None,
        "bigint": lambda value: value if type(value) is int and value < 1 << 63 else None,
        "double": lambda value: float(value) if type(value) in (int, float) and value == value else None,
    }
    rows = rows_of(batch_reader(columns="body,header_x", headers=HEADERS, **sent.places[place]))
    assert len(rows) == len(sent.rows)
    others = [f"header_{each.rpartition(':')[0].strip()}" for each in HEADERS.split(",")[:-1]]
    assert list(rows[0]) == ["body", "header_x", *others]
    for row in rows:
        given = sent.rows[int(row["body"])]
        for name, kind in KINDS.items():
            expected = fits[kind](given.get(name))
            assert (row[f"header_{name}"], type(row[f"header_{name}"])) == (expected, type(expected)), (name, given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "city = "}, r"not understood at character 8.*the end"),
        ({"where": "amount > 5 AND"}, r"at character 15"),
        ({"where": " "}, "is not a condition"),
        ({"where": " OR ".join(["a"] * FILTER_NODES_MAX)}, "FILTER_NODES_MAX"),
        ({"tags": "new,,big"}, "tag"),
        ({"headers": "city"}, "headers 'city' has 'city'; write the name and the type"),
        ({"headers": "city:text"}, "with the types string, bigint"),
        ({"headers": "city:string,"}, "has ''"),
        ({"headers": "City:string,city:long"}, "names 'city' twice"),
        ({"columns": "body,header_city"}, "unknown column 'header_city'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_place(tmp_path: Path, options: dict[str, str], message: str):
    fill(tmp_path, [b"a"])
    with pytest.raises(InvalidArgument, match=message) as caught:
        batch_reader(path=tmp_path, **options)
    if "character" in message:
        assert isinstance(caught.value, InvalidFilter)
        assert "position" in caught.value.details


def test_a_schema_may_have_header_columns(sent: Sent):
    source = PlaitDataSource({"path": str(sent.places["files"]["path"]), "subject": "orders"})
    reader = source.reader(StructType().add("header_types", "string").add("header_amount", "double"))
    amounts = [row["header_amount"] for row in rows_of(reader)]
    assert amounts == [None if (n := row.get("amount")) is None else float(n) for row in sent.rows]
    for kind, nullable in ((IntegerType(), True), (StringType(), False)):
        with pytest.raises(
            InvalidArgument, match=r"column 'header_city' is .*; a header is a nullable column of one of"
        ):
            source.reader(StructType().add("header_city", kind, nullable))


# --- filters that Spark pushes down -------------------------------------------------------------


@PLACES
def test_generated_filters_give_the_rows_of_an_unfiltered_read(sent: Sent, place: str, seed: int):
    skipped = compare_pushed(seed, 60, **sent.places[place])
    # Most of the rows that do not match are not read.
    assert skipped > 60 * len(sent.rows) // 3


SCHEMA = pa.schema(
    {"header_city": pa.string(), "header_amount": pa.int64(), "header_rate": pa.float64(), "key": pa.string()}
)


@pytest.mark.parametrize(
    ("pushed", "expected"),
    [
        (EqualTo(("header_city",), "it's"), "\"city\" = 'it''s'"),
        (In(("header_amount",), (1, -2)), '"amount" IN (1, -2)'),
        (Not(LessThan(("header_rate",), 0.5)), 'NOT ("rate" < 0.5)'),
        (StringContains(("key",), "50%_!"), "key LIKE '%50!%!_!!%' ESCAPE '!'"),
        (IsNotNull(("header_city",)), '"city" IS NOT NULL'),
        # These may match rows in which the column is null, or rows that a condition compares otherwise.
        (IsNull(("header_city",)), None),
        (Not(IsNotNull(("header_city",))), None),
        (Not(EqualNullSafe(("header_city",), "x")), None),
        (EqualNullSafe(("header_city",), None), None),
        (Not(In(("header_amount",), (1, None))), None),
        (GreaterThan(("header_rate",), float("nan")), None),
        (EqualTo(("header_rate",), float(1 << 53)), None),
        (EqualTo(("body",), b"x"), None),
        (IsNotNull(("headers",)), None),
        (EqualTo(("header", "city"), "x"), None),
    ],
)
def test_a_pushed_filter_becomes_a_condition(pushed: Filter, expected: str | None):
    assert condition_of(pushed, SCHEMA) == expected


def test_a_pushed_filter_that_exceeds_the_limits_is_left_to_spark():
    known = filter_terms("a = 1 OR b = 2", ["new"])
    large = In(("header_amount",), tuple(range(FILTER_NODES_MAX)))
    found = joined_filter(known, [large, EqualTo(("header_amount",), 5)], SCHEMA)
    assert found is not None
    assert found.where == '(a = 1 OR b = 2) AND "amount" = 5'
    assert found.tags.any == ("new",)
    assert joined_filter(None, [large], SCHEMA) is None


# --- inputs -------------------------------------------------------------------------------------


def test_few_rows_of_many_frames_are_one_batch(tmp_path: Path):
    rows = [{"a": number} for number in range(100)]
    with EmbeddedBroker(tmp_path) as broker, plait.sync.connect(broker.address) as client:
        for _ in range(20):
            client.send_many("orders", [b"x"] * 100, headers=rows)
        for place in ({"path": tmp_path}, {"server": broker.address}):
            reader = batch_reader(where="a = 7", minPartitions=1, **place)
            (partition,) = reader.partitions()
            assert [batch.num_rows for batch in reader.read(partition)] == [20]


def test_row_groups_without_a_match_are_not_read(sent: Sent, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    whole = OpenFile.groups

    def counted(opened: OpenFile, limits: Any) -> list[int]:
        groups = whole(opened, limits)
        iterate = opened.parquet.iter_batches
        monkeypatch.setattr(opened, "parquet", _Counting(opened.parquet, iterate, read))
        return groups

    monkeypatch.setattr(OpenFile, "groups", counted)
    assert bodies(where="nothing = 1", **sent.places["archive"]) == []
    assert read == []
    (one,) = sorted(sent.matching("key = 'order-3' AND store_time >= send_time", None))[:1]
    assert one in bodies(where="key = 'order-3' AND store_time >= send_time", **sent.places["archive"])
    # The files are sorted by key.
    assert len(read) < 5


class _Counting:
    """A Parquet file that records which row groups are read with all columns."""

    def __init__(self, parquet: Any, iterate: Any, read: list[int]) -> None:
        self._parquet, self._iterate, self._read = parquet, iterate, read

    def iter_batches(self, count: int, groups: list[int], columns: list[str]) -> Any:
        self._read += groups
        return self._iterate(count, groups, columns=columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parquet, name)


def test_a_broker_sends_only_the_rows_that_match(sent: Sent, monkeypatch: pytest.MonkeyPatch):
    received: list[int] = []
    decode = range_scan.frames_in

    def counted(payload: memoryview) -> Any:
        frames = list(decode(payload))
        received.extend(frame.count for frame in frames)
        return frames

    monkeypatch.setattr(range_scan, "frames_in", counted)
    found = bodies(where="city = 'BJS'", **sent.places["broker"])
    assert len(found) == sum(received) < len(sent.rows) / 2


@pytest.mark.parametrize("where", ["amount >= 0", "amount = 25"])
def test_damage_at_the_broker_is_found_with_a_filter(tmp_path: Path, where: str):
    with EmbeddedBroker(tmp_path) as broker:
        with plait.sync.connect(broker.address) as client:
            for number in range(30):
                client.send("orders", b"%d" % number, headers={"amount": number})
        broker.stop()
        (segment,) = [path for path in (tmp_path / "message").iterdir() if path.stat().st_blocks]
        damage(segment, 6000)
        broker.start()
        for place in ({"server": broker.address}, {"path": tmp_path}):
            with pytest.raises(DamageError, match="orders@g1 .*sequences" if "server" in place else "is damaged"):
                bodies(where=where, **place)
            found = bodies(where=where, failOnDamage=False, **place)
            assert len(found) == (29 if ">=" in where else 1)


def test_expired_messages_are_lost_messages_with_a_filter(tmp_path: Path):
    with EmbeddedBroker(tmp_path, clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", retention=60.0)
        client.send_many("orders", [b"old"] * 20, headers={"amount": 1})
        reader = batch_reader(server=broker.address, where="amount = 2")
        partitions = reader.partitions()
        broker.advance(600.0)
        client.send_many("orders", [b"new"] * 3, headers={"amount": 2})
        with pytest.raises(DataLost, match="sequences 0 to 19 of orders@g1 were removed by retention"):
            list(reader.read(partitions[0]))


# --- streams and Spark --------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["files", "broker"])
def test_a_stream_advances_past_rows_that_do_not_match(sent: Sent, place: str):
    where, options = "amount > 2", {"maxMessagesPerTrigger": 90, **sent.places[place]}
    filtered, every = Stream(where=where, tags="new", **options), Stream(**options)
    wanted, found = sent.matching(where, ["new"]), []
    for _ in range(-(-len(sent.rows) // 90)):
        before = filtered.offset
        rows = filtered.step()
        expected = [row for row in every.step() if row["body"] in wanted]
        assert (filtered.offset, rows) == (every.offset, expected)
        assert filtered.read(before, filtered.offset) == rows
        found += rows
    assert {row["body"] for row in found} == wanted
    assert filtered.step() == []


@PLACES
def test_spark_gives_the_same_rows_with_and_without_filters_in_the_source(spark: SparkSession, sent: Sent, place: str):
    options = {name: str(value) for name, value in sent.places[place].items()}

    def load(**more: str) -> Any:
        return (
            spark.read.format("plait").options(subject="orders", columns="body,headers,tags", **options, **more).load()
        )

    expected = {
        b"%d" % number
        for number, row in enumerate(sent.rows)
        if row.get("city") == "BJS" and isinstance(row.get("price"), int | float) and row["price"] > 0.5
    }
    assert expected
    typed = load(headers="city:string,price:double").where("header_city = 'BJS' and header_price > 0.5")
    by_map = load().where("headers['city'] = 'BJS' and double(headers['price']) > 0.5 and not isnan(headers['price'])")
    by_option = load(where="city = 'BJS' AND price > 0.5")
    for frame in (typed, by_map, by_option):
        assert {bytes(row.body) for row in frame.collect()} == expected
    tagged = load().where(F.array_contains("tags", "new"))
    assert load(tags="new").count() == tagged.count() > 0


def test_the_examples_of_the_documentation_run(
    spark: SparkSession, plait_broker: BlockingBroker, client: plait.sync.Client
):
    client.send("order.book", b"1", tags=["new"], headers={"city": "BJS", "amount": 100})
    client.send("order.book", b"2", tags=["old"], headers={"city": "BJS", "amount": 99})
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    examples = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "assert" in each]
    assert len(examples) == 2
    for source in examples:
        exec(source.replace("plait://127.0.0.1:7450", plait_broker.address), {"spark": spark})
