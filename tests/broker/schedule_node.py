"""Helpers for tests of the schedule: send delayed rows, deliver due rows, list delivered rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.broker.partitions.partition import Partition
from plait.broker.schedule.schedules import Schedules
from plait.errors import PlaitError
from plait.frame.builder import build_frame
from plait.frame.view import FrameView
from tests.support.broker_node import Node, Producer, Sent

SECOND = 1_000_000


def schedule_of(node: Node, subject: str = "orders") -> Partition:
    """The subject's schedule partition."""
    return schedules(node).partition_of(subject)


def schedules(node: Node) -> Schedules:
    return node.broker.schedules


def delayed_frame(
    producer: Producer, due: int | Sequence[int], *bodies: bytes, subject: str = "orders", **columns: Any
) -> Sent:
    """The producer's next frame for the subject's schedule."""
    slot = f"{subject}/schedule"
    times = due if isinstance(due, int) else np.array(due, np.int64)
    parts = build_frame(
        bodies,
        producer=producer.id,
        first=producer.next,
        previous=producer.last.get(slot, 0),
        deliver_at=times,
        **columns,
    )
    producer.next += len(bodies)
    producer.last[slot] = producer.next - 1
    return Sent(subject, parts.tobytes(), bodies)


def submit(node: Node, sent: Sent) -> Sent:
    """Submit a frame to the subject's schedule partition."""
    try:
        node.broker.submit(schedule_of(node, sent.subject), sent.view, sent.answer)
    except PlaitError as error:
        sent.answer(None, error)
    return sent


def delay(node: Node, producer: Producer, due: int | Sequence[int], *bodies: bytes, **columns: Any) -> int:
    """Send delayed rows. Returns the number of the first."""
    sent = submit(node, delayed_frame(producer, due, *bodies, **columns))
    node.turn()
    assert sent.sequence is not None
    return sent.sequence


def run_due(node: Node) -> None:
    """Deliver all rows that are due now, in as many turns as needed."""
    for _ in range(1000):
        node.broker.run_timers()
        ready = node.broker.due_delivery.ready
        node.turn()
        if not ready:
            return
    raise AssertionError("due rows are not delivered after many turns")


def later(node: Node, seconds: float) -> None:
    """Advance the clock and deliver due rows."""
    node.clock.advance(seconds)
    run_due(node)


def delivered(node: Node, subject: str = "orders") -> list[bytes]:
    """The visible bodies, in order."""
    return node.bodies(subject)


def delivered_frames(node: Node, subject: str = "orders", start: int = 0) -> list[FrameView]:
    """The visible frames with rows from sequence ``start`` on."""
    partition = node.partition(subject)
    log = partition.consume_log
    records = [log.record(index) for index in range(log.find(start), len(log))]
    return [FrameView(node.broker.message_log.view(r.offset, r.size)) for r in records]
