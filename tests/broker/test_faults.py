"""A full disk refuses sends, an I/O error stops the broker: with clear errors, and no acknowledged row is lost."""

from __future__ import annotations

import errno

import pytest

from plait.errors import DiskFull, FlowControl, StorageFailed
from plait.limits import ServerLimits
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node, Producer, Pulled, Sent

# --- no space -----------------------------------------------------------------------------------


def fill_up(node: Node) -> None:
    """Fill the disk: existing files can be written, but no file can be created."""
    node.disk.capacity = node.disk.capacity - node.disk.space()[0]
    assert node.disk.space()[0] == 0


def give_space(node: Node) -> None:
    node.disk.capacity += 1 << 20


def send_until_refused(node: Node, producer: Producer) -> list[Sent]:
    sends: list[Sent] = []
    while not sends or sends[-1].acknowledged:
        sends.append(node.send("orders", b"x" * 700, producer=producer))
        assert len(sends) < 100
    return sends


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_a_full_disk_refuses_sends_until_there_is_space(flush: str):
    node = Node(flush=flush)
    consumer = node.attach("orders", "g")
    producer = Producer(5)
    fill_up(node)
    *stored, refused = send_until_refused(node, producer)
    assert isinstance(refused.error, DiskFull)
    assert "nothing was stored" in refused.error.message
    assert node.broker.turn.failed is None
    assert len(node.bodies("orders")) == len(stored)
    assert len(node.pull(consumer).rows) == len(stored), "consumers are served meanwhile"
    assert node.ack(consumer, (0, len(stored))) == [True]
    assert isinstance(node.submit(Sent("orders", refused.data, refused.bodies)).answers, list)
    node.turn()
    give_space(node)
    again = node.submit(Sent("orders", refused.data, refused.bodies))
    node.turn()
    assert again.sequence == len(stored)
    assert node.power_lost("all").bodies("orders") == [b"x" * 700] * (len(stored) + 1)


def test_frames_are_stored_until_one_finds_no_space_and_the_rest_are_refused():
    node = Node()
    producer = Producer(5)
    node.partition("orders")
    node.turn()
    fill_up(node)
    # Space for some of them.
    node.disk.capacity += 8_000
    timed = [{}, {"send_time": 5}]
    sends = [node.submit(producer.frame("orders", b"x" * 2500, **timed[n % 2])) for n in range(6)]
    node.turn()
    outcomes = [sent.acknowledged for sent in sends]
    assert outcomes == sorted(outcomes, reverse=True)
    assert {True, False} == set(outcomes)
    assert all(len(sent.answers) == 1 for sent in sends)
    assert all(isinstance(sent.error, DiskFull) for sent in sends if not sent.acknowledged)
    give_space(node)
    assert node.killed().bodies("orders") == [b"x" * 2500] * outcomes.count(True)


def test_a_subject_cannot_be_made_on_a_full_disk():
    node = Node()
    fill_up(node)
    with pytest.raises(DiskFull, match="the disk is full"):
        node.broker.create_subject("orders")
    assert node.broker.subjects == {}
    give_space(node)
    node.broker.create_subject("orders")
    assert node.send("orders", b"a").acknowledged


