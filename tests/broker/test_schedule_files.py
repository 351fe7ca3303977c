"""Buckets: which rows are bucketed; crashes, damage and a full disk; and when files are deleted."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from plait.broker.recovery import checkpointer as snapshot
from plait.broker.schedule import delayed_requests
from plait.broker.schedule.delayed_requests import count_scheduled, list_scheduled
from plait.errors import DiskFull
from plait.storage.checkpoint import KEEP
from plait.storage.schedule.bucket import DIRECTORY, LEVELS, bucket_keys, keys_at
from plait.testing.simulated_disk import SimulatedCrash
from tests.broker.schedule_node import SECOND, delay, delivered, later, run_due, schedules
from tests.support.broker_node import Node, Producer

DAY = 86_400
HOUR = 3600 * SECOND


@pytest.fixture
def producer() -> Producer:
    return Producer(7)


def files(node: Node) -> list[str]:
    return [f"{DIRECTORY}/{name}" for name in node.disk.list(DIRECTORY)]


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


# --- which bucket ---------------------------------------------------------------------------------


def test_two_years_are_at_most_87_buckets() -> None:
    """At any position of the clock within a bucket."""
    counts = set()
    ahead = np.arange(0, 732 * DAY * SECOND + 1, 300 * SECOND)
    for minutes in range(0, 16 * 24 * 60, 607):
        now = 1_700_000_000_123_456 + minutes * 60 * SECOND
        counts.add(len(np.unique(bucket_keys(now + ahead, now))))
    assert max(counts) == 87


def test_rows_of_a_bucket_are_adjacent_and_every_row_is_in_a_bucket_that_covers_it() -> None:
    now = 1_700_000_000_123_456
    due = now + np.linspace(-3600 * SECOND, 732 * DAY * SECOND, 200_000).astype(np.int64)
    keys = bucket_keys(due, now)
    # Rows sorted by due time are grouped by bucket; the bucket writer depends on this.
    assert len(np.unique(keys)) == 1 + int((keys[1:] != keys[:-1]).sum())
    for time, key in zip(due[::997].tolist(), keys[::997].tolist(), strict=True):
        level = key % 60_000_000
        assert key in keys_at(time)
        assert key - level <= time < key - level + LEVELS[level][1]


def test_near_and_far_rows_wait_in_separate_files(producer: Producer) -> None:
    node = Node()
    now = node.clock.now()
    delays = [5 * 60, 3 * 3600, 5 * DAY, 400 * DAY]
    delay(node, producer, [now + seconds * SECOND for seconds in delays], b"a", b"b", b"c", b"d")
    node.checkpoint()
    assert sorted(name.split("-")[-1].split(".")[0] for name in files(node)) == ["10m", "16d", "1d", "2h"]
    for index, seconds in enumerate(delays):
        node.clock.jump((now + seconds * SECOND - node.clock.now()) / SECOND)
        run_due(node)
        assert delivered(node) == [b"a", b"b", b"c", b"d"][: index + 1]
        node = node.killed()
    assert schedules(node).count == 0


def test_large_and_compressed_rows_are_bucketed_in_several_runs(producer: Producer) -> None:
    node = Node(message_segment_size=32 << 20)
    due = node.clock.now() + 60 * SECOND
    bodies = [bytes([index]) * 700_000 for index in range(6)]
    delay(node, producer, [due + i for i in range(6)], *bodies, compression="zstd")
    delay(node, producer, due + 10, b"\7" * (16 << 20))
    node.checkpoint()
    [bucket] = schedules(node).buckets.values()
    assert len(bucket.runs) == 7
    node = node.killed()
    later(node, 61)
    assert delivered(node) == [*bodies, b"\7" * (16 << 20)]


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_file_of_a_finished_bucket_is_deleted_when_no_checkpoint_needs_it(producer: Producer) -> None:
    node = Node()
    delay(node, producer, node.clock.now() + SECOND, b"a")
    node.checkpoint()
    [path] = files(node)
    later(node, 1)
    assert schedules(node).buckets == {}
    for _ in range(KEEP):
        node.checkpoint()
        assert files(node) == [path]
    node.checkpoint()
    assert files(node) == []


def test_files_that_a_crash_left_behind_are_deleted(producer: Producer) -> None:
    node = Node()
    delay(node, producer, node.clock.now() + SECOND, b"a")
    node.checkpoint()
    later(node, 1)
    node = node.killed()
    for _ in range(KEEP + 1):
        node.checkpoint()
    assert files(node) == []
    assert delivered(node) == [b"a"]


def test_a_crash_at_any_moment_of_a_checkpoint_loses_and_repeats_nothing(producer: Producer) -> None:
    def prepared(crash_at: int | None = None) -> Node:
        node = Node(flush="sync")
        sender = Producer(7)
        now = node.clock.now()
        delay(node, sender, [now + 2 * SECOND, now + SECOND, now + 9 * DAY * SECOND], b"b", b"a", b"far")
        node.checkpoint()
        later(node, 1)
        delay(node, sender, [now + 2 * SECOND + 1, now + 9 * DAY * SECOND + 1], b"c", b"far2")
        assert delayed_requests.cancel(node.broker, "orders", 2, now + 9 * DAY * SECOND)
        node.turn()
        if crash_at is not None:
            node.disk.crash_at(crash_at)
        return node

    whole = prepared()
    first = whole.disk.operations
    whole.checkpoint()
    for operation in range(first, whole.disk.operations):
        node = prepared(operation)
        with pytest.raises(SimulatedCrash):
            node.checkpoint()
        for end in (node.killed(), node.power_lost("none"), node.power_lost("random", Random(operation))):
            assert schedules(end).count == 3
            later(end, 10 * DAY)
            assert delivered(end) == [b"a", b"b", b"c", b"far2"]


def test_a_full_disk_leaves_all_rows_in_the_log(producer: Producer) -> None:
    node = Node()
    now = node.clock.now()
    delay(node, producer, now + SECOND, b"a", b"b")
    node.checkpoint()
    delay(node, producer, [now + 2 * SECOND, now + 5 * DAY * SECOND], b"c", b"d")
    node.disk.fail("write", path=f"{DIRECTORY}/*", times=None, error=28)
    with pytest.raises(OSError, match="No space"):
        node.checkpoint()
    assert schedules(node).count == 4
    later(node, 1)
    node.disk._faults.clear()
    node.checkpoint()
    node = node.killed()
    later(node, 6 * DAY)
    assert delivered(node) == [b"a", b"b", b"c", b"d"]


def test_files_of_a_checkpoint_that_failed_after_its_manifest_was_written_are_kept(producer: Producer) -> None:
    """The manifest exists, but its process counts the checkpoint as failed."""
    node = Node()
    due = node.clock.now() + 3600 * SECOND
    for body in (b"a", b"b"):
        delay(node, producer, due, body)
        node.disk.fail("sync_directory", path="checkpoints", after=1)
        with pytest.raises(OSError, match="Input/output"):
            node.checkpoint()
        node.disk._faults.clear()
    delay(node, producer, due, b"c")
    node.disk.fail("write", path="checkpoints/*")
    with pytest.raises(OSError, match="Input/output"):
        node.checkpoint()
    for end in (node, node.killed()):
        assert schedules(end).count == 3
        end.checkpoint()
        end = end.killed()
        later(end, 3600)
        assert delivered(end) == [b"a", b"b", b"c"]
        assert schedules(end).lost_count == 0
        end.clock.jump(-3600)


def test_a_file_that_a_failed_start_left_is_not_deleted_when_it_is_used_again(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a clean stop the epoch is the same, so the next start writes a bucket with the same name."""
    monkeypatch.setattr(snapshot, "BUCKET_ROWS_NOW_MAX", 0)
    node = Node()
    delay(node, producer, [node.clock.now() + 3600 * SECOND] * 5, *numbered(0, 5))
    node.broker.stop()
    monkeypatch.undo()
    node.disk.fail("create", path="checkpoints/manifest-*", error=28)
    with pytest.raises(DiskFull):
        Node(node.disk, node.clock, node.config)
    [left] = files(node)
    node = Node(node.disk, node.clock, node.config)
    assert files(node) == [left]
    for _ in range(KEEP + 3):
        node.send("others", b"x")
        node.checkpoint()
    assert files(node) == [left]
    later(node, 3601)
    assert delivered(node) == numbered(0, 5)
    assert schedules(node).notices == []
    for _ in range(KEEP + 1):
        node.checkpoint()
    assert files(node) == []


