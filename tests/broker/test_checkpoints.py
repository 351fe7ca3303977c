"""When a checkpoint is due."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from plait.broker import BrokerConfig
from plait.broker.groups.group import NackOutcome
from tests.support.broker_node import Node, Producer

#: With these values, no setting makes a checkpoint due.
NEVER: dict[str, Any] = {"checkpoint_seconds": float("inf"), "checkpoint_bytes": 1 << 62}
SETTINGS = [name for name in BrokerConfig.__struct_fields__ if name.startswith("checkpoint_")]


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_alone_makes_a_checkpoint_due(setting: str):
    node = Node(**(NEVER | {setting: 1}))
    assert not node.broker.snapshots.due
    node.send("orders", b"a")
    node.clock.advance(2.0)
    assert node.broker.snapshots.due
    node.checkpoint()
    assert not node.broker.snapshots.due


def test_events_that_a_checkpoint_includes_and_that_are_written_later_are_not_replayed():
    node = Node(flush="sync", action_segment_size=1024)
    producer = Producer(7)
    for number in range(40):
        node.send("orders", b"%d" % number, producer=producer)
    consumer = node.attach("orders", "g")
    node.pull(consumer, 10)
    for operation in ("allocate", "create"):
        node.disk.fail(operation, path="action/*", times=None, error=errno.ENOSPC)
    answered: list[bool] = []
    # More events than fit in the active segment.
    for sequence in range(10):
        node.broker.nack(consumer, [(sequence, sequence + 1, 1)], lambda: answered.append(True), NackOutcome(5.0))
    node.turn()
    assert answered == []
    work = node.broker.snapshots.begin().copy_all()
    work.run()
    node.broker.snapshots.end(work)
    assert work.written
    node.disk._faults.clear()
    node.broker.turn.check_space()
    node.turn()
    assert len(answered) == 10
    node.later(10.0)
    rows = node.pull(consumer, 10).rows
    assert [row.sequence for row in rows] == list(range(10))
    before = node.group("orders", "g").dump()
    again = node.killed()
    assert again.group("orders", "g").dump() == before
    # Only the pull is replayed: the checkpoint includes the nacks.
    assert again.report.events == 1


def test_an_abandoned_checkpoint_does_not_make_the_log_look_busy():
    node = Node()
    assert node.send("orders", b"a").acknowledged
    node.broker.snapshots.begin().copy_all()
    node.checkpoint()
    node.clock.advance(3600.0)
    assert node.send("orders", b"b").acknowledged
    assert node.killed().bodies("orders") == [b"a", b"b"]
