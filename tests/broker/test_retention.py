"""Retention by age and by size, and that it deletes no row that is still needed."""

from __future__ import annotations

import random

import msgspec
import pytest

from plait.broker import retention as retention_module
from plait.broker.views import group_view, subject_view
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from plait.storage.logs.consume_log import DIRECTORY as CONSUME
from plait.storage.marks import ArchiveMark, write_archived
from tests.broker.schedule_node import SECOND, delay, delivered, later
from tests.support.broker_node import Node, Producer


def fill(node: Node, count: int, subject: str = "orders", size: int = 400, seconds: float = 1.0) -> Producer:
    producer = Producer(sum(subject.encode()))
    for number in range(count):
        node.send(subject, b"%03d:" % number + b"x" * size, producer=producer)
        node.clock.advance(seconds)
    return producer


def test_rows_expire_after_the_retention_time_of_their_subject():
    node = Node(retention_seconds=20.5)
    fill(node, 50)
    node.retention.run()
    assert node.partition("orders").start == 30
    assert [row.sequence for row in node.stored("orders")] == list(range(30, 50))
    node.clock.advance(1000)
    node.retention.run()
    assert node.partition("orders").start == 50
    assert node.bodies("orders") == []
    assert node.send("orders", b"new", producer=Producer(3)).sequence == 50


@pytest.mark.parametrize("orderly", [True, False])
def test_a_bucketed_message_does_not_retain_the_log_after_a_restart(orderly: bool):
    node = Node(retention_seconds=20.0)
    producer = Producer(7)
    delay(node, producer, node.clock.now() + 10**6 * SECOND, b"much later")
    node.checkpoint()
    for _ in range(2):
        node = node.restart() if orderly else node.killed()
        for _ in range(KEEP):
            for _ in range(4):
                node.send("orders", b"x" * 4000, producer=producer)
            node.checkpoint()
        node.clock.advance(100)
        assert node.retention.run() != []
        assert node.broker.message_log.segments[0].end > node.broker.checkpoints.message_needed
    later(node, 10**6)
    assert delivered(node) == [b"much later"]


def test_retention_by_size_keeps_the_newest_rows():
    node = Node(retention_seconds=None, retention_bytes=5000)
    fill(node, 50)
    node.retention.run()
    log, start = node.partition("orders").consume_log, node.partition("orders").start
    kept = log.slice(log.find(start), len(log))
    assert 4000 < int(kept["size"].sum()) <= 5000
    node.broker.catalog.update_subject("orders", SubjectSettings(retention_bytes=1))
    node.retention.run()
    assert len(node.bodies("orders")) == 1, "the newest frame stays"


def test_settings_of_a_subject_override_those_of_the_server():
    node = Node(retention_seconds=10.0)
    node.broker.create_subject("long", SubjectSettings(retention_seconds=10_000.0))
    fill(node, 30, "long")
    fill(node, 30, "other")
    node.retention.run()
    assert (node.partition("long").start, node.partition("other").start) == (0, 20)
    view = subject_view(node.broker, node.partition("long"))
    assert (view.start, view.end, view.count, view.retention_seconds) == (0, 30, 30, 10_000.0)


def test_without_limits_nothing_expires():
    node = Node(retention_seconds=None)
    fill(node, 30)
    node.clock.advance(10**9)
    for _ in range(6):
        node.checkpoint()
    assert node.retention.run() == []
    assert len(node.bodies("orders")) == 30


def test_only_visible_rows_expire():
    node = Node(flush="sync", retention_seconds=1.0)
    node.send("orders", b"a")
    node.submit(Producer(9).frame("orders", b"not yet"))
    node.commit()
    node.clock.advance(100)
    node.retention.run()
    assert node.partition("orders").start == 1
    node.turn()
    assert node.bodies("orders") == [b"not yet"]