# --- damage ---------------------------------------------------------------------------------------


def in_runs(node: Node, producer: Producer) -> str:
    """Make a bucket with three runs of two messages each. Returns its file."""
    due = node.clock.now() + 60 * SECOND
    for index in range(3):
        delay(node, producer, [due + index, due + index + 10], b"%d" % index, b"%d+" % index)
        node.checkpoint()
    [path] = files(node)
    return path


@pytest.mark.parametrize("part", [2, 5, 60, 100, 200])
def test_a_damaged_run_is_reported_and_the_others_are_delivered(producer: Producer, part: int) -> None:
    node = Node()
    path = in_runs(node, producer)
    [bucket] = schedules(node).buckets.values()
    node.disk.flip_bit(path, int(bucket.runs["offset"][1]) + part, 4)
    node = node.killed()
    later(node, 61)
    assert delivered(node) == [b"0", b"2", b"0+", b"2+"]
    assert schedules(node).lost_count == 2
    assert path in schedules(node).notices[0]
    assert schedules(node).count == 0
    node = node.killed()
    later(node, 100)
    assert delivered(node) == [b"0", b"2", b"0+", b"2+"]


def test_a_truncated_file_loses_only_the_rows_that_were_cut_off(producer: Producer) -> None:
    node = Node()
    path = in_runs(node, producer)
    [bucket] = schedules(node).buckets.values()
    file = node.disk.open(path)
    file.truncate(int(bucket.runs["offset"][2]) + 40)
    node = node.killed()
    later(node, 61)
    assert delivered(node) == [b"0", b"1", b"0+", b"1+"]
    assert schedules(node).lost_count == 2


