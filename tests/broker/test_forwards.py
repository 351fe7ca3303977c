"""Frames that another broker forwards: which are stored, and which are refused (R20)."""

from __future__ import annotations

import numpy as np
import pytest

from plait.broker.partitions import sealing
from plait.broker.schedule import forwards as forwards_module
from plait.broker.schedule.forwards import IDLE_SECONDS, NOTE_FRAMES, ForwardRoute
from plait.errors import DiskFull, FrameError, PlaitError
from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from tests.broker.schedule_node import SECOND, delay, later, schedule_of
from tests.support.broker_node import Node, Producer

ELSEWHERE = ("orders", "g2")


def forwarding(node: Node, *bodies: bytes) -> None:
    """Make rows due in a sealed partition, with a route to another broker."""
    delay(node, Producer(7), node.clock.now() + SECOND, *bodies)
    sealing.seal(node.broker, "orders", [(0, LOGICAL_PARTITIONS)], 1, lambda _: None)
    node.turn()
    node.broker.forwards.learn("orders", ForwardRoute(np.zeros(LOGICAL_PARTITIONS, np.int64), [ELSEWHERE]))
    later(node, 2.0)


def sent_to(node: Node, frame: FrameView) -> list[tuple[int | None, PlaitError | None]]:
    answers: list[tuple[int | None, PlaitError | None]] = []
    view = FrameView(bytes(frame.buffer))
    node.broker.submit(node.partition("orders"), view, lambda sequence, error: answers.append((sequence, error)))
    node.turn()
    return answers


def test_after_a_crash_only_frames_that_the_other_broker_still_recognizes_are_resent() -> None:
    here, there = Node(flush="sync"), Node(flush="sync", group="g2")
    for number in range(100):
        delay(here, Producer(7 + number), here.clock.now() + (1 + number) * SECOND, b"%d" % number)
    sealing.seal(here.broker, "orders", [(0, LOGICAL_PARTITIONS)], 1, lambda _: None)
    here.turn()
    here.broker.forwards.learn("orders", ForwardRoute(np.zeros(LOGICAL_PARTITIONS, np.int64), [ELSEWHERE]))
    for _ in range(100):
        later(here, 1.0)
    for crash in (True, False):
        [partition] = here.broker.forwards.waiting()
        while (waiting := here.broker.forwards.first(partition)) is not None:
            if here.broker.message_log.durable < waiting.log_end:
                here.turn()
                continue
            assert sent_to(there, waiting.frame)[0][1] is None
            here.broker.forwards.stored(partition, waiting.end)
        here = here.power_lost() if crash else here
    assert there.bodies("orders") == [b"%d" % number for number in range(100)]


def test_an_empty_forward_partition_is_deleted_after_a_day_and_with_its_subject() -> None:
    node = Node(flush="sync")
    forwarding(node, b"a")
    [partition] = node.broker.forwards.waiting()
    node.clock.advance(IDLE_SECONDS + 1)
    node.retention.run()
    assert node.broker.forwards.of("orders") == [partition]
    node.broker.forwards.stored(partition, partition.next)
    node.retention.run()
    node.turn()
    assert node.killed().broker.forwards.of("orders") == []
    other = Node()
    forwarding(other, b"a")
    other.broker.delete_subject("orders")
    other.turn()
    assert list(other.killed().broker.partitions) == []


def test_rows_wait_until_the_route_is_known() -> None:
    node = Node()
    delay(node, Producer(7), node.clock.now() + SECOND, b"a")
    sealing.seal(node.broker, "orders", [(0, LOGICAL_PARTITIONS)], 1, lambda _: None)
    node.turn()
    calls: list[bool] = []
    node.broker.forwards.on_work = lambda: calls.append(True)
    later(node, 2.0)
    assert (node.broker.forwards.unrouted, node.broker.schedules.count) == ({"orders"}, 1)
    assert calls
    # The broker does not poll meanwhile.
    assert node.broker.due_delivery.next_deadline is None
    # This route is older than the seal.
    node.broker.forwards.learn("orders", ForwardRoute(np.zeros(LOGICAL_PARTITIONS, np.int64), [("orders", "g1")]))
    later(node, 1.0)
    assert node.broker.forwards.unrouted == {"orders"}
    node.broker.forwards.learn("orders", ForwardRoute(np.zeros(LOGICAL_PARTITIONS, np.int64), [ELSEWHERE]))
    later(node, 0.0)
    assert len(node.broker.forwards.waiting()) == 1


