"""When a checkpoint is due."""

from __future__ import annotations

from typing import Any

import pytest

from plait.broker import BrokerConfig
from tests.support.broker_node import Node

#: Each by itself never makes one due.
NEVER: dict[str, Any] = {"checkpoint_seconds": float("inf"), "checkpoint_bytes": 1 << 62}
SETTINGS = [name for name in BrokerConfig.__struct_fields__ if name.startswith("checkpoint_")]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_makes_a_checkpoint_due_by_itself(setting: str):
    node = Node(**(NEVER | {setting: 1}))
    assert not node.broker.snapshots.due
    node.send("orders", b"a")
    node.clock.advance(2.0)
    assert node.broker.snapshots.due
    node.checkpoint()
    assert not node.broker.snapshots.due


def test_time_alone_makes_no_checkpoint_due():
    node = Node(checkpoint_seconds=60.0)
    node.send("orders", b"a")
    node.checkpoint()
    node.clock.advance(1000.0)
    assert not node.broker.snapshots.due
    node.send("orders", b"b")
    assert node.broker.snapshots.due