def test_a_missing_file_loses_only_its_rows(producer: Producer) -> None:
    node = Node()
    path = in_runs(node, producer)
    delay(node, producer, node.clock.now() + 5 * DAY * SECOND, b"elsewhere")
    node.checkpoint()
    node.disk.remove(path)
    node = node.killed()
    later(node, 6 * DAY)
    assert delivered(node) == [b"elsewhere"]
    assert schedules(node).lost_count == 6
    assert count_scheduled(node.broker, None, 0, 1 << 62, "subject") == []


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_damaged_frame_of_the_log_is_reported_and_the_others_are_delivered(
    producer: Producer, bucketed: bool
) -> None:
    node = Node()
    due = node.clock.now() + 60 * SECOND
    for index in range(3):
        delay(node, producer, due + index, b"%d" % index)
    log = schedules(node).partition_of("orders").consume_log
    offset = log.record(1).offset
    segment = node.broker.message_log.segment_at(offset)
    node.disk.flip_bit(f"message/{segment.base:020d}.log", offset - segment.base + 100, 0)
    if bucketed:
        node.checkpoint()
    later(node, 61)
    assert delivered(node) == [b"0", b"2"]
    assert schedules(node).lost_count == 1
    assert schedules(node).count == 0


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_unreadable_rows_do_not_hide_the_others(producer: Producer, limit: int) -> None:
    node = Node()
    due = node.clock.now() + 60 * SECOND
    for index in range(5):
        delay(node, producer, due + index, b"%d" % index)
    log = schedules(node).partition_of("orders").consume_log
    for bad in (1, 2):
        offset = log.record(bad).offset
        segment = node.broker.message_log.segment_at(offset)
        node.disk.flip_bit(f"message/{segment.base:020d}.log", offset - segment.base + 100, 0)
    found: list[int] = []
    after, more = None, True
    while more:
        page = list_scheduled(node.broker, "orders", 0, 1 << 62, after, limit)
        assert len(page.rows) <= limit
        found += [row.number for row in page.rows]
        after, more = page.next, page.next is not None
    assert found == [0, 3, 4]


