"""``option("server", ...)``: the same rows as from the files, through brokers that continue to serve other clients."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import plait.sync
from plait.errors import DamageError, DataLost, SubjectNotFound, Unavailable
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import BlockingBroker

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan

from plait.client.net.rate_limit import RateLimit
from plait.client.read import range_scan as scan_module
from plait.spark.inputs import broker_input as server_place
from plait.spark.inputs.broker_input import BrokerTask
from tests.spark.support import batch_reader, bodies, rows_of

Client = plait.sync.Client


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many reads and many tasks for little data."""
    monkeypatch.setattr(scan_module, "READ_SIZE", 2_000)
    monkeypatch.setattr(server_place, "PIECE_SIZE_MIN", 10_000)


def send(client: Client, count: int, subject: str = "orders", **columns: Any) -> list[bytes]:
    """Send ``count`` messages in frames of ten."""
    sent = [b"%d " % number + bytes(90) for number in range(count)]
    for start in range(0, count, 10):
        client.send_many(subject, sent[start : start + 10], **columns)
    return sent


def test_reads_and_tasks_end_at_frame_boundaries_and_every_row_is_read_once(
    plait_broker: BlockingBroker, client: Client, small_reads: None
):
    sent = send(client, 500)
    reader = batch_reader(server=plait_broker.address, columns="sequence,body", minPartitions=4)
    partitions = pickle.loads(pickle.dumps(list(reader.partitions())))
    assert len(partitions) == 4
    tasks: list[BrokerTask] = [partition.value for partition in partitions]
    assert all(task.start % 10 == 0 for task in tasks)
    assert max(task.end - task.start for task in tasks) < 150
    rows = [row for p in partitions for b in pickle.loads(pickle.dumps(reader)).read(p) for row in b.to_pylist()]
    assert [row["sequence"] for row in rows] == list(range(500))
    assert [row["body"] for row in rows] == sent


def test_subjects_are_selected_by_name_list_or_prefix_and_may_be_empty(plait_broker: BlockingBroker, client: Client):
    for subject in ("orders", "orders.eu", "refunds"):
        client.send(subject, subject.encode())
    client.admin.create_subject("empty")
    address = plait_broker.address
    assert bodies(server=address, subject="orders,refunds") == [b"orders", b"refunds"]
    assert bodies(server=address, subject="orders*") == [b"orders", b"orders.eu"]
    assert sorted(bodies(server=address, subject="*")) == [b"orders", b"orders.eu", b"refunds"]
    assert batch_reader(server=address, subject="empty").partitions() == []
    with pytest.raises(SubjectNotFound, match="'gone'"):
        bodies(server=address, subject="gone")
    with pytest.raises(SubjectNotFound, match=r"'gone\*' does not exist; there are empty, orders, orders.eu, refunds"):
        bodies(server=address, subject="gone*")
    assert {info.subject for info in client.admin.subjects()} == {"empty", "orders", "orders.eu", "refunds"}


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_a_start_within_a_frame_is_exact_compressed_or_not(plait_broker: BlockingBroker, compression: Any):
    sent = [b"body %d " % number * 20 for number in range(100)]
    keys = [f"k{number}" for number in range(100)]
    with plait.sync.connect(plait_broker.address, compression=compression) as client:
        receipts = list(client.send_many("orders", sent, keys=keys))
    offsets = {"startingOffsets": '{"orders@g1": 31}', "endingOffsets": '{"orders@g1": 77}'}
    rows = rows_of(batch_reader(server=plait_broker.address, **offsets))
    assert [row["body"] for row in rows] == sent[31:77]
    assert [row["sequence"] for row in rows] == list(range(31, 77))
    assert [row["key"] for row in rows] == keys[31:77]
    assert [row["message_id"] for row in rows] == [str(receipt.message_id) for receipt in receipts[31:77]]
    assert rows == rows_of(batch_reader(path=plait_broker.data, **offsets))


def test_filters_limit_what_is_read(plait_broker: BlockingBroker, client: Client, small_reads: None):
    send(client, 200)
    reader = batch_reader(server=plait_broker.address, columns="sequence")
    reader.pushFilters([GreaterThanOrEqual(("sequence",), 57), LessThan(("sequence",), 60)])
    assert [row["sequence"] for row in rows_of(reader)] == [57, 58, 59]
    reader = batch_reader(server=plait_broker.address, columns="sequence")
    reader.pushFilters([EqualTo(("partition",), "other@g1")])
    assert reader.partitions() == []
    rows = rows_of(batch_reader(server=plait_broker.address, columns="sequence,store_time"))
    reader = batch_reader(server=plait_broker.address, columns="sequence")
    reader.pushFilters([LessThan(("store_time",), rows[100]["store_time"])])
    tasks = [partition.value for partition in reader.partitions()]
    assert tasks[-1].end == next(row["sequence"] for row in rows if row["store_time"] == rows[100]["store_time"])