def stall(node: Node, count: int = 400) -> tuple[Pulled, list[bool]]:
    """Fill the disk and the segment of the action log, so that the last ack cannot be recorded."""
    for number in range(count):
        node.send("orders", b"%d" % number)
    consumer = node.attach("orders", "g")
    once = node.attach("orders", "once", "o1", delivery="at_most_once")
    fill_up(node)
    for sequence in range(count):
        answered: list[bool] = []
        node.broker.pull(consumer, 1, 1 << 20, 0, lambda delivery: None)
        node.broker.ack(consumer, [(sequence, sequence + 1, node.broker.turn.epoch)], lambda: answered.append(True))  # noqa: B023
        pulled = Pulled()
        node.broker.pull(once, 1, 1 << 20, 0, pulled.answer)
        node.turn()
        if not answered:
            return pulled, answered
        assert pulled.answered
    raise AssertionError("the action log never ran out of space")


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_without_space_for_events_acks_are_not_answered_and_rows_not_delivered(flush: str):
    node = Node(flush=flush, message_segment_size=64 * 1024)
    pulled, answered = stall(node)
    assert node.broker.turn.failed is None
    assert not pulled.answered, "at most once: the pull event is not in the log"
    group = node.group("orders", "g")
    consumer = group.consumers["c1"]
    with pytest.raises(DiskFull, match="cannot record progress"):
        node.pull(consumer)
    with pytest.raises(DiskFull):
        node.ack(consumer, (0, 1))
    with pytest.raises(DiskFull):
        node.attach("orders", "new")
    acked = group.cursor.floor
    node.sync()
    assert not pulled.answered
    give_space(node)
    assert node.killed().group("orders", "g").cursor.floor == acked - 1
    node.broker.turn.check_space()
    node.turn()
    assert answered == [True]
    assert len(pulled.rows) == 1
    assert node.pull(consumer, 1).ranges == [(acked, acked + 1, 1)]
    again = node.power_lost()
    assert again.group("orders", "g").cursor.floor == acked


def test_a_checkpoint_that_finds_no_space_is_made_later():
    node = Node(flush="sync")
    consumer = node.attach("orders", "g")
    for number in range(20):
        node.send("orders", b"%d" % number)
    fill_up(node)
    work = node.broker.snapshots.begin().copy_all()
    node.send("orders", b"meanwhile")
    work.run()
    node.broker.snapshots.end(work)
    assert work.error is not None
    assert work.error.errno == errno.ENOSPC
    assert node.broker.turn.failed is None
    with pytest.raises(OSError, match="No space"):
        node.checkpoint()
    node.pull(consumer)
    node.ack(consumer, (0, 21))
    give_space(node)
    node.checkpoint()
    again = node.power_lost()
    assert again.report.scanned_bytes == 0
    assert len(again.bodies("orders")) == 21
    assert again.group("orders", "g").cursor.floor == 21


def test_an_abandoned_checkpoint_loses_nothing():
    node = Node(flush="sync")
    consumer = node.attach("orders", "g")
    node.send("orders", b"a")
    node.pull(consumer)
    node.ack(consumer, (0, 1))
    node.broker.snapshots.begin().copy_all()
    again = node.restart()
    assert again.report.clean
    assert again.bodies("orders") == [b"a"]
    assert again.group("orders", "g").cursor.floor == 1


def test_a_start_on_a_full_disk_fails_clearly_and_a_stop_loses_nothing():
    node = Node(flush="sync")
    node.send("orders", b"a")
    fill_up(node)
    node.broker.stop()
    with pytest.raises(DiskFull, match="free some space"):
        Node(node.disk, node.clock, node.config)
    give_space(node)
    again = Node(node.disk, node.clock, node.config)
    assert again.bodies("orders") == [b"a"]
    assert not again.report.clean


# --- watermarks ---------------------------------------------------------------------------------


def test_sends_are_refused_above_the_watermark_and_below_the_floor():
    node = Node(SimulatedDisk(capacity=1 << 20), disk_used_max=0.5, disk_free_min=1000)
    node.broker.turn.check_space()
    node.send("orders", b"a")
    ballast = node.disk.open("ballast", create=True)
    ballast.allocate(600_000)
    assert node.send("orders", b"b").acknowledged, "the result of the last check applies until the next one"
    node.broker.turn.check_space()
    refused = node.send("orders", b"c")
    assert isinstance(refused.error, DiskFull)
    assert "watermark 50%" in refused.error.message
    with pytest.raises(DiskFull):
        node.partition("new")
    assert node.pull(node.attach("orders", "g")).bodies == [b"a", b"b"]
    ballast.truncate(0)
    node.broker.turn.check_space()
    resent = node.submit(Sent("orders", refused.data, refused.bodies))
    node.turn()
    assert resent.acknowledged
    free = node.disk.space()[0]
    ballast.allocate(free - 999)
    node.broker.turn.check_space()
    assert "minimum" in node.send("orders", b"d", producer=Producer(9)).error.message


# --- I/O errors ---------------------------------------------------------------------------------