@pytest.mark.parametrize("times", [0, 3])
def test_a_damaged_frame_is_reported_once_even_if_checkpoints_fail(producer: Producer, times: int) -> None:
    node = Node()
    delay(node, producer, node.clock.now() + 60 * SECOND, b"a", b"b", b"c")
    record = schedules(node).partition_of("orders").consume_log.record(0)
    node.disk.flip_bit("message/00000000000000000000.log", record.offset + 100, 0)
    node.disk.fail("create", path="checkpoints/manifest-*", times=times, error=28)
    for _ in range(times):
        with pytest.raises(OSError, match="No space"):
            node.checkpoint()
        assert schedules(node).lost_count == 0
    node.checkpoint()
    assert schedules(node).lost_count == 3
    assert len(schedules(node).notices) == 1


def without_checkpoints(node: Node, how: str) -> Node:
    """Start without any readable checkpoint."""
    disk = node.disk.copy()
    for name in disk.list("checkpoints"):
        if how == "damaged" and name.startswith("manifest-"):
            disk.flip_bit(f"checkpoints/{name}", 20, 0)
        elif how == "gone":
            disk.remove(f"checkpoints/{name}")
    return Node(disk, node.clock, node.config)


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_files_are_quarantined_when_every_checkpoint_is_lost(producer: Producer, how: str) -> None:
    node = Node(retention_seconds=10)
    delay(node, producer, node.clock.now() + 5 * DAY * SECOND, b"a", b"b")
    node.checkpoint()
    for _ in range(KEEP + 2):
        node.send("others", b"x" * 6000)
        node.checkpoint()
        node.clock.advance(60)
    assert node.retention.run() != []
    node.turn()
    [path] = files(node)
    stored = node.disk.read(path)
    for again in range(2):
        node = without_checkpoints(node, how)
        if not again:
            assert any("quarantine/" in text for text in schedules(node).notices)
        for _ in range(KEEP + 2):
            node.send("others", b"x")
            node.checkpoint()
        node = node.killed()
        assert files(node) == []
        assert node.disk.read(f"quarantine/{path.replace('/', '-')}") == stored
        assert schedules(node).notices == []


def test_an_unfinished_first_checkpoint_quarantines_nothing(producer: Producer) -> None:
    node = Node()
    delay(node, producer, node.clock.now() + 60 * SECOND, b"a")
    node.checkpoint()
    node = without_checkpoints(node, "gone")
    assert node.disk.list("quarantine") == []
    assert schedules(node).notices == []
    later(node, 60)
    assert delivered(node) == [b"a"]


# --- listing and counting -------------------------------------------------------------------------