def test_an_invalid_forwarded_frame_is_refused() -> None:
    node = Node()
    forwarding(node, b"a")
    waiting = node.broker.forwards.first(node.broker.forwards.waiting()[0])
    assert waiting is not None
    frame = FrameView(bytes(waiting.frame.buffer))
    other = Node()
    schedule = schedule_of(other)
    with pytest.raises(FrameError, match="own partition"):
        other.broker.submit(schedule, frame, lambda *_: None)
    with pytest.raises(FrameError, match="oneway"):
        other.broker.submit(other.partition("orders"), frame, None)
    alike = FrameView(build_frame([b"a"], producer=1, first=1, previous=0, flags=FLAG_FORWARDED).tobytes())
    assert not alike.has(Column.RUNS)
    with pytest.raises(FrameError, match="run table"):
        other.broker.submit(other.partition("orders"), alike, lambda *_: None)


def test_a_full_disk_while_frames_are_taken_back_leaves_every_row_once() -> None:
    node = Node(flush="sync")
    bodies = [b"%d" % number * 900 for number in range(8)]
    for number, body in enumerate(bodies):
        delay(node, Producer(7 + number), node.clock.now() + (1 + number) * SECOND, body)
    sealing.seal(node.broker, "orders", [(0, LOGICAL_PARTITIONS)], 1, lambda _: None)
    node.turn()
    node.broker.forwards.learn("orders", ForwardRoute(np.zeros(LOGICAL_PARTITIONS, np.int64), [ELSEWHERE]))
    for _ in bodies:
        later(node, 1.0)
    [partition] = node.broker.forwards.waiting()
    node.checkpoint()
    node.disk.capacity -= node.disk.space()[0]
    with pytest.raises(DiskFull):
        node.broker.forwards.take_back(partition)
    node.disk.capacity *= 10
    node.turn()
    assert 0 < node.broker.schedules.count < len(bodies)
    node.checkpoint()
    node = node.killed()
    [partition] = node.broker.forwards.waiting()
    assert node.broker.schedules.count + partition.next - partition.start == len(bodies)


def test_each_turn_takes_back_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards_module, "TAKE_BACK_SIZE_MAX", 1)
    node = Node(flush="sync")
    for number in range(3):
        delay(node, Producer(7 + number), node.clock.now() + (1 + number) * SECOND, b"%d" % number)
    sealing.seal(node.broker, "orders", [(0, LOGICAL_PARTITIONS)], 1, lambda _: None)
    node.turn()
    node.broker.forwards.learn("orders", ForwardRoute(np.zeros(LOGICAL_PARTITIONS, np.int64), [ELSEWHERE]))
    for _ in range(3):
        later(node, 1.0)
    [partition] = node.broker.forwards.waiting()
    turns = 1
    while not node.broker.forwards.take_back(partition):
        # Rows that were taken back are due at once, and move to another forward partition.
        later(node, 1.0)
        turns += 1
    later(node, 1.0)
    assert turns == 4
    [other] = node.broker.forwards.waiting()
    assert other is not partition
    assert other.next - other.start == 3
    assert node.broker.schedules.count == 0


def test_deleting_a_subject_deletes_its_forward_partitions() -> None:
    """A reply after the deletion changes nothing, and does not define the partition again."""
    node = Node(flush="sync")
    forwarding(node, b"a")
    [partition] = node.broker.forwards.waiting()
    waiting = node.broker.forwards.first(partition)
    assert waiting is not None
    node.broker.delete_subject("orders")
    for _ in range(NOTE_FRAMES):
        node.broker.forwards.stored(partition, 0)
    assert node.broker.forwards.first(partition) is None
    assert node.broker.forwards.take_back(partition)
    node.turn()
    assert list(node.killed().broker.partitions) == []