@pytest.mark.parametrize("end", [None, "restart", "killed", "power_lost"])
def test_held_rows_outlast_their_retention_time(end: str | None):
    node = Node(retention_seconds=10.0)
    consumer = node.attach("orders", "g")
    fill(node, 30)
    consumer.last_contact = node.clock.monotonic()
    node.pull(consumer, 25)
    node.retention.run()
    group = consumer.group
    assert group.lost_count == 0, "all expired rows are held by a consumer"
    node.ack(consumer, (0, 5))
    node.nack(consumer, (5, 25))
    node.turn()
    if end is not None:
        node.sync()
        node = getattr(node, end)()
        node.retention.run()
        consumer = node.attach("orders", "g", holds=[])
    got = node.pull(consumer)
    assert sorted(got.ranges)[-1] == (25, 30, 1)
    assert sorted(row.sequence for row in got.rows) == list(range(5, 30))
    assert all(row.body.startswith(b"%03d:" % row.sequence) for row in got.rows)
    assert {attempt for start, _, attempt in got.ranges if start < 25} == {2}
    assert group_view(consumer.group).lost == 0
    for first, last, _ in got.ranges:
        node.ack(consumer, *((first, last, epoch) for _, epoch in node.partition("orders").epochs))
    node.retention.run()
    assert len(consumer.group.retained) == 0, "no copy is kept that no group needs"


def test_segments_are_deleted_only_when_the_rows_copied_from_them_are_durable():
    node = Node(retention_seconds=10.0)
    consumer = node.attach("orders", "g")
    fill(node, 100)
    consumer.last_contact = node.clock.monotonic()
    node.pull(consumer, 25)
    node.sync()
    for _ in range(5):
        node.checkpoint()
    assert node.retention.run() == []
    again = node.power_lost()
    assert len(again.stored("orders")) == 100
    node.turn()
    node.sync()
    assert node.retention.run() != []
    again = node.power_lost()
    again.clock.advance(6)
    again.membership.lose_silent()
    got = again.pull(again.attach("orders", "g", "c2"))
    assert [row.sequence for row in got.rows][:25] == list(range(25))


def test_a_group_overtaken_by_retention_continues_at_the_start():
    node = Node(retention_seconds=10.0)
    node.attach("orders", "g")
    fill(node, 30)
    node.retention.run()
    node.turn()
    group = node.group("orders", "g")
    assert (group.lost_count, group.cursor.next) == (20, 20)
    again = node.killed()
    assert again.group("orders", "g").lost_count == 20
    again.clock.advance(6)
    again.membership.lose_silent()
    assert again.pull(again.attach("orders", "g", "c2")).ranges == [(20, 30, 1)]


def test_segments_are_deleted_when_no_checkpoint_needs_them():
    node = Node(retention_seconds=10.0)
    fill(node, 100)
    assert node.retention.run() == [], "the only checkpoint is of the start"
    for _ in range(5):
        node.checkpoint()
    removed = node.retention.run()
    assert removed == [8192 * n for n in range(len(removed))]
    assert len(removed) >= 4
    assert node.broker.message_log.start == 8192 * len(removed)
    assert [row.sequence for row in node.stored("orders")] == list(range(90, 100))
    assert node.retention.run() == []


def test_the_action_log_is_deleted_up_to_the_oldest_checkpoint():
    node = Node(retention_seconds=None)
    consumer = node.attach("orders", "g")
    for number in range(100):
        node.send("orders", b"x")
        node.pull(consumer)
        node.ack(consumer, (number, number + 1))
    for _ in range(5):
        node.checkpoint()
    before = node.broker.action_log.start
    node.retention.run()
    assert node.broker.action_log.start > before
    again = node.killed()
    assert again.group("orders", "g").cursor.floor == 100


def test_rows_of_a_deleted_segment_stay_expired_after_a_crash_that_lost_the_new_start():
    node = Node(flush="sync", retention_seconds=10.0)
    fill(node, 100)
    for _ in range(5):
        node.checkpoint()
    assert node.retention.run()
    again = node.power_lost()
    assert again.partition("orders").start == 0, "the checkpoint is from before retention"
    consumer = again.attach("orders", "fresh")
    got = [row.sequence for row in again.pull(consumer).rows]
    assert got == list(range(got[0], 100))
    assert again.partition("orders").start == got[0] <= 90
    assert again.partition("orders").consume_log.record(0).offset < again.broker.message_log.start
    assert [body[:4] for body in again.bodies("orders")] == [b"%03d:" % sequence for sequence in got]


