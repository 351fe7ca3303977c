"""Stages: their rows are invisible until they are published, and then visible once (R23)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from plait.broker.partitions import sealing
from plait.broker.staging import stage_publisher as staging
from plait.errors import (
    DamageError,
    DiskFull,
    FlowControl,
    FrameError,
    InvalidArgument,
    LimitExceeded,
    OutOfSequence,
    ProducerConflict,
    StaleRoute,
)
from plait.limits import ServerLimits
from plait.model.logical_partitions import lp_of_key
from plait.storage.catalog import Fence
from plait.storage.logs.segment import segment_name
from plait.testing.simulated_disk import SimulatedCrash
from plait.wire import codec
from tests.broker.schedule_node import SECOND, later, schedules
from tests.broker.stage_node import Task, ask, ask_and_settle, complete, publish, settle, staged
from tests.support.broker_node import Node, Producer, rows_of
from tests.support.progress import within_cpu_seconds


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def task() -> Task:
    return Task(11)


def keyed(*keys: str) -> dict[str, object]:
    """Columns of rows with these keys."""
    from plait.client.send.open_rows import hash_keys

    return {"keys": list(keys), "key_hashes": hash_keys(keys, len(keys))}


# --- writing ----------------------------------------------------------------------------------------


def test_published_rows_are_visible_once_with_their_ids_and_in_order(node: Node, task: Task) -> None:
    consumer = node.attach("orders", "g")
    node.send("orders", b"before")
    task.write(node, b"a", b"b")
    node.send("orders", b"between")
    task.write(node, b"c")
    pulled = node.pull(consumer)
    complete(node, task)
    publish(node, task)
    assert [row.body for row in pulled.rows] == [b"before", b"between"]
    rows = node.pull(consumer).rows
    assert [(row.sequence, row.producer, row.number, row.body) for row in rows] == [
        (2, 11, 1, b"a"),
        (3, 11, 2, b"b"),
        (4, 11, 3, b"c"),
    ]
    assert staged(node) == 0


def test_publishing_again_changes_nothing(node: Node, task: Task) -> None:
    task.write(node, b"a")
    first, second = ask(node, [task]), ask(node, [task])
    settle(node)
    publish(node, task)
    assert (first, second) == ([None], [None])
    assert node.bodies("orders") == [b"a"]


def test_a_resent_frame_is_staged_once(node: Node, task: Task) -> None:
    sent = task.write(node, b"a", b"b")
    assert task.submit(node, sent).sequence == 0
    task.write(node, b"c")
    publish(node, task)
    assert node.bodies("orders") == [b"a", b"b", b"c"]


def test_a_gap_is_refused(node: Node, task: Task) -> None:
    task.write(node, b"a")
    task.frame(b"never sent")
    refused = task.submit(node, task.frame(b"c"))
    assert isinstance(refused.error, OutOfSequence)
    assert refused.error.details["last"] == 1


def test_other_rows_with_the_producer_sequences_of_staged_rows_are_refused(node: Node, task: Task) -> None:
    task.write(node, b"a", b"b")
    task.write(node, b"c")
    other = Task(task.stage.producer)
    for bodies in ((b"A", b"B"), (b"a",), (b"a", b"b", b"c")):
        other.count = 0
        sent = other.submit(node, other.frame(*bodies))
        assert isinstance(sent.error, ProducerConflict)


def test_only_its_own_producer_writes_to_a_stage(node: Node, task: Task) -> None:
    task.write(node, b"a")
    stranger = Task(12)
    stranger.count = 1
    partition = task.open(node)
    with pytest.raises(FrameError, match="own producer"):
        node.broker.submit(partition, stranger.frame(b"b").view, None)
    with pytest.raises(FrameError, match="unsequenced"):
        node.broker.submit(partition, Producer(11).frame("orders", b"b").view, None)
    with pytest.raises(FrameError, match="separate stages"):
        node.broker.submit(partition, task.frame(b"b", deliver_at=1).view, None)


def test_a_producer_has_one_stage(node: Node, task: Task) -> None:
    task.write(node, b"a")
    with pytest.raises(InvalidArgument, match="another stage"):
        node.broker.stages.open("payments", task.stage)
    with pytest.raises(InvalidArgument, match="another stage"):
        node.broker.stages.open("orders", msgspec.structs.replace(task.stage, batch=2))


def test_the_number_of_stages_is_limited() -> None:
    node = Node(limits=ServerLimits(stages=2))
    Task(1).write(node, b"a")
    second = Task(2)
    second.write(node, b"b")
    with pytest.raises(LimitExceeded, match=r"stage limit reached \(2 per broker"):
        Task(3).open(node)
    publish(node, second)
    Task(3).open(node)


# --- committing -------------------------------------------------------------------------------------


def test_an_incomplete_stage_is_not_published(node: Node, task: Task) -> None:
    task.write(node, b"a")
    task.frame(b"lost")
    for call in (node.broker.stages.complete, node.broker.publisher.publish):
        with pytest.raises(DamageError, match="has 1 rows, not 2"):
            call([task.named], lambda _: None)
    assert staged(node) == 1


def test_dropped_stages_are_deleted_unless_their_publishing_has_begun(node: Node, task: Task) -> None:
    other = Task(12)
    task.write(node, b"a")
    other.write(node, b"b")
    answers = ask(node, [other])
    assert node.broker.stages.drop([11, 12, 13]) == 1
    settle(node)
    assert answers == [None]
    assert node.bodies("orders") == [b"b"]
    assert staged(node.killed()) == 0


def test_the_commit_of_a_batch_deletes_the_stages_of_failed_attempts(node: Node) -> None:
    failed, good = Task(1, batch=7), Task(2, batch=7)
    next_batch, other_query = Task(3, batch=8), Task(4, batch=7, query="another")
    for each in (failed, good, next_batch, other_query):
        each.write(node, b"%d" % each.stage.producer)
    publish(node, good)
    assert node.broker.stages.forget("q", 7) == 1
    publish(node, next_batch, other_query)
    assert sorted(node.bodies("orders")) == [b"2", b"3", b"4"]


def test_delayed_rows_are_scheduled_when_they_are_published(node: Node) -> None:
    task = Task(11, delayed=True)
    now = node.clock.now()
    task.write(node, b"far", b"near", deliver_at=np.array([now + 20 * SECOND, now + SECOND], np.int64))
    later(node, 5)
    assert node.bodies("orders") == []
    publish(node, task)
    later(node, 0.1)
    assert node.bodies("orders") == [b"near"]
    assert schedules(node).count == 1
    node = node.killed()
    later(node, 20)
    assert node.bodies("orders") == [b"near", b"far"]


def test_impossible_due_times_are_refused(node: Node) -> None:
    task = Task(11, delayed=True)
    refused = task.submit(node, task.frame(b"a", deliver_at=node.clock.now() + 10**15))
    assert isinstance(refused.error, InvalidArgument)


def test_a_full_disk_delays_publishing_and_loses_nothing(node: Node, task: Task) -> None:
    task.write(node, b"a")
    answers = ask(node, [task])
    node.broker.turn.low_space = "full"
    node.turn()
    assert not answers
    with pytest.raises(DiskFull):
        ask(node, [task])
    node.broker.turn.low_space = ""
    node.later(2)
    assert answers == [None]
    assert node.bodies("orders") == [b"a"]


def test_damage_in_a_stage_is_reported_and_blocks_no_other_stage(node: Node, task: Task) -> None:
    other = Task(12)
    task.write(node, b"spoilt")
    partition = task.open(node)
    other.write(node, b"b")
    record = partition.consume_log.record(0)
    node.disk.flip_bit(f"message/{segment_name(0)}", record.offset + record.size - 1, 0)
    answers = ask(node, [task, other])
    settle(node)
    [error] = answers
    assert isinstance(error, DamageError)
    assert node.bodies("orders") == [b"b"]
    assert isinstance(ask_and_settle(node, task), DamageError)


def test_rows_without_a_consume_log_record_are_damage_and_stop_publishing(node: Node, task: Task) -> None:
    task.write(node, b"whole")
    task.write(node, b"spoilt")
    node.checkpoint()
    log = task.open(node).consume_log
    record = log.record(1)
    node.disk.flip_bit(f"message/{segment_name(0)}", record.offset + record.size - 1, 0)
    # The rebuilt consume log ends before rows that the checkpoint includes.
    node.disk.remove(log.path)
    node = node.killed()
    with within_cpu_seconds(5):
        assert isinstance(ask_and_settle(node, task), DamageError)


def test_the_error_for_a_missing_segment_names_the_stage(node: Node, task: Task) -> None:
    task.write(node, b"a")
    for _ in range(3):
        node.send("other", *[b"y" * 1000] * 7)
    log = node.broker.message_log
    assert log.remove_before(log.segments[1].base)
    with pytest.raises(DamageError, match=r"row 0 of the stage of producer 000000000000000b .* run 'plait doctor'"):
        node.broker.stages.read(11, 0, 1 << 20)


# --- routes -----------------------------------------------------------------------------------------


def sealed(node: Node, lps: list[tuple[int, int]], version: int = 2) -> list[Fence]:
    fences: list[Fence] = []
    sealing.seal(node.broker, "orders", lps, version, fences.extend)
    node.turn()
    return fences


def test_stages_whose_keys_have_moved_are_not_published(node: Node) -> None:
    staying, moving = Task(1), Task(2)
    lp = lp_of_key("gone")
    staying.write(node, b"s", **keyed("stays"))
    moving.write(node, b"m", b"n", **keyed("stays", "gone"))
    sealed(node, [(lp, lp + 1)])
    refused = ask_and_settle(node, staying, moving)
    assert isinstance(refused, StaleRoute)
    assert refused.details == {"producer": 2, "producers": [2]}
    assert node.bodies("orders") == []
    subject, frames, end = node.broker.stages.read(2, 0, 1 << 20)
    assert (subject, [row.body for row in rows_of(frames)], end) == ("orders", [b"m", b"n"], 2)
    publish(node, staying)
    assert node.bodies("orders") == [b"s"]


@pytest.mark.parametrize("after", ["at once", "killed", "power lost"])
def test_a_refused_stage_stays_refused_when_its_keys_return(node: Node, task: Task, after: str) -> None:
    lp = lp_of_key("gone")
    task.write(node, b"m", **keyed("gone"))
    complete(node, task)
    sealed(node, [(lp, lp + 1)])
    assert isinstance(ask_and_settle(node, task), StaleRoute)
    # The driver writes the rows again, and the route leads here again. Another driver repeats its request.
    if after != "at once":
        node = node.killed() if after == "killed" else node.power_lost()
    settings = node.broker.subjects["orders"].row.settings
    sealing.open_lps(node.broker, "orders", "orders", [(lp, lp + 1)], 3, settings)
    node.turn()
    copy = Task(12)
    copy.write(node, b"m", **keyed("gone"))
    refused = ask_and_settle(node, task)
    assert isinstance(refused, StaleRoute)
    assert refused.details == {"producer": 11, "producers": [11]}
    publish(node, copy)
    assert node.bodies("orders") == [b"m"]
    assert len(node.broker.stages.read(11, 0, 1 << 20)[1]) == 1, "another driver can still read the rows"
    assert node.broker.stages.forget("q", 1) == 1


def test_one_error_names_all_stages_whose_keys_have_moved(node: Node) -> None:
    tasks = [Task(n) for n in range(1, 5)]
    for task, key in zip(tasks, ("stays", "gone", "stays", "gone"), strict=True):
        task.write(node, b"a", **keyed(key))
    lp = lp_of_key("gone")
    sealed(node, [(lp, lp + 1)])
    refused = ask_and_settle(node, *tasks)
    assert refused is not None
    error = codec.error_of(codec.failure_of(refused))
    assert error.details == {"producer": 2, "producers": [2, 4]}


def test_publishing_that_has_begun_is_finished_before_a_seal(
    monkeypatch: pytest.MonkeyPatch, node: Node, task: Task
) -> None:
    monkeypatch.setattr(staging, "PUBLISH_SIZE_MAX", 1)
    for n in range(3):
        task.write(node, b"%d" % n, **keyed("gone"))
    answers = ask(node, [task])
    node.commit()
    lp = lp_of_key("gone")
    with pytest.raises(FlowControl, match="being published to 'orders'; try again"):
        sealed(node, [(lp, lp + 1)])
    assert node.bodies("orders") == [b"0", b"1"], "one turn's worth"
    assert sealed(node, [(lp, lp + 1)]) == [(lp, lp + 1, 3)]
    assert answers == [None]
    assert node.bodies("orders") == [b"0", b"1", b"2"]


def test_a_seal_does_not_wait_for_stages_requested_after_it(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(staging, "PUBLISH_SIZE_MAX", 1)
    first, second, elsewhere = Task(1), Task(2), Task(3, subject="payments")
    for task in (first, second, elsewhere):
        for n in range(4):
            task.write(node, b"%d-%d" % (task.stage.producer, n), **keyed("gone"))
    lp = lp_of_key("gone")
    answers = ask(node, [first])
    node.commit()
    with pytest.raises(FlowControl):
        sealed(node, [(lp, lp + 1)])
    with pytest.raises(FlowControl, match="'orders' is being sealed; try again"):
        ask(node, [second])
    publish(node, first, elsewhere)
    assert answers == [None]
    assert sealed(node, [(lp, lp + 1)]) == [(lp, lp + 1, 4)]
    assert isinstance(ask_and_settle(node, second), StaleRoute)
    assert node.bodies("orders") == first.bodies


def test_an_abandoned_seal_blocks_no_publishing(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(staging, "PUBLISH_SIZE_MAX", 1)
    first, second = Task(1), Task(2)
    for task in (first, second):
        for n in range(4):
            task.write(node, b"%d" % n)
    ask(node, [first])
    node.commit()
    with pytest.raises(FlowControl):
        sealed(node, [(0, 1)])
    settle(node)
    node.clock.advance(staging.CLOSING_SECONDS)
    publish(node, second)
    assert node.bodies("orders") == first.bodies + second.bodies


def test_a_seal_that_waits_for_a_full_disk_reports_it(node: Node, task: Task) -> None:
    task.write(node, b"a")
    ask(node, [task])
    node.broker.turn.low_space = "full"
    with pytest.raises(FlowControl, match="the disk is full"):
        sealed(node, [(0, 1)])
    node.broker.turn.low_space = ""
    node.later(2)
    assert sealed(node, [(0, 1)]) == [(0, 1, 1)]


def test_a_stage_outlasts_its_target_partition(node: Node, task: Task) -> None:
    task.write(node, b"a")
    node.broker.delete_subject("orders")
    node.turn()
    assert isinstance(ask_and_settle(node, task), StaleRoute)
    node = node.killed()
    _, frames, _ = node.broker.stages.read(11, 0, 1 << 20)
    assert [row.body for row in rows_of(frames)] == [b"a"]


def test_deleting_a_subject_deletes_the_rows_being_published_to_it(
    monkeypatch: pytest.MonkeyPatch, node: Node, task: Task
) -> None:
    monkeypatch.setattr(staging, "PUBLISH_SIZE_MAX", 1)
    task.write(node, b"a")
    task.write(node, b"b")
    answers = ask(node, [task])
    node.commit()
    node.broker.delete_subject("orders")
    settle(node)
    assert answers == [None]
    assert staged(node) == 0


# --- crashes ----------------------------------------------------------------------------------------


def life(node: Node, tasks: list[Task], passed: list[str]) -> None:
    """Two tasks write, and their batch is published over several turns, with a checkpoint in between."""
    for task in tasks:
        for n in range(3):
            task.write(node, b"%d-%d" % (task.stage.producer, n), **keyed("k"))
    complete(node, *tasks)
    passed.append("complete")
    ask(node, tasks)
    node.turn()
    node.checkpoint()
    settle(node)


def test_a_crash_at_any_disk_operation_publishes_all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PUBLISH_SIZE_MAX", 400)
    wanted = [b"%d-%d" % (producer, n) for producer in (1, 2) for n in range(3)]
    whole = Node(flush="sync")
    first = whole.disk.operations
    life(whole, [Task(1), Task(2)], [])
    assert whole.bodies("orders") == wanted
    partial = 0
    for operation in range(first, whole.disk.operations):
        for power in (False, True):
            node, tasks, passed = Node(flush="sync"), [Task(1), Task(2)], list[str]()
            node.disk.crash_at(operation)
            with pytest.raises(SimulatedCrash):
                life(node, tasks, passed)
            node = node.power_lost() if power else node.killed()
            seen = node.bodies("orders")
            assert seen == wanted[: len(seen)]
            partial += 0 < len(seen) < len(wanted)
            settle(node)
            assert node.bodies("orders") in ([], wanted)
            if passed:
                # The batch is committed, so the request is repeated.
                publish(node, *tasks)
                assert node.bodies("orders") == wanted
                assert staged(node) == 0
            else:
                assert node.bodies("orders") == []
    assert partial > 2
