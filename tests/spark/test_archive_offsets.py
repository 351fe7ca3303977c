"""Reading an archive from offset to offset: the rows of its log, found by the manifest; missing rows are reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from plait.client.arguments import to_datetime
from plait.clock import ManualClock
from plait.errors import ArchiveError, DataLost
from plait.testing import EmbeddedBroker

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.sql.datasource import EqualTo, GreaterThan, LessThanOrEqual

from plait.spark.archiving.manifest import Archive
from tests.spark.archives import DAY, Filler, archive_here, commit_next, damage_frames
from tests.spark.growing import Growing
from tests.spark.support import Stream, batch_reader, rows_of
from tests.spark.test_intake import expire

if TYPE_CHECKING:
    pass

START = ManualClock().now()
SENT = [b"%d" % number for number in range(10)]


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    with EmbeddedBroker(tmp_path / "data", clock=ManualClock()) as broker:
        yield Growing(broker, tmp_path / "archive")


def read(**options: Any) -> list[dict[str, Any]]:
    rows = rows_of(batch_reader(columns="partition,sequence,body", **options))
    return sorted(rows, key=lambda row: (row["partition"], row["sequence"]))


def bodies(**options: Any) -> list[bytes]:
    """The bodies in the order of the partition; files of an archive have another order."""
    return [row["body"] for row in read(**options)]


def at(seconds: float) -> str:
    return to_datetime(START + round(seconds * 1_000_000)).isoformat()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_batch_has_the_rows_between_its_offsets(growing: Growing, compacted: bool):
    growing.grow(SENT[:4], SENT[4:6], SENT[6:])
    if compacted:
        growing.compact()
        assert len(Archive.at(growing.to).open().find("messages", subjects=["orders"])) == 1
    for start, end, expected in [
        ("earliest", "latest", SENT),
        ("latest", "latest", []),
        ('{"orders@g1": 3}', "latest", SENT[3:]),
        ('{"orders@g1": 3}', '{"orders@g1": 7}', SENT[3:7]),
        ('{"orders@g1": {"sequence": 3, "epoch": 1}}', '{"orders@g1": {"sequence": 7, "epoch": 1}}', SENT[3:7]),
        ('{"orders@g1": "earliest"}', '{"orders@g1": 0}', []),
        ("{}", '{"orders@g1": 9}', SENT[:9]),
        (at(3), "latest", SENT[3:]),
        ("earliest", at(3), SENT[:3]),
        (at(2.5), at(4.5), SENT[3:5]),
        (at(4), at(6), SENT[4:6]),
        ("2001-01-01", "2002-01-01T00:00:00Z", []),
        (at(1000), "latest", []),
    ]:
        options = {"startingOffsets": start, "endingOffsets": end, **growing.place}
        assert bodies(**options) == expected, (start, end)


def test_offsets_select_the_same_rows_as_in_the_log(data: Path, to: Path):
    filler = Filler(data)
    for _ in range(4):
        filler.rounds(10, ("orders", "refunds"), seconds=DAY / 15)
        # The clock is set back: times and days repeat, and the files of two days overlap in the log.
        filler.node.clock.jump(-DAY / 3)
        archive_here(data, to, now=True)
    filler.stop()
    times = [to_datetime(START + round(DAY * 1e6 * part / 12)).isoformat() for part in range(0, 24, 5)]
    sequences = [json.dumps({"orders@g1": number, "refunds@g1": number + 7}) for number in range(0, 110, 13)]
    for compact in (False, True):
        if compact:
            archive_here(None, to, compact=True)
        for bounds in (times, sequences):
            for start, end in pairwise(bounds):
                options = {"subject": "*", "startingOffsets": start, "endingOffsets": end}
                assert read(path=to, **options) == read(path=data, **options), (start, end)


def test_filters_and_offsets_narrow_each_other(growing: Growing):
    growing.grow(SENT[:5], SENT[5:])
    growing.send(b"other", subject="others")
    growing.archive()
    reader = batch_reader(columns="body", subject="*", startingOffsets='{"orders@g1": 3}', **growing.place)
    later = GreaterThan(("store_time",), to_datetime(START + 4_000_000))
    reader.pushFilters([LessThanOrEqual(("sequence",), 7), later, EqualTo(("partition",), "orders@g1")])
    assert sorted(row["body"] for row in rows_of(reader)) == SENT[5:8]


def test_files_outside_a_range_are_not_opened(growing: Growing):
    growing.grow(SENT[:3], SENT[3:6], SENT[6:])
    files = sorted(Archive.at(growing.to).open().find("messages"), key=lambda file: file.start)
    (growing.to / files[0].path).unlink()
    (growing.to / files[2].path).unlink()
    between = {"startingOffsets": '{"orders@g1": 4}', "endingOffsets": '{"orders@g1": 6}'}
    assert bodies(**between, **growing.place) == SENT[4:6]
    # The manifest has the times of a file, so that a file on one side of a time is not opened.
    assert bodies(startingOffsets=at(3), endingOffsets=at(6), **growing.place) == SENT[3:6]
    with pytest.raises(ArchiveError, match=r"is gone, and no other file has its 3 messages"):
        bodies(startingOffsets='{"orders@g1": 2}', endingOffsets='{"orders@g1": 6}', **growing.place)
    with pytest.raises(ArchiveError, match="does not exist"):
        bodies(startingOffsets=at(1.5), **growing.place)


# --- missing rows -------------------------------------------------------------------------------


def test_messages_that_were_never_archived_fail_the_query_or_cause_a_warning(
    data: Path, to: Path, caplog: pytest.LogCaptureFixture
):
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10)
    expire(filler)
    filler.rounds(10)
    archive_here(data, to, now=True)
    filler.rounds(10)
    expire(filler)
    filler.rounds(10)
    archive_here(data, to, now=True)
    filler.stop()
    assert len(bodies(path=to)) == 60
    for start, end, message in [
        (10, 50, "orders@g1 starts at 30: sequences 10 to 29 are expired"),
        (50, 70, "sequences 60 to 69 of orders@g1 are not in the archive"),
        (70, 100, "sequences 70 to 89 of orders@g1 are not in the archive"),
        (90, 130, "orders@g1 ends at 120: sequences 120 to 129 are missing"),
    ]:
        bounds = {"startingOffsets": f'{{"orders@g1": {start}}}', "endingOffsets": f'{{"orders@g1": {end}}}'}
        with pytest.raises(DataLost, match=rf"{message}.*failOnDataLoss=false"):
            read(path=to, **bounds)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "plait.spark"):
            rows = read(path=to, failOnDataLoss=False, **bounds)
        there = [*range(30, 60), *range(90, 120)]
        assert [row["sequence"] for row in rows] == [number for number in there if start <= number < end]
        assert message in caplog.text
    kept = read(path=to, startingOffsets='{"orders@g1": 90}')
    assert [row["sequence"] for row in kept] == list(range(90, 120))


def test_messages_that_were_damaged_before_archiving_fail_the_query_or_cause_a_warning(
    data: Path, to: Path, caplog: pytest.LogCaptureFixture
):
    filler = Filler(data)
    for begun in (0, 30):
        filler.rounds(10)
        filler.node.send("others", b"behind it")
        # The first frame of a run, one in the middle, two consecutive ones, the last one.
        damage_frames(data, *(begun + base for base in (0, 9, 15, 18, 27)))
        archive_here(data, to, now=True, skip_damage=True)
    filler.stop()
    lost = [(0, 3), (9, 12), (15, 21), (27, 33), (39, 42), (45, 51), (57, 60)]
    there = [number for number in range(60) if not any(first <= number < end for first, end in lost)]
    assert [row["sequence"] for row in read(path=to)] == there
    for start, end, message in [
        (0, 9, "sequences 0 to 2 of orders@g1 are not in the archive"),
        (10, 20, "sequences 10 to 11 of orders@g1 are not .*; sequences 15 to 19 of"),
        (30, 39, "sequences 30 to 32 of orders@g1 are not in the archive"),
        (51, 60, "sequences 57 to 59 of orders@g1 are not in the archive"),
    ]:
        bounds = {"startingOffsets": f'{{"orders@g1": {start}}}', "endingOffsets": f'{{"orders@g1": {end}}}'}
        with pytest.raises(DataLost, match=rf"{message}.*failOnDataLoss=false"):
            read(path=to, **bounds)
        rows = read(path=to, failOnDataLoss=False, **bounds)
        assert [row["sequence"] for row in rows] == [number for number in there if start <= number < end]
    for start, end in [(3, 9), (33, 39), (51, 57)]:
        bounds = {"startingOffsets": f'{{"orders@g1": {start}}}', "endingOffsets": f'{{"orders@g1": {end}}}'}
        assert [row["sequence"] for row in read(path=to, **bounds)] == list(range(start, end))
    with pytest.raises(DataLost, match="sequences 0 to 2 of orders@g1 are not in the archive"):
        Stream(path=to).step()
    with caplog.at_level(logging.WARNING, "plait.spark"):
        assert len(Stream(path=to, failOnDataLoss=False).step()) == len(there)
    assert "sequences 57 to 59 of orders@g1 are not in the archive" in caplog.text
    (source,) = Archive.at(to).open().sources.values()
    assert sum(gap.end - gap.start for gap in source.gaps) == 60 - len(there)


def test_offsets_of_another_epoch_or_life_are_detected(growing: Growing):
    growing.grow(SENT[:4])
    growing.broker.kill()
    growing.broker.start()
    growing.grow(SENT[4:])

    def starting(**fields: int) -> list[bytes]:
        return bodies(startingOffsets=json.dumps({"orders@g1": fields}), **growing.place)

    assert starting(sequence=4, epoch=1, id=1) == SENT[4:]
    assert starting(sequence=5, epoch=2, id=1) == SENT[5:]
    with pytest.raises(DataLost, match="other messages from sequence 4 on: those up to 5 were read in epoch 1"):
        starting(sequence=6, epoch=1)
    with pytest.raises(DataLost, match="orders@g1 was deleted and created again"):
        starting(sequence=5, id=9)


def test_a_recreated_subject_is_read_life_after_life(growing: Growing):
    growing.grow(SENT[:3], SENT[3:5])
    growing.recreate()
    growing.grow([b"a", b"b"], [b"c", b"d"])
    for compact in (False, True):
        if compact:
            growing.compact()
        assert sorted(bodies(**growing.place)) == [*SENT[:5], b"a", b"b", b"c", b"d"]

        def between(start: object, end: object = "latest") -> list[bytes]:
            texts = [each if isinstance(each, str) else json.dumps({"orders@g1": each}) for each in (start, end)]
            return sorted(bodies(startingOffsets=texts[0], endingOffsets=texts[1], **growing.place))

        old, new = (life.number for life in Archive.at(growing.to).open().sources.popitem()[1].lives["orders@g1"])
        # A sequence without an epoch belongs to the newest life.
        assert between(1) == [b"b", b"c", b"d"]
        assert between({"sequence": 3, "id": old}) == [*SENT[3:5], b"a", b"b", b"c", b"d"]
        assert between({"sequence": 3, "id": old}, {"sequence": 1, "id": new}) == [*SENT[3:5], b"a"]
        assert between("earliest", {"sequence": 2, "id": old}) == SENT[:2]
        assert between(at(4)) == [SENT[4], b"a", b"b", b"c", b"d"]
        assert between(at(4), at(6)) == [SENT[4], b"a"]
        with pytest.raises(DataLost, match="orders@g1 ends at 4: sequences 4 to 4 are lost"):
            between({"sequence": 5, "id": new})


def test_partitions_of_the_same_name_in_two_directories_are_refused(to: Path, tmp_path: Path):
    for name in ("one", "two"):
        filler = Filler(tmp_path / name)
        filler.rounds(5)
        filler.stop()
        archive_here(tmp_path / name, to, now=True)
    assert len(bodies(path=to)) == 30
    with pytest.raises(ArchiveError, match=r"orders@g1 is the name of partitions of two data directories.*--group"):
        bodies(path=to, startingOffsets='{"orders@g1": 3}')


def test_an_archive_that_does_not_record_lives_can_only_be_read_whole(growing: Growing):
    growing.grow(SENT)
    archive = Archive.at(growing.to)
    manifest = archive.open()
    sources = {name: msgspec.structs.replace(source, lives={}) for name, source in manifest.sources.items()}
    commit_next(archive, sources=sources)
    assert bodies(**growing.place) == SENT
    with pytest.raises(ArchiveError, match="does not record which sequences of orders@g1 it has"):
        bodies(startingOffsets=at(3), **growing.place)


# --- what the archiver records -----------------------------------------------------------------


def test_the_manifest_has_the_lives_of_each_partition_with_their_epochs(growing: Growing):
    growing.grow(SENT[:4])
    growing.broker.kill()
    growing.broker.start()
    growing.grow(SENT[4:])
    (before,) = Archive.at(growing.to).open().sources.values()
    (life,) = before.lives["orders@g1"]
    assert (life.number, life.offset, life.ranges, life.epochs) == (1, 0, [(0, 10)], [(0, 1), (4, 2)])
    growing.recreate()
    growing.grow([b"a"])
    (source,) = Archive.at(growing.to).open().sources.values()
    old, new = source.lives["orders@g1"]
    assert (old, new.offset, new.ranges, new.epochs) == (life, before.message_offset, [(0, 1)], [(0, 2)])
    assert new.number > old.number
    assert source.gaps == []
    assert source.sequences["orders@g1"] == 1
