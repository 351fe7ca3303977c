"""Where a batch starts and ends, from files and through brokers; and the errors when rows are missing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import plait.sync
from plait.client.arguments import to_datetime
from plait.client.read.surveyor import PartitionSpan
from plait.clock import ManualClock
from plait.errors import DataLost, Expired, InvalidArgument
from plait.storage.disk import RealDisk
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import BlockingBroker
from tests.support.broker_node import Node

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.sql.datasource import EqualTo, GreaterThan, LessThanOrEqual

from plait.spark.inputs import log_input as log_place
from plait.spark.source.offsets import PartitionOffset, check_end, check_start, parse_bound
from plait.spark.source.read_options import ReadOptions
from tests.spark.support import batch_reader, bodies, lose_tail, rows_of

START = ManualClock().now()


@pytest.fixture(params=["server", "path"])
def timed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[BlockingBroker, dict[str, Any]]]:
    """A broker on virtual time, and a reader's options for it: its address or its directory."""
    with EmbeddedBroker(tmp_path / "data", clock=ManualClock()) as broker:
        yield broker, {"server": broker.address} if request.param == "server" else {"path": broker.data}


def send(broker: BlockingBroker, *sent: bytes) -> None:
    """Send one message per second."""
    with plait.sync.connect(broker.address) as client:
        for body in sent:
            client.send("orders", body)
            broker.advance(1.0)


Timed = tuple[BlockingBroker, dict[str, Any]]
SENT = [b"%d" % number for number in range(10)]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("earliest", "latest", SENT),
        ("EARLIEST", "Latest", SENT),
        ("latest", "latest", []),
        ('{"orders@g1": 3}', "latest", SENT[3:]),
        ('{"orders@g1": 3}', '{"orders@g1": 7}', SENT[3:7]),
        ('{"orders@g1": {"sequence": 3, "epoch": 1}}', '{"orders@g1": {"sequence": 7, "epoch": 1}}', SENT[3:7]),
        ('{"orders@g1": "earliest"}', '{"orders@g1": 0}', []),
        ("{}", "{}", SENT),
        (to_datetime(START + 3_000_000).isoformat(), "latest", SENT[3:]),
        ("earliest", to_datetime(START + 3_000_000).isoformat(), SENT[:3]),
        (to_datetime(START + 2_500_000).isoformat(), to_datetime(START + 4_500_000).isoformat(), SENT[3:5]),
        ("2001-01-01", "2002-01-01T00:00:00Z", []),
    ],
)
def test_a_batch_has_the_rows_between_its_offsets(timed: Timed, start: str, end: str, expected: list[bytes]):
    broker, place = timed
    send(broker, *SENT)
    assert bodies(startingOffsets=start, endingOffsets=end, **place) == expected


def test_a_relative_time_counts_back_from_now():
    clock = ManualClock()
    assert parse_bound("startingOffsets", "-5m", clock.now()).time == clock.now() - 300_000_000
    options = ReadOptions.parse({"path": "d", "subject": "s", "startingOffsets": "-1h"}, clock)
    assert options.start.time == clock.now() - 3_600_000_000
    moment = parse_bound("startingOffsets", "2020-01-02T03:04:05+01:00", 0).time
    assert to_datetime(moment) == datetime(2020, 1, 2, 2, 4, 5, tzinfo=UTC)


def test_an_unknown_partition_is_an_error_that_lists_the_known_ones(timed: Timed):
    broker, place = timed
    send(broker, b"a")
    with pytest.raises(
        InvalidArgument,
        match="startingOffsets names unknown partitions orders@g2; the partitions of the subject are orders@g1",
    ):
        bodies(startingOffsets='{"orders@g2": 0}', **place)


def test_expired_sequences_fail_the_query_or_cause_a_warning(timed: Timed, caplog: pytest.LogCaptureFixture):
    broker, place = timed
    with plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", retention=60.0)
    send(broker, *SENT)
    broker.advance(55.0)
    broker.restart()
    kept = bodies(**place)
    assert 0 < len(kept) < 10
    first = 10 - len(kept)
    wanted = {"startingOffsets": '{"orders@g1": 1}', **place}
    with pytest.raises(DataLost, match=rf"sequences 1 to {first - 1} are expired.*failOnDataLoss=false"):
        bodies(**wanted)
    with caplog.at_level(logging.WARNING, "plait.spark"):
        assert bodies(failOnDataLoss=False, **wanted) == kept
    assert f"sequences 1 to {first - 1} are expired" in caplog.text
    assert bodies(startingOffsets=json.dumps({"orders@g1": first}), **place) == kept