def test_a_start_succeeds_after_a_crash_that_undid_some_deletions():
    for seed in range(20):
        node = Node(flush="sync", retention_seconds=10.0)
        fill(node, 60)
        for _ in range(5):
            node.checkpoint()
        crashed = node.disk.copy()
        for name in crashed.list("message")[:-2]:
            crashed.remove(f"message/{name}")
        left = crashed.after_crash(random.Random(seed))
        again = Node(left, node.clock, node.config)
        got = [row.sequence for row in again.pull(again.attach("orders", "g"), 1000).rows]
        assert got[-10:] == list(range(50, 60))
        assert got == sorted(set(got))


def test_the_consume_log_drops_expired_records(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention_module, "COMPACT_FROM", 20)
    node = Node(retention_seconds=10.0)
    fill(node, 100)
    for _ in range(5):
        node.checkpoint()
    node.retention.run()
    partition = node.partition("orders")
    assert (len(partition.consume_log), partition.consume_log.generation) == (10, 1)
    assert [row.sequence for row in node.stored("orders")] == list(range(90, 100))
    assert [row.sequence for row in node.killed().stored("orders")][-10:] == list(range(90, 100))
    node.checkpoint()
    assert node.disk.list(CONSUME) == ["00000001.0", "00000001.1"], "older checkpoints need the old file"
    for _ in range(6):
        node.send("orders", b"x")
        node.checkpoint()
    assert node.disk.list(CONSUME) == ["00000001.1"]
    assert [row.sequence for row in node.killed().stored("orders")] == list(range(90, 106))


def test_a_lost_consume_log_is_rebuilt():
    node = Node(flush="sync")
    fill(node, 40)
    fill(node, 10, "other")
    node.checkpoint()
    producer = fill(node, 5, "third")
    rows = node.stored("orders")
    node.disk.remove(f"{CONSUME}/00000001.0")
    again = node.power_lost("all")
    assert again.report.rebuilt_consume_logs == 1
    assert again.stored("orders") == rows
    assert len(again.stored("other")) == 10
    assert again.send("third", b"next", producer=producer).sequence == 5
    later = again.power_lost()
    assert later.report.rebuilt_consume_logs == 0
    assert later.stored("orders") == rows


def test_segments_are_kept_until_they_are_archived():
    node = Node(retention_seconds=10.0, archive_before_delete=True)
    consumer = node.attach("orders", "billing")
    for _ in range(100):
        node.send("orders", b"x" * 400)
        for start, end, _ in node.pull(consumer).ranges:
            node.ack(consumer, (start, end))
    for _ in range(6):
        node.clock.advance(100)
        node.checkpoint()
    messages, actions = ([segment.base for segment in log.segments] for log in node.broker.logs[::2])
    assert len(messages) > 3
    assert len(actions) > 3
    assert node.retention.run() == []
    assert node.partition("orders").start == 100, "the rows have expired nevertheless"
    assert [segment.base for segment in node.broker.action_log.segments] == actions
    write_archived(node.disk, ArchiveMark(messages[2], actions[1]))
    assert node.retention.run() == messages[:2]
    assert [segment.base for segment in node.broker.action_log.segments] == actions[1:]
    node.broker.stop()


def test_reasons_of_dead_letters_are_kept_until_they_are_archived():
    node = Node(retention_seconds=10.0, dead_seconds=10.0, archive_before_delete=True)
    consumer = node.attach("orders", "billing", retry=Retry(attempts=1))
    for _ in range(40):
        node.send("orders", b"x" * 400)
        node.nack(consumer, *[(start, end) for start, end, _ in node.pull(consumer).ranges])
    for _ in range(6):
        node.clock.advance(100)
        node.retention.run()
        node.checkpoint()
    kept = [segment.base for segment in node.broker.retained_log.segments]
    assert len(kept) > 3
    assert len(node.group("orders", "billing").retained) == 0, "the group no longer needs them"
    write_archived(node.disk, ArchiveMark(0, 0, retained_offset=kept[2]))
    node.retention.run()
    assert [segment.base for segment in node.broker.retained_log.segments] == kept[2:]
    node.broker.stop()


def test_the_archive_mark_has_no_effect_if_retention_does_not_wait_for_the_archive():
    node = Node(retention_seconds=10.0)
    fill(node, 60)
    write_archived(node.disk, ArchiveMark(1, 1))
    for _ in range(6):
        node.clock.advance(100)
        node.checkpoint()
    segments = len(node.broker.message_log.segments)
    assert segments > 3
    assert len(node.retention.run()) == segments - 1
    node.broker.stop()


