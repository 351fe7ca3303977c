"""Events as rows: all events of the log, with names, in log order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from plait.broker.appender import ActionBuffer
from plait.errors import FrameError
from plait.frame.builder import build_frame, pack_stamp
from plait.frame.view import FrameView
from plait.spark.archiving.event_tables import ACTION_SCHEMA, Names, action_batches
from plait.storage.catalog import PartitionRow
from plait.storage.disk import RealDisk
from plait.storage.logs.action_events import EVENT, Acked, Cancelled, Locked, Skipped
from plait.storage.logs.action_log import ConsumerDefinition, GroupDefinition
from plait.storage.reading.action_reader import open_actions, read_actions
from plait.storage.reading.log_reader import open_log
from plait.storage.reading.log_walk import LogWalk
from tests.support.broker_node import Node

NAMES = {7: PartitionRow(7, "orders", "orders", 0), 8: PartitionRow(8, "orders", "orders#delayed", 0, kind="schedule")}


def rows_of(path: Path, part_size: int = 1 << 20) -> list[dict[str, Any]]:
    """The rows as an archiver reads them: part by part, each part with its own names."""
    walk = LogWalk(open_log(str(path)))
    for _ in walk:
        pass
    reader = open_actions(str(path))
    rows: list[dict[str, Any]] = []
    for part in reader.look(part_size=part_size).parts:
        frames = read_actions(reader.disk, str(path), part)
        batches = action_batches(frames, Names(walk.partitions, "g1"), start=part.start, first=part.first)
        rows += pa.Table.from_batches(batches, ACTION_SCHEMA).to_pylist()
    return rows


def frames_of(buffer: ActionBuffer, offset: int = 0, time: int = 50) -> list[tuple[int, FrameView]]:
    frames = []
    buffer.build_frames(0, (0, 0), 3, time)
    for parts in buffer.frames:
        view = FrameView(parts.tobytes()).verify()
        frames.append((offset, view))
        offset += view.size
    return frames


def test_events_have_the_names_that_users_know(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    node.clock.advance(5.0)
    consumer = node.attach("orders", "billing", "worker-1")
    node.send("orders", b"a", b"b", b"c")
    assert node.pull(consumer).ranges == [(0, 3, 1)]
    node.ack(consumer, (0, 2))
    node.nack(consumer, (2, 3), delay=30.0)
    now = node.clock.now()
    node.broker.stop()
    rows = rows_of(tmp_path)
    assert [row["action"] for row in rows][:5] == ["group", "consumer", "pull", "ack", "nack"]
    for row in rows:
        assert (row["subject"], row["partition"], row["consumer_group"]) == ("orders", "orders@g1", "billing")
    assert [(row["consumer"], row["start"], row["end"], row["attempt"]) for row in rows[2:5]] == [
        ("worker-1", 0, 3, 1),
        ("worker-1", 0, 2, 0),
        ("worker-1", 2, 3, 1),
    ]
    assert [row["due"] is None for row in rows[2:5]] == [True, True, False]
    assert int(rows[4]["due"].timestamp()) == now // 1_000_000 + 30
    assert {int(row["time"].timestamp()) for row in rows} == {now // 1_000_000}
    assert json.loads(rows[0]["detail"])["delivery"] == "at_least_once"
    places = [(row["log_offset"], row["log_row"]) for row in rows]
    assert places == sorted(set(places))


@pytest.mark.parametrize("part_size", [1, 700, 1 << 20])
def test_parts_read_one_by_one_give_every_row_once(tmp_path: Path, part_size: int):
    node = Node(RealDisk(tmp_path))
    consumers = [node.attach("orders", f"group-{number}", "c") for number in range(3)]
    for number in range(60):
        node.send("orders", b"%d" % number)
        for consumer in consumers:
            for start, end, _ in node.pull(consumer).ranges:
                node.ack(consumer, (start, end))
    consumers.append(node.attach("orders", "late", "c"))
    node.broker.stop()
    assert len(list((tmp_path / "action").iterdir())) > 3
    rows = rows_of(tmp_path, part_size)
    for group in ("group-0", "group-1", "group-2"):
        mine = [row for row in rows if row["consumer_group"] == group]
        acked = [n for row in mine if row["action"] == "ack" for n in range(row["start"], row["end"])]
        assert acked == list(range(60))
        assert [row["action"] for row in mine].count("group") == 1
        assert {row["consumer"] for row in mine} == {None, "c"}
    assert [row["action"] for row in rows if row["consumer_group"] == "late"] == ["group", "consumer"]


def test_definitions_at_the_start_of_the_first_segment_are_rows():
    buffer = ActionBuffer()
    buffer.event(Acked(1, False, 2, 5, 6), 1, 3)
    event = frames_of(buffer, 1000)
    definition = build_frame(
        [msgspec.msgpack.encode(GroupDefinition(1, 7, "billing", 0, False, "at_least_once", 0))],
        producer=0,
        first=0,
        previous=900,
    )
    definition.stamp_with(pack_stamp(2, 0, 40, 0, 3))
    head = (900, FrameView(definition.tobytes()).verify())
    for first, expected in ((True, ["group", "ack"]), (False, ["ack"])):
        (*batches,) = action_batches([head, *event], Names(NAMES, "g1"), first=first)
        rows = pa.Table.from_batches(batches).to_pylist()
        assert [row["action"] for row in rows] == expected
        assert rows[-1]["consumer_group"] == "billing"


def test_an_ordered_groups_events_name_cursors_where_others_name_consumers():
    buffer = ActionBuffer()
    buffer.define(GroupDefinition(1, 7, "billing", 0, False, "at_least_once", 0, ordered=True))
    buffer.define(ConsumerDefinition(2, 1, "worker"))
    buffer.event(Locked(2, 0, 1024, lock_epoch=99), 1, 3)
    buffer.event(Acked(0, False, 2, 5, 6), 1, 3)
    buffer.event(Skipped(estimated=True, cursor=2, start=6, end=9, lost=3), 1, 3)
    rows = pa.Table.from_batches(action_batches(frames_of(buffer), Names(NAMES, "g1"))).to_pylist()
    lock, ack, skip = rows[2:]
    assert (lock["action"], lock["consumer"], lock["value"], lock["due"]) == ("lock", "worker", 99, None)
    assert (ack["action"], ack["consumer"], ack["number"], ack["value"]) == ("ack", None, 2, None)
    assert (skip["consumer"], skip["number"], skip["value"], skip["flags"], skip["due"]) == (None, 2, 3, 1, None)
    assert lock["time"].microsecond == 50


def test_the_cancellation_of_a_delayed_message_belongs_to_its_schedule_partition():
    buffer = ActionBuffer()
    buffer.define(GroupDefinition(1, 7, "billing", 0, False, "at_least_once", 0))
    buffer.define(ConsumerDefinition(8, 1, "worker"))
    buffer.event(Acked(1, False, 8, 5, 6), 1, 3)
    buffer.event(Cancelled(8, 4, 5, due=70), 0, 3)
    ack, cancel = pa.Table.from_batches(action_batches(frames_of(buffer), Names(NAMES, "g1"))).to_pylist()[2:]
    assert (ack["partition"], ack["consumer"]) == ("orders@g1", "worker")
    assert (cancel["subject"], cancel["partition"]) == ("orders", "orders#delayed@g1")
    assert (cancel["consumer_group"], cancel["consumer"], cancel["due"].microsecond) == (None, None, 70)


def test_numbers_without_names_and_unknown_actions_become_rows_too():
    class Unknown(Acked):
        action = 200  # type: ignore[assignment]

    buffer = ActionBuffer()
    buffer.event(Unknown(0, False, 6, 0, 1), 5, 3)
    (row,) = pa.Table.from_batches(action_batches(frames_of(buffer), Names({}, "g1"))).to_pylist()
    assert (row["action"], row["subject"], row["consumer_group"], row["number"]) == ("action_200", None, None, 6)


def test_many_events_become_batches_of_limited_size():
    buffer = ActionBuffer()
    for number in range(150_000):
        buffer.event(Acked(1, False, 1, number, number + 1), 1, 3)
    batches = list(action_batches(frames_of(buffer), Names({}, "g1")))
    assert [batch.num_rows for batch in batches] == [100_000, 50_000]
    assert pa.Table.from_batches(batches).column("start").to_pylist() == list(range(150_000))
    assert EVENT.itemsize == 40


def test_a_frame_of_another_kind_is_refused():
    parts = build_frame([b"x"], producer=0, first=0)
    parts.stamp_with(pack_stamp(9, 0, 40, 0, 3))
    with pytest.raises(FrameError, match="kind 9"):
        list(action_batches([(0, FrameView(parts.tobytes()))], Names({}, "g1")))