def check_stopped(node: Node, doubtful: list[Sent]) -> None:
    """Check that no send was answered, nothing is visible, and every request is refused."""
    assert isinstance(node.broker.turn.failed, StorageFailed)
    assert all(sent.answers == [] for sent in doubtful)
    visible = node.partition("orders").visible
    with pytest.raises(StorageFailed, match="the server stops and must recover"):
        node.broker.submit(node.partition("orders"), Producer(99).frame("orders", b"x").view, None)
    group = node.partition("orders").groups.get("g")
    if group is not None:
        with pytest.raises(StorageFailed):
            node.pull(group.consumers["c1"])
        with pytest.raises(StorageFailed):
            node.ack(group.consumers["c1"], (0, 1))
    with pytest.raises(StorageFailed):
        node.broker.turn.begin_sync()
    with pytest.raises(StorageFailed):
        node.checkpoint()
    node.commit()
    assert node.partition("orders").visible == visible
    assert all(sent.answers == [] for sent in doubtful)


@pytest.mark.parametrize("path", ["message/*", "action/*"])
@pytest.mark.parametrize("flush", ["async", "sync"])
def test_after_a_failed_write_nothing_is_acknowledged(flush: str, path: str):
    node = Node(flush=flush)
    consumer = node.attach("orders", "g")
    acknowledged = [node.send("orders", b"%d" % number) for number in range(5)]
    assert all(sent.acknowledged for sent in acknowledged)
    node.pull(consumer)
    node.disk.fail("write", path=path)
    sent = node.submit(Producer(7).frame("orders", b"doubtful"))
    answered: list[bool] = []
    node.broker.ack(consumer, [(0, 3, node.broker.turn.epoch)], lambda: answered.append(True))
    node.commit()
    assert answered == []
    check_stopped(node, [sent])
    for again in (node.killed(), node.power_lost("all")):
        assert again.bodies("orders")[:5] == [b"%d" % number for number in range(5)]
        resent = again.submit(Sent("orders", sent.data, sent.bodies))
        again.turn()
        assert resent.acknowledged
        assert again.bodies("orders") == [*(b"%d" % number for number in range(5)), b"doubtful"]


@pytest.mark.parametrize("path", ["message/*", "action/*"])
def test_after_a_failed_sync_nothing_is_acknowledged(path: str):
    node = Node(flush="sync")
    consumer = node.attach("orders", "g")
    node.send("orders", b"safe")
    node.pull(consumer)
    node.disk.fail("sync", path=path)
    sent = node.submit(Producer(7).frame("orders", b"doubtful"))
    answered: list[bool] = []
    node.broker.ack(consumer, [(0, 1, node.broker.turn.epoch)], lambda: answered.append(True))
    node.turn()
    assert answered == []
    check_stopped(node, [sent])
    for keep in ("none", "all"):
        again = node.power_lost(keep)  # type: ignore[arg-type]
        assert again.bodies("orders")[0] == b"safe"
        resent = again.submit(Sent("orders", sent.data, sent.bodies))
        again.turn()
        assert resent.acknowledged
        assert again.bodies("orders") == [b"safe", b"doubtful"]


def test_a_running_sync_acknowledges_nothing_after_another_failed():
    node = Node(flush="sync")
    sent = node.submit(Producer(7).frame("orders", b"doubtful"))
    node.commit()
    one, checkpoint = node.broker.turn.begin_sync(), node.broker.snapshots.begin().copy_all()
    node.disk.fail("sync", path="message/*")
    with pytest.raises(OSError, match=r"\[Errno 5\]") as raised:
        one.run()
    node.broker.turn.storage_failed(raised.value)
    number = node.broker.checkpoints.last.number
    # The operating system reports the failure once: a second sync of the same file would succeed.
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        checkpoint.run()
    node.broker.snapshots.end(checkpoint)
    assert node.broker.checkpoints.last.number == number
    check_stopped(node, [sent])


def test_an_error_while_a_segment_is_created_stops_the_broker():
    node = Node()
    producer = Producer(5)
    node.send("orders", b"first")
    node.disk.fail("allocate", path="message/*")
    sends = [node.submit(producer.frame("orders", b"x" * 3000)) for _ in range(4)]
    node.commit()
    check_stopped(node, sends)