def test_an_end_that_does_not_exist_yet_fails_the_query_or_causes_a_warning(timed: Timed):
    broker, place = timed
    send(broker, *SENT)
    wanted = {"endingOffsets": '{"orders@g1": 12}', **place}
    with pytest.raises(DataLost, match="orders@g1 ends at 10: sequences 10 to 11 are missing"):
        bodies(**wanted)
    assert bodies(failOnDataLoss=False, **wanted) == SENT


def test_a_tail_that_was_lost_and_rewritten_is_detected_by_its_epoch(timed: Timed):
    broker, place = timed
    send(broker, *SENT)
    broker.kill()
    lose_tail(broker.data, 4)
    broker.start()
    send(broker, b"new 6", b"new 7", b"new 8", b"new 9", b"new 10")
    now = [*SENT[:6], b"new 6", b"new 7", b"new 8", b"new 9", b"new 10"]
    assert bodies(**place) == now
    wanted = {"startingOffsets": '{"orders@g1": {"sequence": 10, "epoch": 1}}', **place}
    with pytest.raises(DataLost, match="other messages from sequence 6 on: those up to 9 were read in epoch 1"):
        bodies(**wanted)
    assert bodies(failOnDataLoss=False, **wanted) == now[6:]
    wanted = {"endingOffsets": '{"orders@g1": {"sequence": 8, "epoch": 1}}', **place}
    with pytest.raises(DataLost, match="other messages up to sequence 7"):
        bodies(**wanted)
    wanted = {"startingOffsets": '{"orders@g1": {"sequence": 6, "epoch": 1}}', **place}
    assert bodies(**wanted) == now[6:]


def test_a_tail_that_is_rewritten_between_planning_and_reading_is_detected(timed: Timed):
    broker, place = timed
    send(broker, *SENT)
    reader = batch_reader(startingOffsets='{"orders@g1": 3}', **place)
    partitions = reader.partitions()
    broker.kill()
    lose_tail(broker.data, 4)
    broker.start()
    send(broker, b"6", b"7", b"8", b"9", b"10")
    with pytest.raises(DataLost, match="other messages from sequence 6 on than when the query was planned"):
        [batch for partition in partitions for batch in reader.read(partition)]


SPAN = PartitionSpan("orders", "orders", 7, 10, 50, [(0, 1), (20, 2), (40, 5)], group="g1")


@pytest.mark.parametrize(
    ("start", "expected", "lost"),
    [
        (PartitionOffset(10), 10, None),
        (PartitionOffset(50), 50, None),
        (PartitionOffset(50, 5, 7), 50, None),
        (PartitionOffset(40, 2, 7), 40, None),
        (PartitionOffset(10, 1, 7), 10, None),
        (PartitionOffset(3), 10, "sequences 3 to 9 are expired"),
        (PartitionOffset(60), 50, "sequences 50 to 59 are lost"),
        (PartitionOffset(60, 5), 50, "sequences 50 to 59 of epoch 5 are lost"),
        (PartitionOffset(60, 2), 40, "sequences 50 to 59 of epoch 2 are lost"),
        (PartitionOffset(45, 2), 40, "other messages from sequence 40 on"),
        (PartitionOffset(30, 1), 20, "other messages from sequence 20 on"),
        (PartitionOffset(30, 3), 40, "other messages from sequence 40 on"),
        (PartitionOffset(20, 2, 6), 10, "deleted and created again"),
    ],
)
def test_an_invalid_start_continues_with_the_first_unread_message(
    start: PartitionOffset, expected: int, lost: str | None
):
    sequence, loss = check_start(SPAN, start)
    assert sequence == expected
    assert (loss is None) == (lost is None)
    assert lost is None or (loss is not None and lost in loss)


