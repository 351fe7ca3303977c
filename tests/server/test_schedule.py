"""Delayed messages over the wire: their partition, their receipts, and the requests about them."""

from __future__ import annotations

import pytest

from plait.clock import ManualClock
from plait.errors import FrameError, InvalidArgument, SubjectNotFound
from plait.frame.builder import build_frame
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw

SECOND = 1_000_000


async def delayed(raw: Raw, due: int, *bodies: bytes, first: int = 1, subject: str = "orders") -> int:
    """Store a frame of delayed rows. Returns its first number."""
    partition = (await raw.ask(m.PartitionNumberRequest(subject, delayed=True))).partition
    frame = build_frame(bodies, producer=7, first=first, previous=first - 1, deliver_at=due)
    sent: m.SendReply = await raw.ask(m.SendRequest(partition), frame.tobytes())
    assert sent.sequence is not None
    return sent.sequence


async def test_the_schedule_has_its_own_partition(serve: Serve) -> None:
    async with Raw(await serve(), "raw") as raw:
        later = await raw.ask(m.PartitionNumberRequest("orders", delayed=True))
        plain = await raw.ask(m.PartitionNumberRequest("orders"))
        assert later.name == plain.name == "orders"
        assert later.partition != plain.partition
        assert await raw.ask(m.PartitionNumberRequest("orders", delayed=True)) == later
        assert [view["subject"] for view in await raw.admin("subject.list")] == ["orders"]


async def test_invalid_requests_are_refused_and_change_nothing(serve: Serve) -> None:
    clock = ManualClock()
    async with Raw(await serve(clock=clock), "raw") as raw:
        due = clock.now() + SECOND
        plain = await raw.route("orders")
        frame = build_frame([b"x"], producer=7, first=1, deliver_at=due).tobytes()
        with pytest.raises(FrameError, match="schedule"):
            await raw.ask(m.SendRequest(plain), frame)
        with pytest.raises(InvalidArgument, match="over the limit"):
            await delayed(raw, clock.now() + 3 * 366 * 86_400 * SECOND, b"x")
        for operation, arguments, error in [
            ("schedule.cancel", {"subject": "missing", "number": 0, "deliver_at": 0}, SubjectNotFound),
            ("schedule.cancel", {"subject": "orders", "number": -1, "deliver_at": 0}, InvalidArgument),
            ("schedule.cancel", {"subject": "orders", "number": 1 << 63, "deliver_at": 0}, InvalidArgument),
            ("schedule.cancel", {"subject": "orders", "number": 0}, InvalidArgument),
            ("schedule.list", {"subject": "orders", "limit": 1001}, InvalidArgument),
            ("schedule.list", {"subject": "orders", "limit": 0}, InvalidArgument),
            ("schedule.list", {"subject": "orders", "start": -5}, InvalidArgument),
            ("schedule.list", {"subject": "orders", "after": [0, 1 << 63]}, InvalidArgument),
            ("schedule.count", {"by": "colour"}, InvalidArgument),
            ("schedule.count", {"subject": "missing"}, SubjectNotFound),
            (
                "schedule.reschedule",
                {"subject": "orders", "number": 0, "deliver_at": 0, "to": clock.now() + (1 << 50)},
                InvalidArgument,
            ),
        ]:
            with pytest.raises(error):
                await raw.admin(operation, **arguments)
        assert await raw.admin("schedule.list", subject="orders") == {"rows": [], "next": None}
        assert await delayed(raw, due, b"fine") == 0
