"""Outcomes in flight while the session changes are sent again for the same rows in the next session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from plait.client.consume.ack_collector import AckCollector
from plait.client.consume.failure import FailureOutcome
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import LockRights, OrderedDelivered
from plait.client.consume.terms import Terms
from plait.client.net.node import ConsumerSession
from plait.client.types import PartitionName
from plait.clock import ManualClock
from plait.errors import InternalError, PlaitError, StaleSession
from plait.frame import FrameView, build_frame
from plait.frame.builder import pack_stamp
from plait.frame.slicing import slice_mask
from plait.limits import ClientLimits
from plait.model.settings import ShareMode
from plait.wire import messages as m

EPOCH = 3


class Wire:
    """A link whose replies the test sets."""

    closed = False

    def __init__(self) -> None:
        self.requests: list[tuple[Any, asyncio.Future[Any]]] = []

    async def request(self, message: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.requests.append((message, future))
        return await future

    async def next(self) -> tuple[Any, asyncio.Future[Any]]:
        async with asyncio.timeout(60):
            while not self.requests:  # noqa: ASYNC110 - the code under test sends the request
                await asyncio.sleep(0)
        return self.requests.pop(0)


class LossCounter:
    """A listener that counts lost connections."""

    losses = 0
    fetcher = SimpleNamespace(clients=[None], prefetch=SimpleNamespace(partitions=1))
    partition = PartitionName("s", "g")
    terms = Terms("s", "g", "client", None, "at_least_once", ShareMode.ORDERED)

    def progressed(self) -> None: ...

    def lost(self, *, stale: bool) -> None:
        self.losses += 1

    def failed(self, error: PlaitError) -> None:
        raise error


def every_other_row(owner: AckCollector) -> OrderedDelivered:
    """A delivery of sequences 100, 102, 104, 106 and 108; another consumer holds the rows between them."""
    parts = build_frame([b"%d" % n for n in range(10)], producer=1, first=1)
    parts.stamp_with(pack_stamp(1, 100, 0, 0, EPOCH))
    mask: Any = [number % 2 == 0 for number in range(10)]
    frame = FrameView(slice_mask(FrameView(parts.tobytes()), mask).tobytes())
    delivered = OrderedDelivered(frame, "s", PartitionName("s", "g"), owner.deliveries, [(100, 110, 1)])
    delivered.tracker, delivered.rights, delivered.tag = OrderedBuffer(lambda: None, []), LockRights(ManualClock()), 7
    return delivered


def session(number: int) -> m.AttachReply:
    return m.AttachReply(number, 1, "s", "g", 1)


async def test_outcomes_in_flight_when_the_session_changes_are_sent_again_for_the_same_rows():
    listener = LossCounter()
    collector = AckCollector(listener, ClientLimits())  # type: ignore[arg-type]
    collector.open(asyncio.get_running_loop())
    first, second = Wire(), Wire()
    collector.attached(ConsumerSession(first, session(1)))  # type: ignore[arg-type]
    delivered = every_other_row(collector)
    collector.deliveries.add(delivered)
    delivered.report_row(0, None)
    delivered.report_row(1, None)
    delivered.nack_rows(slice(3, 4), FailureOutcome(5.0))
    nack, answer = await first.next()
    # With a tag, the range of a row extends to the next row of its frame.
    assert (nack.session, nack.ranges, nack.tags) == (1, [(106, 108, EPOCH)], [7])
    # Until the broker has stored the outcomes, no other consumer may get the rows.
    assert sorted(collector.unsent) == [(100, 101, EPOCH), (102, 103, EPOCH), (106, 107, EPOCH)]
    delivered.tag = 0
    collector.attached(ConsumerSession(second, session(2)))  # type: ignore[arg-type]
    answer.set_exception(StaleSession("given up"))
    nack, answer = await second.next()
    assert (nack.session, nack.ranges, nack.tags) == (2, [(106, 107, EPOCH)], [])
    answer.set_result(m.NackReply())
    ack, answer = await second.next()
    assert (ack.session, ack.ranges, ack.tags) == (2, [(100, 101, EPOCH), (102, 103, EPOCH)], [])
    answer.set_result(m.DoneReply())
    await collector.flush()
    assert listener.losses == 0
    assert collector.unsent == []
    await collector.close()


async def test_a_defect_while_acks_are_sent_fails_the_consumer(monkeypatch: pytest.MonkeyPatch):
    failed: asyncio.Future[PlaitError] = asyncio.get_running_loop().create_future()
    listener = LossCounter()
    monkeypatch.setattr(listener, "failed", failed.set_result)
    collector = AckCollector(listener, ClientLimits())  # type: ignore[arg-type]
    collector.open(asyncio.get_running_loop())
    collector.attached(ConsumerSession(Wire(), session(1)))  # type: ignore[arg-type]
    delivered = every_other_row(collector)
    collector.deliveries.add(delivered)
    # The link of this test has no ``call``.
    delivered.report_row(0, None)
    assert isinstance(await failed, InternalError)