@pytest.mark.parametrize(
    ("end", "expected", "lost"),
    [
        (PartitionOffset(50, 5, 7), 50, False),
        (PartitionOffset(40, 2), 40, False),
        (PartitionOffset(51), 50, True),
        (PartitionOffset(60, 5), 50, True),
        (PartitionOffset(60, 2), 40, True),
        (PartitionOffset(60, 1), 20, True),
        (PartitionOffset(45, 2), 40, True),
        (PartitionOffset(30, 3), 30, True),
        (PartitionOffset(45, 5, 8), 10, True),
    ],
)
def test_an_invalid_end_is_detected(end: PartitionOffset, expected: int, lost: bool):
    sequence, loss = check_end(SPAN, end)
    assert (sequence, loss is not None) == (expected, lost)


@pytest.mark.parametrize("number", [7, 8])
@pytest.mark.parametrize(
    ("sequence", "epoch"), [(15, 1), (30, 1), (30, 2), (45, 1), (45, 2), (45, 5), (50, 5), (60, 1), (60, 2), (60, 5)]
)
def test_a_batch_ends_where_the_next_one_starts(sequence: int, epoch: int, number: int):
    place = PartitionOffset(sequence, epoch, number)
    assert check_end(SPAN, place)[0] == check_start(SPAN, place)[0]


def test_offsets_are_json_with_sorted_names():
    position = PartitionOffset.of(SPAN, 45)
    assert json.dumps(position.to_json()) == '{"epoch": 5, "id": 7, "sequence": 45}'
    assert PartitionOffset.from_json("orders@g1", position.to_json()) == position
    assert PartitionOffset.of(SPAN, 10) == PartitionOffset(10, 0, 7)


def test_filters_and_offsets_narrow_each_other(timed: Timed):
    broker, place = timed
    send(broker, *SENT)
    reader = batch_reader(columns="body", startingOffsets='{"orders@g1": 3}', **place)
    reader.pushFilters(
        [LessThanOrEqual(("sequence",), 7), GreaterThan(("store_time",), to_datetime(START + 4_000_000))]
    )
    assert [row["body"] for row in rows_of(reader)] == SENT[5:8]


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_offsets_may_name_partitions_that_a_filter_leaves_out(timed: Timed, option: str):
    broker, place = timed
    with plait.sync.connect(broker.address) as client:
        client.admin.create_subject("orders", partitions=2)
        keys = [f"k{number}" for number in range(20)]
        receipts = client.send_many("orders", [key.encode() for key in keys], keys=keys)
        client.send("other", b"x")
    counts = {name: sum(str(r.partition) == name for r in receipts) for name in ("orders@g1", "orders#1@g1")}
    assert min(counts.values()) > 1
    given = {"columns": "body", "subject": "orders,other", option: json.dumps(dict.fromkeys(counts, 1)), **place}
    for column, value, expected in [
        *(("partition", name, count - 1 if option == "startingOffsets" else 1) for name, count in counts.items()),
        ("partition", "other@g1", 1),
        ("subject", "other", 1),
    ]:
        reader = batch_reader(**given)
        reader.pushFilters([EqualTo((column,), value)])
        assert len(rows_of(reader)) == expected
    reader = batch_reader(**{**given, option: '{"orders#7@g1": 1}'})
    reader.pushFilters([EqualTo(("subject",), "orders")])
    with pytest.raises(
        InvalidArgument,
        match="names unknown partitions orders#7@g1; the partitions of the subject are orders#1@g1, orders@g1",
    ):
        reader.partitions()


def test_segments_that_are_removed_while_a_query_is_planned_are_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Node(RealDisk(tmp_path))
    for number in range(200):
        node.send("orders", b"%d" % number * 20)
    node.broker.stop()
    segments = sorted((tmp_path / "message").iterdir())
    assert len(segments) > 3
    plan = log_place.plan

    def expiring(*arguments: Any, **options: Any) -> Any:
        segments[0].unlink()
        return plan(*arguments, **options)

    monkeypatch.setattr(log_place, "plan", expiring)
    with pytest.raises(Expired, match="removed while the query was planned; run it again"):
        bodies(path=tmp_path, startingOffsets='{"orders@g1": 1}')
