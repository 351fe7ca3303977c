"""Reading an action log while its server runs: valid frames, closed segments, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import DamageError, DataDirError
from plait.model.retry_policy import Retry
from plait.storage.disk import RealDisk
from plait.storage.logs.action_log import EVENTS, presumed_retained
from plait.storage.reading.action_reader import ActionPart, ActionReader, open_actions, open_retained, read_actions
from tests.support.broker_node import Node


def busy(path: Path, rounds: int = 120) -> Node:
    """A node whose action log has several segments."""
    node = Node(RealDisk(path))
    consumer = node.attach("orders", "billing")
    for _ in range(rounds):
        node.send("orders", b"x")
        for start, end, _ in node.pull(consumer).ranges:
            node.ack(consumer, (start, end))
    node.broker.turn.commit()
    assert len(node.broker.action_log.segments) > 3
    return node


def offsets(path: Path, parts: list[ActionPart]) -> list[int]:
    """The offsets of the frames in the parts, without frames that are read only for their definitions."""
    disk = RealDisk(path, read_only=True)
    return [offset for part in parts for offset, _ in read_actions(disk, str(path), part) if offset >= part.start]


def test_parts_contain_every_frame_once_whatever_their_size(tmp_path: Path):
    node = busy(tmp_path)
    reader = open_actions(str(tmp_path))
    whole = reader.look()
    assert whole.end == node.broker.action_log.end
    every = offsets(tmp_path, whole.parts)
    assert every == sorted(set(every))
    for size in (1, 300, 5000):
        assert offsets(tmp_path, reader.look(part_size=size).parts) == every
    middle = every[len(every) // 2]
    assert offsets(tmp_path, reader.look(middle).parts) == [offset for offset in every if offset >= middle]
    assert [part.first for part in whole.parts] == [True] + [False] * (len(whole.parts) - 1)
    assert not any(part.first for part in reader.look(middle).parts)
    node.broker.stop()


def test_closed_segments_end_where_the_last_segment_starts(tmp_path: Path):
    node = busy(tmp_path)
    last = node.broker.action_log.segments[-1].base
    plan = open_actions(str(tmp_path)).look(closed_only=True)
    assert (plan.end, plan.parts[-1].end) == (last, last)
    again = open_actions(str(tmp_path)).look(plan.end, closed_only=True)
    assert (again.parts, again.start, again.end) == ([], last, last)
    node.broker.stop()


def test_frames_that_depend_on_missing_messages_are_left_out(tmp_path: Path):
    node = busy(tmp_path)
    node.broker.stop()
    reader = open_actions(str(tmp_path))
    every = [(offset, frame) for part in reader.look().parts for offset, frame in read_actions(reader.disk, "", part)]
    cut = next(offset for offset, frame in every if frame.durable > 5000)
    assert reader.look(message_end=5000).end == cut


def test_frames_that_depend_on_missing_retained_rows_are_left_out(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    consumer = node.attach("orders", "billing", retry=Retry(attempts=1))
    for _ in range(20):
        node.send("orders", b"x")
        node.nack(consumer, *[(start, end) for start, end, _ in node.pull(consumer).ranges])
    node.broker.stop()
    retained = open_retained(str(tmp_path))
    whole = retained.look()
    actions = open_actions(str(tmp_path))
    assert actions.look().retained_end == whole.end
    assert {number: group.name for number, group in actions.groups.items()} == {consumer.group.id: "billing"}
    middle = offsets(tmp_path, whole.parts)[10]
    every = [
        (offset, frame) for part in actions.look().parts for offset, frame in read_actions(retained.disk, "", part)
    ]
    cut = next(offset for offset, frame in every if frame.partition == EVENTS and presumed_retained(frame) > middle)
    short = actions.look(retained_end=middle)
    assert (short.end, short.retained_end) == (cut, middle)
    closed = retained.look(closed_only=True)
    assert closed.end == retained.files[-1][0]
    assert offsets(tmp_path, closed.parts) == [each for each in offsets(tmp_path, whole.parts) if each < closed.end]
    with pytest.raises(DataDirError, match=r"/retained ends at .* is not the log that was read before"):
        retained.look(10**9)


def test_damage_before_the_end_raises_or_is_skipped(tmp_path: Path):
    node = busy(tmp_path)
    node.broker.stop()
    reader = open_actions(str(tmp_path))
    plan = reader.look()
    every = offsets(tmp_path, plan.parts)
    kinds = [frame.partition for part in plan.parts for _, frame in read_actions(reader.disk, "", part)]
    victim = every[kinds.index(EVENTS) + 3]
    path = tmp_path / plan.parts[0].segment
    data = bytearray(path.read_bytes())
    data[victim + 90] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamageError, match=rf"{path.name} is damaged.*at offset {victim}.*plait doctor"):
        open_actions(str(tmp_path)).look()
    around = open_actions(str(tmp_path)).look(fail_on_damage=False)
    assert [damage.offset for damage in around.damages] == [victim]
    assert offsets(tmp_path, around.parts) == [offset for offset in every if offset != victim]


def test_a_log_that_became_shorter_is_refused(tmp_path: Path):
    busy(tmp_path).broker.stop()
    with pytest.raises(DataDirError, match="not the log that was read before"):
        open_actions(str(tmp_path)).look(10**9)


def test_a_frame_that_changes_after_planning_raises(tmp_path: Path):
    busy(tmp_path).broker.stop()
    reader: ActionReader = open_actions(str(tmp_path))
    part = reader.look().parts[0]
    path = tmp_path / part.segment
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamageError, match="has changed at offset 0"):
        list(read_actions(reader.disk, str(tmp_path), part))