def test_an_error_while_the_full_segment_is_written_stops_the_broker():
    node = Node()
    node.send("orders", b"first")
    producer = Producer(5)
    node.disk.fail("write", path="message/*")
    sends = [node.submit(producer.frame("orders", b"x" * 3000, send_time=n)) for n in range(4)]
    node.commit()
    check_stopped(node, sends)
    assert node.killed().bodies("orders")[:1] == [b"first"]


def test_a_failed_broker_writes_no_checkpoint_when_it_stops():
    node = Node(flush="sync")
    node.send("orders", b"safe")
    node.disk.fail("sync", path="message/*")
    node.send("orders", b"doubtful")
    before = node.broker.checkpoints.last
    node.broker.stop()
    assert node.broker.checkpoints.last is before
    assert not node.power_lost().report.clean


# --- flow control -------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_sends_are_refused_while_the_log_is_busy_for_too_long(flush: str):
    node = Node(flush=flush, limits=ServerLimits(log_busy_seconds=1.0))
    node.send("orders", b"a")
    work = node.broker.turn.begin_sync()
    assert node.broker.turn.syncs
    node.clock.advance(0.9)
    sent = node.submit(Producer(7).frame("orders", b"b"))
    assert sent.answers == []
    node.clock.advance(0.2)
    refused = node.submit(Producer(8).frame("orders", b"c"))
    assert isinstance(refused.error, FlowControl)
    assert "busy for 1.1 s; nothing was stored, send again later" in refused.error.message
    work.run()
    node.broker.turn.end_sync(work)
    assert not node.broker.turn.syncs
    assert node.send("orders", b"d").acknowledged
    node.turn()
    assert sent.acknowledged
    assert b"c" not in node.bodies("orders")


def test_sends_are_refused_while_the_oldest_one_waits_too_long_for_a_sync():
    node = Node(flush="sync", limits=ServerLimits(queue_head_seconds=0.2))
    head = node.submit(Producer(7).frame("orders", b"head"))
    node.commit()
    node.clock.advance(0.3)
    work = node.broker.turn.begin_sync()
    assert isinstance(node.submit(Producer(8).frame("orders", b"b")).error, FlowControl)
    work.run()
    node.broker.turn.end_sync(work)
    assert head.acknowledged
    second = node.broker.turn.begin_sync()
    assert node.submit(Producer(9).frame("orders", b"c")).answers == []
    second.run()
    node.broker.turn.end_sync(second)


def test_the_log_is_busy_until_both_of_two_syncs_are_done():
    node = Node(limits=ServerLimits(log_busy_seconds=1.0))
    node.send("orders", b"a")
    first, second = node.broker.turn.begin_sync(), node.broker.turn.begin_sync()
    node.clock.advance(2)
    second.run()
    node.broker.turn.end_sync(second)
    assert node.broker.turn.syncs
    assert isinstance(node.send("orders", b"b").error, FlowControl)
    first.run()
    node.broker.turn.end_sync(first)
    assert node.send("orders", b"c", producer=Producer(7)).acknowledged


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_a_long_checkpoint_makes_the_log_busy_only_while_it_syncs_the_logs(flush: str):
    node = Node(flush=flush, limits=ServerLimits(log_busy_seconds=1.0))
    before = node.submit(Producer(6).frame("orders", b"a"))
    producers = (Producer(number) for number in range(7, 100))
    during: dict[str, Sent] = {}

    def slow(operation: str, path: str, size: int) -> None:
        directory = path.split("/")[0]
        if directory not in during:
            node.clock.advance(2.0)
            during[directory] = node.submit(next(producers).frame("orders", b"b"))

    work = node.broker.snapshots.begin().copy_all()
    node.disk.on_operation = slow
    work.run()
    node.disk.on_operation = None
    assert {"message", "consume", "checkpoints"} <= set(during)
    assert isinstance(during.pop("message").error, FlowControl)
    during.pop("action", None)
    node.broker.snapshots.end(work)
    node.turn()
    assert all(sent.acknowledged for sent in [before, *during.values()])
