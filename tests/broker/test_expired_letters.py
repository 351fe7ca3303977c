"""Dead letters that expire, with a crash in between."""

from __future__ import annotations

import pytest

from plait.storage.checkpoint import KEEP
from tests.broker.test_dead_letters import begin, dead, letters


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_expired_letters_are_readable_until_their_deletion_is_durable(flush: str):
    node, consumer = begin(60, dead_seconds=86_400.0, retention_seconds=None, flush=flush, retained_segment_size=1024)
    for first in range(0, 50, 5):
        node.nack(consumer, (first, first + 5), delay=None)
    for _ in range(KEEP):
        node.send("orders", b"x")
        node.checkpoint()
    files = len(node.disk.list("retained"))
    assert files > 2
    node.clock.advance(90_000)
    node.retention.run()
    for crashed in (node.killed(), node.power_lost()):
        group = crashed.group("orders", "g")
        assert dead(crashed, group) == list(range(50))
        assert all(letter.frame is not None for letter in letters(crashed, group))
        # The next run expires them.
        crashed.retention.run()
        crashed.turn()
        assert dead(crashed, group) == []
    node.turn()
    node.retention.run()
    assert len(node.disk.list("retained")) < files
    assert dead(node.power_lost(), node.group("orders", "g")) == []
