"""While no file can be opened for the next segment, sends are refused and nothing is lost."""

from __future__ import annotations

import errno

import pytest

from plait.errors import FlowControl
from tests.support.broker_node import Node, Producer, Sent


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("operation", ["create", "sync_directory"])
def test_sends_are_refused_until_the_next_segment_can_be_opened(flush: str, error: int, operation: str):
    node = Node(flush=flush)
    consumer = node.attach("orders", "g")
    producer = Producer(5)
    node.disk.fail(operation, path="message*", error=error, times=2)
    stored = 0
    while (refused := node.send("orders", b"x" * 700, producer=producer)).acknowledged:
        stored += 1
        assert stored < 100
    assert isinstance(refused.error, FlowControl)
    assert refused.error.retryable
    assert "nothing was stored" in refused.error.message
    assert node.broker.turn.failed is None
    assert len(node.pull(consumer).rows) == stored, "consumers are served meanwhile"
    second = node.submit(Sent("orders", refused.data, refused.bodies))
    node.turn()
    assert isinstance(second.error, FlowControl)
    third = node.submit(Sent("orders", refused.data, refused.bodies))
    node.turn()
    assert third.sequence == stored
    for again in (node.killed(), node.restart()):
        assert again.bodies("orders") == [b"x" * 700] * (stored + 1)


def test_a_subject_that_finds_no_file_can_be_created_later():
    node = Node()
    node.disk.fail("create", path="message/*", error=errno.EMFILE)
    with pytest.raises(FlowControl, match="too many open files"):
        node.broker.create_subject("orders")
    assert node.broker.subjects == {}
    node.broker.create_subject("orders")
    assert node.send("orders", b"a").acknowledged
