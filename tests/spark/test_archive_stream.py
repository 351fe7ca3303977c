"""``readStream`` of a growing archive: every row once, while compaction replaces files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plait.clock import ManualClock
from plait.errors import DataLost
from plait.testing import EmbeddedBroker

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from plait.spark.archiving.manifest import Archive
from tests.spark.archives import DAY, Filler, archive_here, files_below
from tests.spark.growing import Growing
from tests.spark.support import Stream, batch_reader
from tests.spark.test_intake import expire

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    with EmbeddedBroker(tmp_path / "data", clock=ManualClock()) as broker:
        yield Growing(broker, tmp_path / "archive")


def rows(count: int, start: int = 0) -> list[bytes]:
    return [b"%02d" % number for number in range(start, start + count)]


def step(stream: Stream) -> list[bytes]:
    """The sorted bodies of the next batch; files are in key order."""
    return sorted(stream.bodies())


def test_each_batch_has_the_rows_that_were_archived_since_the_last(growing: Growing):
    growing.grow(rows(3))
    stream = Stream(**growing.place)
    assert step(stream) == rows(3)
    offset = stream.offset
    growing.send(*rows(2, 3))
    assert step(stream) == []
    assert stream.offset == offset
    growing.archive()
    assert step(stream) == rows(2, 3)
    assert stream.offset == {"orders@g1": {"epoch": 1, "id": 1, "sequence": 5}}
    assert stream.reader.reportLatestOffset() == stream.offset
    growing.send(b"other", subject="orders.eu")
    growing.archive()
    wide = Stream(json.loads(json.dumps(stream.offset)), **{**growing.place, "subject": "orders*"})
    assert wide.bodies() == [b"other"]


def test_offsets_are_those_of_the_log_and_a_stream_may_switch_between_them(growing: Growing):
    growing.grow(rows(4))
    growing.broker.kill()
    growing.broker.start()
    growing.grow(rows(3, 4))
    for first, second in [("server", "archive"), ("archive", "server"), ("directory", "archive")]:
        places: dict[str, dict[str, Any]] = {
            "server": {"server": growing.broker.address},
            "directory": {"path": growing.broker.data},
            "archive": growing.place,
        }
        before = Stream(maxMessagesPerTrigger=5, **places[first])
        assert step(before) == rows(5)
        assert before.offset == {"orders@g1": {"epoch": 2, "from": 0, "id": 1, "sequence": 5}}
        assert step(Stream(before.offset, **places[second])) == rows(2, 5)
    # The log is ahead of its archive.
    ahead = Stream(server=growing.broker.address)
    growing.send(b"new")
    ahead.step()
    with pytest.raises(DataLost, match="orders@g1 ends at 7: sequences 7 to 7 of epoch 2 are lost"):
        Stream(ahead.offset, **growing.place).step()


def test_compaction_between_two_batches_neither_repeats_nor_loses_rows(growing: Growing):
    growing.grow(rows(3), rows(3, 3), rows(3, 6), rows(3, 9))
    stream = Stream(maxMessagesPerTrigger=5, **growing.place)
    read = step(stream)
    before = set(files_below(growing.to))
    growing.compact()
    assert len(before - set(files_below(growing.to))) >= 4
    assert len(Archive.at(growing.to).open().find("messages", subjects=["orders"])) == 1
    read += step(stream)
    growing.grow(rows(3, 12))
    growing.compact()
    read += step(stream) + step(stream)
    assert read == rows(15)
    assert step(stream) == []


@pytest.mark.parametrize("limit", [4, 7, 100])
def test_compaction_between_planning_and_reading_changes_nothing(growing: Growing, limit: int):
    growing.grow(rows(3), rows(3, 3), rows(3, 6))
    stream = Stream(maxMessagesPerTrigger=limit, **growing.place)
    whole = batch_reader(columns="body", **growing.place)
    end = stream.reader.latestOffset(stream.offset, stream.reader.getDefaultReadLimit())
    planned = stream.reader.partitions(stream.offset, end)
    planned_whole = whole.partitions()
    growing.compact()
    read = [row["body"] for part in planned for batch in stream.reader.read(part) for row in batch.to_pylist()]
    assert sorted(read) == rows(min(limit, 9))
    read = [row["body"] for part in planned_whole for batch in whole.read(part) for row in batch.to_pylist()]
    assert sorted(read) == rows(9)
    assert sorted(row["body"] for row in stream.read(stream.offset, end)) == rows(min(limit, 9))


def test_a_batch_is_the_same_when_it_is_read_again(growing: Growing):
    growing.grow(rows(4))
    stream = Stream(maxMessagesPerTrigger=3, **growing.place)
    start = stream.offset
    first = step(stream)
    growing.grow(rows(4, 4))
    growing.compact()
    again = Stream(start, **growing.place).read(start, stream.offset)
    assert sorted(row["body"] for row in again) == first == rows(3)


def test_a_limit_of_bytes_ends_at_the_end_of_a_file_and_allows_at_least_one_file(growing: Growing):
    growing.grow(*[[b"%02d" % number + bytes(1000), b"%02d-" % number + bytes(1000)] for number in range(6)])
    stream = Stream(maxBytesPerTrigger=6_000, **growing.place)
    assert [len(stream.step()) for _ in range(4)] == [4, 4, 4, 0]
    one = Stream(maxBytesPerTrigger=1, **growing.place)
    for _ in range(3):
        start = one.offset
        end = one.reader.latestOffset(start, one.reader.getDefaultReadLimit())
        (task,) = one.reader.partitions(start, end)
        assert [part.bounds for part in task.value.parts] == [None]
        assert len(one.step()) == 2
    both = Stream(maxBytesPerTrigger=6_000, maxMessagesPerTrigger=3, **growing.place)
    assert len(both.step()) == 3
    assert len(both.step(ReadAllAvailable())) == 9


def test_limits_are_exceeded_where_files_of_two_days_overlap(data: Path, to: Path):
    filler = Filler(data)
    for _ in range(3):
        filler.rounds(4, ("orders",), seconds=DAY / 12)
        filler.node.clock.jump(-DAY / 2)
    filler.node.clock.advance(2 * DAY)
    filler.rounds(4)
    filler.stop()
    archive_here(data, to, now=True)
    archive_here(None, to, compact=True)
    assert sorted(file.partitions["orders@g1"] for file in Archive.at(to).open().find("messages")) == [
        (0, 35),
        (3, 23),
        (36, 47),
    ]
    for start in (0, 24):
        for size in (1, 2000, 3000, 4000):
            stream = Stream(path=to, maxBytesPerTrigger=size, startingOffsets=f'{{"orders@g1": {start}}}')
            sequences = [row["sequence"] for _ in range(4) for row in stream.step()]
            assert sorted(sequences) == list(range(start, 48)), (start, size)


def test_a_query_for_available_data_reads_nothing_of_a_subject_that_is_recreated_meanwhile(growing: Growing):
    growing.grow(rows(3))
    stream = Stream(**growing.place)
    stream.reader.prepareForTriggerAvailableNow()
    growing.recreate()
    growing.grow([b"second"])
    assert [step(stream) for _ in range(3)] == [rows(3), [], []]
    assert step(Stream(stream.offset, **growing.place)) == [b"second"]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_recreated_subject_is_read_to_its_end_and_then_from_its_start(growing: Growing, compacted: bool):
    growing.grow(rows(5))
    stream = Stream(maxMessagesPerTrigger=2, **growing.place)
    assert step(stream) == rows(2)
    growing.grow(rows(1, 5))
    growing.recreate()
    growing.grow([b"a", b"b"], [b"c"])
    if compacted:
        growing.compact()
    assert [step(stream) for _ in range(5)] == [rows(2, 2), rows(2, 4), [b"a", b"b"], [b"c"], []]
    late = Stream(**growing.place)
    assert [step(late) for _ in range(3)] == [rows(6), [b"a", b"b", b"c"], []]
    assert late.offset == stream.offset
    latest = Stream(startingOffsets="latest", **growing.place)
    assert latest.offset == stream.offset
    # A batch that spans two lives is the same when it is read again.
    start = {"orders@g1": {"epoch": 1, "id": 1, "sequence": 4}}
    assert sorted(row["body"] for row in late.read(start, late.offset)) == [*rows(2, 4), b"a", b"b", b"c"]


def test_messages_that_were_never_archived_fail_the_stream_or_are_skipped(
    data: Path, to: Path, caplog: pytest.LogCaptureFixture
):
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10)
    archive_here(data, to, now=True)
    stream, lenient = Stream(path=to), Stream(path=to, failOnDataLoss=False)
    assert len(stream.step()) == len(lenient.step()) == 30
    filler.rounds(30)
    expire(filler)
    filler.rounds(10)
    filler.stop()
    archive_here(data, to, now=True)
    with pytest.raises(DataLost, match="sequences 30 to 119 of orders@g1 are not in the archive"):
        stream.step()
    with caplog.at_level(logging.WARNING, "plait.spark"):
        assert sorted(row["sequence"] for row in lenient.step()) == list(range(120, 150))
    assert "sequences 30 to 119 of orders@g1 are not in the archive" in caplog.text
    assert lenient.step() == []


def test_a_manifest_is_read_once(growing: Growing, monkeypatch: pytest.MonkeyPatch):
    growing.grow(rows(2))
    stream = Stream(**growing.place)
    stream.step()

    def read(self: Archive, number: int) -> Any:
        raise AssertionError(f"manifest {number} is read again")

    with monkeypatch.context() as patch:
        patch.setattr(Archive, "read", read)
        assert stream.step() == []
    growing.grow(rows(2, 2))
    assert step(stream) == rows(2, 2)


# --- with Spark ---------------------------------------------------------------------------------


def test_spark_streams_an_archive_and_continues_when_it_has_grown(
    spark: SparkSession, growing: Growing, tmp_path: Path
):
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def run() -> int:
        options = {"subject": "orders", "columns": "sequence,body", "maxMessagesPerTrigger": 4}
        writer = spark.readStream.format("plait").options(**options).load(str(growing.to)).writeStream
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start(out, "parquet")
        assert query.awaitTermination(60)
        return len([batch for batch in query.recentProgress if batch.numInputRows])

    growing.grow(rows(3), rows(7, 3))
    assert run() == 3
    growing.grow(rows(2, 10))
    growing.compact()
    assert run() == 1
    read = spark.read.parquet(out).orderBy("sequence").collect()
    assert [(row.sequence, bytes(row.body)) for row in read] == list(enumerate(rows(12)))