def in_wide_runs(node: Node, producer: Producer) -> tuple[str, int]:
    """Make a bucket with five runs whose hours overlap. Returns its file and the first due time."""
    due = (node.clock.now() // (DAY * SECOND) + 5) * DAY * SECOND
    for index in range(5):
        times = [due + hour * 3600 * SECOND + index for hour in range(3)]
        delay(node, producer, times, *[b"%d" % index * 100 for _ in range(3)])
        node.checkpoint()
    [path] = files(node)
    return path, due


def flip_body(node: Node, path: str, run: int) -> None:
    [bucket] = schedules(node).buckets.values()
    end = int(bucket.runs["offset"][run]) + int(bucket.runs["size"][run])
    node.disk.flip_bit(path, end - 50, 2)


def test_counting_does_not_read_bodies(producer: Producer) -> None:
    """Damage of a body is noticed when its row is due."""
    node = Node()
    path, due = in_wide_runs(node, producer)
    flip_body(node, path, 3)
    node = node.killed()
    assert delayed_requests.cancel(node.broker, "orders", 0, due)
    by_time = count_scheduled(node.broker, None, 0, 1 << 62, "time")
    assert [(view.bucket, view.count) for view in by_time] == [(due, 4), (due + HOUR, 5), (due + 2 * HOUR, 5)]
    by_time = count_scheduled(node.broker, "orders", due + 1, due + HOUR + 2, "time")
    assert [view.count for view in by_time] == [4, 2]
    [by_subject] = count_scheduled(node.broker, "orders", due + 1, due + HOUR + 2, "subject")
    assert by_subject.count == 6
    assert schedules(node).lost_count == 0
    later(node, 6 * DAY)
    assert schedules(node).lost_count == 3
    assert len(delivered(node)) == 11


def test_a_listing_reads_the_runs_of_its_rows_only(producer: Producer) -> None:
    node = Node()
    path, due = in_wide_runs(node, producer)
    flip_body(node, path, 3)
    node = node.killed()
    page = list_scheduled(node.broker, "orders", due + HOUR, 1 << 62, None, 3).rows
    assert [row.deliver_at - due for row in page] == [HOUR, HOUR + 1, HOUR + 2]
    assert schedules(node).lost_count == 0
    # A page without the rows of the damaged run is filled with later rows.
    assert [row.deliver_at - due for row in list_scheduled(node.broker, "orders", 0, 1 << 62, None, 5).rows] == [
        *(0, 1, 2, 4),
        HOUR,
    ]
    assert schedules(node).lost_count == 3


@pytest.mark.parametrize("what", ["list", "count", "cancel"])
def test_damaged_due_times_are_not_used(producer: Producer, what: str) -> None:
    node = Node()
    path, due = in_wide_runs(node, producer)
    [bucket] = schedules(node).buckets.values()
    stored = node.disk.read(path).index(int(due + 3).to_bytes(8, "little"), int(bucket.runs["offset"][3]))
    node.disk.flip_bit(path, stored + 2, 3)
    node = node.killed()
    if what == "list":
        assert len(list_scheduled(node.broker, "orders", 0, 1 << 62, None, 100).rows) == 12
    elif what == "count":
        assert sum(view.count for view in count_scheduled(node.broker, None, 0, 1 << 62, "time")) == 12
    else:
        assert not delayed_requests.cancel(node.broker, "orders", 9, due + 3)
    assert schedules(node).lost_count == 3


@pytest.mark.parametrize("bucketed", [False, True])
def test_compressed_rows_stay_compressed_when_they_are_bucketed_and_delivered(bucketed: bool) -> None:
    """A frame of a few kilobytes may inflate to many megabytes, which must not be written."""
    node = Node(message_segment_size=32 << 20)
    bodies = [bytes(1 << 20), b"%d" % 7 * 5_000, b"short", bytes(2 << 20)]
    due = node.clock.now() + SECOND
    times = [due, due + 2, due + 1, due]
    for producer in (7, 8):
        delay(node, Producer(producer), times, *bodies, compression="zstd")
    if bucketed:
        node.checkpoint()
        node = node.killed()
    later(node, 2.0)
    assert sorted(node.bodies("orders")) == sorted(2 * bodies)
    ids = {(row.producer, row.number): row.body for row in node.stored("orders")}
    assert ids == {(producer, 1 + number): body for producer in (7, 8) for number, body in enumerate(bodies)}
    files = node.disk.list("schedule") if bucketed else []
    stored = node.broker.message_log.end + sum(len(node.disk.read(f"schedule/{name}")) for name in files)
    assert stored < 100_000
