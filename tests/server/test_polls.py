"""Long polls: woken at once and timed out in time, however many are suspended."""

from __future__ import annotations

import asyncio

from plait.clock import ManualClock
from plait.frame.builder import build_frame
from plait.limits import MIB
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw

#: Effectively unlimited: a manual clock advances by minutes without heartbeats.
PATIENT = {"idle_seconds": 1e6, "consumer_lost_seconds": 1e6}


async def test_a_send_wakes_a_pull_at_once(serve: Serve):
    """The clock does not advance and no tick runs, so no timer wakes the pull."""
    server = await serve(clock=ManualClock())
    async with Raw(server, "consumer") as consumer, Raw(server, "producer") as producer:
        session = await consumer.attach("orders", client="consumer")
        for number in range(5):
            waiting = consumer.request(m.PullRequest(session, 10, 1000, 60.0))
            await consumer.ask(m.HeartbeatRequest())
            await producer.store("orders", b"x", first=number + 1, previous=number)
            answer = await consumer.answer(waiting)
            assert answer.message.ranges == [(number, number + 1, 1)]


async def test_with_flush_sync_a_pull_is_woken_by_the_sync(serve: Serve):
    server = await serve(clock=ManualClock(), flush="sync", flush_seconds=3600.0)
    async with Raw(server, "consumer") as consumer, Raw(server, "producer") as producer:
        session = await consumer.attach("orders", client="consumer")
        waiting = consumer.request(m.PullRequest(session, 10, 1000, 60.0))
        await consumer.ask(m.HeartbeatRequest())
        await producer.store("orders", b"x")
        assert (await consumer.answer(waiting)).message.ranges == [(0, 1, 1)]


async def test_a_pull_times_out_empty_on_the_servers_clock(serve: Serve):
    clock = ManualClock()
    server = await serve(clock=clock, limits=PATIENT | {"pull_wait_seconds": 1000.0})
    async with Raw(server, "raw") as raw:
        session = await raw.attach("orders")
        waits = {raw.request(m.PullRequest(session, 10, 1000, seconds)): seconds for seconds in (300.0, 100.0, 200.0)}
        read = raw.request(m.ReadRequest("orders", "earliest", 10, 1000, 250.0))
        waits[read] = 250.0
        await raw.ask(m.HeartbeatRequest())
        ended: list[float] = []
        for count in (1, 1, 2):
            clock.advance(100.0)
            server.broker_host.tick()
            for _ in range(count):
                answer = await raw.next()
                assert answer.message == (m.ReadReply(1, "orders", 0) if answer.correlation == read else m.PullReply())
                ended.append(waits[answer.correlation])
        assert ended == [100.0, 200.0, 250.0, 300.0]


async def test_on_the_system_clock_a_pull_times_out_by_its_timer(serve: Serve):
    server = await serve()
    loop = asyncio.get_running_loop()
    async with Raw(server, "raw") as raw:
        session = await raw.attach("orders")
        began = loop.time()
        slow = raw.request(m.PullRequest(session, 10, 1000, 30.0))
        quick = raw.request(m.PullRequest(session, 10, 1000, 0.05))
        assert (await raw.answer(quick)).message == m.PullReply()
        # Not at once, and not only at the next tick.
        assert 0.04 < loop.time() - began < 0.9
        assert slow


async def test_a_reset_and_a_deletion_answer_suspended_pulls(serve: Serve):
    server = await serve()
    async with Raw(server, "raw") as raw:
        session = await raw.attach("orders")
        waiting = {
            raw.request(m.PullRequest(session, 10, 1000, 60.0)),
            raw.request(m.ReadRequest("orders", "latest", 10, 1000, 60.0)),
        }
        deleting = raw.request(m.AdminRequest("subject.delete", {"subject": "orders"}))
        answers = [await raw.next() for _ in range(3)]
        assert {answer.correlation for answer in answers} == {*waiting, deleting}


async def test_thousands_of_answered_polls_leave_nothing_behind(serve: Serve):
    """An answered poll must not stay in memory until its deadline: a busy consumer makes thousands per second."""
    server = await serve(message_segment_size=64 * MIB)
    async with Raw(server, "idle") as idle, Raw(server, "busy") as busy:
        await idle.route("calm")
        idle.request(m.ReadRequest("calm", "latest", 1, 1, 30.0))
        await idle.ask(m.HeartbeatRequest())
        partition = await busy.route("orders")
        for first in range(1, 1601):
            frame = build_frame([b"x"], producer=7, first=first, previous=first - 1)
            busy.request(m.ReadRequest("orders", "latest", 1, 1, 60.0))
            busy.request(m.SendRequest(partition), frame.tobytes())
            await busy.next()
            await busy.next()
        assert len(server.broker.deadlines) < 1200