def test_keys_and_message_ids_are_filtered_before_columns_are_decoded(place: dict[str, Any], client: Client):
    keys = [f"k{number % 7}" for number in range(100)]
    receipts = list(client.send_many("orders", [b"%d" % number for number in range(100)], keys=keys))
    client.send("orders", b"keyless")
    for name, value, expected in (
        ("key", "k3", range(3, 100, 7)),
        ("key", "unknown", ()),
        ("message_id", str(receipts[42].message_id), [42]),
    ):
        reader = batch_reader(columns="body", **place)
        reader.pushFilters([EqualTo((name,), value)])
        assert [row["body"] for row in rows_of(reader)] == [b"%d" % number for number in expected]


# --- faults -------------------------------------------------------------------------------------


def test_reading_continues_after_a_restart_of_the_broker(
    plait_broker: BlockingBroker, client: Client, small_reads: None
):
    sent = send(client, 500)
    reader = batch_reader(server=plait_broker.address, columns="body", minPartitions=1)
    (partition,) = reader.partitions()
    batches = reader.read(partition)
    task: BrokerTask = partition.value
    frames = task.frames(reader.options, reader.wanted)
    read = [next(frames)]
    plait_broker.kill()
    plait_broker.start()
    read += list(frames)
    assert [row for _, frame in read for row in frame.rows(6, 0, frame.count)] == sent
    assert [row["body"] for batch in batches for row in batch.to_pylist()] == sent


def test_an_unreachable_server_is_named(monkeypatch: pytest.MonkeyPatch):
    with EmbeddedBroker() as broker:
        address = broker.address
    monkeypatch.setattr(server_place, "Surveyor", _hasty(server_place.Surveyor))
    with pytest.raises(Unavailable, match=r"cannot connect to plait://127.0.0.1"):
        batch_reader(server=address).partitions()


def _hasty(kind: type[Any]) -> Any:
    limits = plait.ClientLimits(request_seconds=0.2, send_seconds=0.2)
    return lambda addresses: kind(addresses, limits)


def test_damage_at_the_broker_fails_or_is_left_out(tmp_path: Path):
    with EmbeddedBroker(tmp_path) as broker:
        with plait.sync.connect(broker.address) as client:
            for number in range(30):
                client.send("orders", b"%d" % number)
        broker.stop()
        (segment,) = [path for path in (tmp_path / "message").iterdir() if path.stat().st_blocks]
        data = bytearray(segment.read_bytes())
        data[data.index(b"PL", data.index(b"PL", 3000) + 1) + 90] ^= 0xFF
        segment.write_bytes(data)
        broker.start()
        with pytest.raises(DamageError, match=r"orders@g1 at plait://.* is damaged: sequences .*plait doctor"):
            bodies(server=broker.address)
        assert len(bodies(server=broker.address, failOnDamage=False)) == 29


def test_a_subject_that_was_recreated_since_planning_is_detected(plait_broker: BlockingBroker, client: Client):
    send(client, 20)
    reader = batch_reader(server=plait_broker.address)
    partitions = reader.partitions()
    client.admin.delete_subject("orders")
    send(client, 30)
    with pytest.raises(DataLost, match="deleted and created again"):
        list(reader.read(partitions[0]))


# --- rates --------------------------------------------------------------------------------------


def test_a_rate_is_shared_by_all_tasks(plait_broker: BlockingBroker, client: Client, small_reads: None):
    send(client, 500)
    reader = batch_reader(server=plait_broker.address, bytesPerSecond=1_000_000, minPartitions=4)
    tasks: list[BrokerTask] = [partition.value for partition in reader.partitions()]
    assert sum(task.bytes_per_second or 0 for task in tasks) == pytest.approx(1_000_000)
    assert len(rows_of(reader)) == 500


def test_a_pace_allows_its_rate_over_any_period():
    pace = RateLimit(1000, 0.1)
    now, waited = 50.0, []
    for _ in range(10):
        wait = pace.take(100, now)
        now += wait
        waited.append(wait)
    # At the start and after a pause, 0.1 s worth of bytes at once; then a hundred bytes each 0.1 s.
    assert waited == pytest.approx([0.0, 0.0, *[0.1] * 8])
    assert pace.take(100, now + 100.0) == 0.0
    assert pace.take(100, now + 100.0) == 0.0
    assert pace.take(100, now + 100.0) == pytest.approx(0.1)
