"""Delayed messages over the wire: their partition, their receipts, and the requests about them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.clock import ManualClock, SystemClock
from plait.errors import FrameError, InvalidArgument, SubjectNotFound
from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.view import frames_in
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


async def admin(raw: Raw, operation: str, **arguments: Any) -> Any:
    reply: m.AdminReply = await raw.ask(m.AdminRequest(operation, arguments))
    return msgspec.msgpack.decode(reply.result)


async def read(raw: Raw, subject: str = "orders", wait: float = 0) -> list[bytes]:
    answer = await raw.answer(raw.request(m.ReadRequest(subject, "earliest", 1000, 1 << 20, wait)))
    return [body for frame in frames_in(answer.payload) for body in frame.binary(Column.BODY).to_pylist()]


async def test_the_schedule_has_its_own_partition(serve: Serve) -> None:
    async with Raw(await serve()) as raw:
        await raw.hello()
        later = await raw.ask(m.PartitionNumberRequest("orders", delayed=True))
        plain = await raw.ask(m.PartitionNumberRequest("orders"))
        assert later.name == plain.name == "orders"
        assert later.partition != plain.partition
        assert await raw.ask(m.PartitionNumberRequest("orders", delayed=True)) == later
        assert [view["subject"] for view in await admin(raw, "subject.list")] == ["orders"]


async def test_a_message_arrives_when_it_is_due(serve: Serve) -> None:
    """On the system clock: the server's timer delivers the message and wakes a waiting reader."""
    async with Raw(await serve()) as raw:
        await raw.hello()
        due = SystemClock().now() + 30_000
        assert await delayed(raw, due, b"a", b"b") == 0
        assert await read(raw, wait=15) == [b"a", b"b"]
        assert SystemClock().now() >= due
        assert (await admin(raw, "server.describe"))["scheduled"] == 0


async def test_delayed_messages_can_be_listed_counted_cancelled_and_moved(serve: Serve) -> None:
    clock = ManualClock()
    server = await serve(clock=clock)
    async with Raw(server, "raw") as raw:
        due = clock.now() + 3600 * SECOND
        assert await delayed(raw, due, b"a", b"bb", b"ccc") == 0
        assert (await admin(raw, "server.describe"))["scheduled"] == 3
        assert await admin(raw, "schedule.cancel", subject="orders", number=1, deliver_at=due) is True
        assert await admin(raw, "schedule.cancel", subject="orders", number=1, deliver_at=due) is False
        moved = await admin(raw, "schedule.reschedule", subject="orders", number=0, deliver_at=due, to=due - SECOND)
        assert moved == 3
        again = await admin(raw, "schedule.reschedule", subject="orders", number=0, deliver_at=due, to=due)
        assert again is None
        page = await admin(raw, "schedule.list", subject="orders", limit=10)
        listed = page["rows"]
        assert page["next"] is None
        assert [(row["number"], row["deliver_at"], row["sequence"], row["size"]) for row in listed] == [
            (3, due - SECOND, 1, 1),
            (2, due, 3, 3),
        ]
        assert listed[0] == {
            "subject": "orders",
            "number": 3,
            "deliver_at": due - SECOND,
            "producer": 7,
            "sequence": 1,
            "key": None,
            "size": 1,
        }
        after = [due - SECOND, 3]
        first = await admin(raw, "schedule.list", subject="orders", limit=1)
        assert first == {"rows": listed[:1], "next": after}
        rest = {"rows": listed[1:], "next": None}
        assert await admin(raw, "schedule.list", subject="orders", after=after, limit=10) == rest
        assert await admin(raw, "schedule.list", subject="orders", start=due, end=due + 1) == rest
        assert await admin(raw, "schedule.count") == [{"subject": "orders", "bucket": None, "count": 2}]
        times = await admin(raw, "schedule.count", subject="orders", by="time", end=due)
        assert [(row["subject"], row["count"]) for row in times] == [("orders", 1)]
        clock.jump(3600)
        server.broker_host.tick()
        assert await read(raw, wait=15) == [b"a", b"ccc"]


async def test_invalid_requests_are_refused_and_change_nothing(serve: Serve) -> None:
    clock = ManualClock()
    async with Raw(await serve(clock=clock)) as raw:
        await raw.hello()
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
                await admin(raw, operation, **arguments)
        assert await admin(raw, "schedule.list", subject="orders") == {"rows": [], "next": None}
        assert await delayed(raw, due, b"fine") == 0