def test_a_retention_run_over_expired_partitions_opens_no_consume_log():
    node = Node(retention_seconds=10.0)
    fill(node, 20)
    node.clock.advance(100)
    node.retention.run()
    node.checkpoint()
    node.partition("orders").consume_log.unmap()
    node.retention.run()
    assert not node.partition("orders").consume_log.mapped


def pass_seconds(node: Node, seconds: int) -> int:
    """Do the periodic work of a server for this many seconds. Returns the number of checkpoints."""
    checkpoints = 0
    for _ in range(seconds):
        node.clock.advance(1)
        node.turn()
        node.sync()
        if node.broker.snapshots.due:
            node.checkpoint()
            checkpoints += 1
            node.broker.catalog.retention_wanted |= node.broker.snapshots.wanted
        if node.broker.catalog.retention_wanted:
            node.retention.run()
    return checkpoints


def test_deleted_messages_leave_an_idle_disk_within_a_minute():
    node = Node(retention_seconds=None)
    fill(node, 60, "big", seconds=0.0)
    fill(node, 1, "small", seconds=0.0)
    pass_seconds(node, 120)
    assert len(node.broker.message_log.segments) > 3
    node.broker.delete_subject("small")
    node.broker.delete_subject("big")
    pass_seconds(node, 60)
    assert len(node.broker.message_log.segments) == 1
    assert len(node.broker.checkpoints._kept) == KEEP, "a start may use any of them"
    assert node.broker.checkpoints.message_needed >= node.broker.message_log.start, (
        "no checkpoint needs a deleted segment"
    )
    assert pass_seconds(node, 120) <= 1, "the broker is idle again"
    node.send("big", b"again")
    assert node.bodies("big") == [b"again"]


def test_delayed_messages_retain_the_log_without_frequent_checkpoints():
    node = Node(retention_seconds=5.0)
    fill(node, 60, "big", seconds=0.0)
    node.checkpoint()
    last = node.broker.checkpoints.last
    assert last is not None
    # As if a checkpoint had left delayed rows of the first segment unbucketed.
    node.broker.checkpoints._kept[:] = [msgspec.structs.replace(each, unbucketed_offset=0) for each in [last]]
    node.broker.checkpoints.last = node.broker.checkpoints._kept[-1]
    node.clock.advance(100)
    node.retention.run()
    assert not node.broker.snapshots.wanted


@pytest.mark.parametrize("orderly", [True, False])
def test_consume_logs_of_deleted_partitions_are_deleted_after_a_restart(orderly: bool):
    node = Node()
    for number in range(5):
        node.send(f"subject-{number}", b"x")
    node.checkpoint()
    for number in range(4):
        node.broker.delete_subject(f"subject-{number}")
    node.turn()
    node = node.restart() if orderly else node.killed()
    for number in range(KEEP + 2):
        node.send("subject-4", b"%d" % number, producer=Producer(number + 9))
        node.checkpoint()
    assert node.disk.list(CONSUME) == ["00000005.0"]
    assert len(node.killed().bodies("subject-4")) == KEEP + 3


def test_an_old_consume_log_file_is_not_deleted_when_its_name_is_used_again():
    node = Node(retention_seconds=50.0)
    node.send("orders", b"first")
    node.checkpoint()
    # A generation that the start does not know, as after a start from an older checkpoint.
    node.disk.open(f"{CONSUME}/00000001.1", create=True).write([b"old"], 0)
    node = node.killed()
    log = node.partition("orders").consume_log
    log.replace(log.slice(0, len(log)).copy())
    for number in range(KEEP + 2):
        node.send("orders", b"%d" % number, producer=Producer(number + 9))
        node.checkpoint()
    assert "00000001.1" in node.disk.list(CONSUME)
    assert len(node.killed().bodies("orders")) == KEEP + 3
    assert node.killed().report.rebuilt_consume_logs == 0


def test_an_active_segment_without_retained_rows_is_deleted_too():
    node = Node(retention_seconds=None)
    fill(node, 13, "big", seconds=0.0)
    assert [segment.base for segment in node.broker.message_log.segments] == [0]
    node.broker.delete_subject("big")
    pass_seconds(node, 60)
    [segment] = node.broker.message_log.segments
    assert segment.base > 0
