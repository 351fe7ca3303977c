"""The lease renewer: a thread renews leases while the user's loop is busy, up to the handling limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

import plait
from plait.client.consume.ordered.lease_renewer import LeaseRenewer
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats, _HeartbeatLoop
from plait.client.consume.ordered.ordered_delivered import RenewedLease
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.clock import ManualClock
from plait.limits import ServerLimits
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from plait.wire import messages as m
from tests.client.support import PATIENCE_SECONDS, until

#: A short lease, so that tests can wait for its end.
SHORT = msgspec.structs.replace(TEST_CONFIG, limits=ServerLimits(lease_seconds=0.8))


def block_until(condition: Callable[[], object]) -> None:
    """Keep the loop's thread busy, as a computing handler does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline


def lease_renewers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "plait-lease-renewer"]


def lease_of(consumer: plait.Consumer) -> OrderedPullClient:
    [pulling] = consumer._fetcher.clients
    assert isinstance(pulling, OrderedPullClient)
    return pulling


async def test_a_handler_that_blocks_the_loop_keeps_its_locks() -> None:
    with EmbeddedBroker(config=SHORT) as broker:
        async with plait.connect(broker.address, client_id="a") as client:
            await client.send_many("s", [b"0", b"1"], keys=["k", "k"])
            async with client.consumer("s", group="g", ordered=True) as consumer:
                batch = await consumer.fetch(1, wait=PATIENCE_SECONDS)
                rights = lease_of(consumer).rights
                began = time.monotonic()
                block_until(lambda: time.monotonic() - began > 2.0)
                assert rights.valid()
                await batch.ack()
                [message] = await consumer.fetch(1, wait=PATIENCE_SECONDS)
                assert (message.body, message.attempt) == (b"1", 1)
        assert lease_renewers() == []


async def test_a_message_held_for_too_long_ends_the_lease_while_the_loop_is_blocked() -> None:
    with EmbeddedBroker(config=SHORT) as broker:
        async with plait.connect(broker.address, client_id="a") as client:
            await client.send("s", b"0", key="k")
            async with client.consumer("s", group="g", ordered=True, handling=0.2) as consumer:
                await consumer.fetch(1, wait=PATIENCE_SECONDS)
                rights = lease_of(consumer).rights
                block_until(lambda: not rights.valid())


class Recorded:
    """A lease holder that records the sessions of its renewals."""

    def __init__(self, lease: RenewedLease | None) -> None:
        self.wanted = lease
        self.rights = self
        self.renewals: list[int] = []

    def lease(self) -> RenewedLease | None:
        return self.wanted

    def renewed(self, session: int, sent: float) -> None:
        self.renewals.append(session)


class SameLoop:
    """Runs the renewer on the test's loop instead of a thread."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.get_running_loop().create_task(work)

    def stop(self) -> None:
        assert self.task is not None
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


class Quiet:
    """Heartbeats that are never late."""

    addresses = ("plait://127.0.0.1:1",)

    def late(self) -> list[m.MemberHeartbeatRequest]:
        return []


async def test_a_refused_renewal_does_not_affect_other_sessions(broker: EmbeddedBroker) -> None:
    async with broker.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        rights = lease_of(consumer).rights
        alive = Recorded(RenewedLease((broker.address,), rights.session, rights.token, 0.01))
        over = Recorded(RenewedLease((broker.address,), rights.session + 1, 5, 0.01))
        wrong = Recorded(RenewedLease((broker.address,), rights.session, rights.token + 1, 0.01))
        renewer = LeaseRenewer("a", client.limits, ManualClock(), Quiet(), SameLoop)  # type: ignore[arg-type]
        for holder in (over, wrong, alive, Recorded(None)):
            renewer.add(holder)
        await until(lambda: len(alive.renewals) > 2)
        assert (over.renewals, wrong.renewals) == ([], [])
        renewer.remove(alive)
        await renewer.close()


async def test_closing_the_renewer_closes_a_link_that_is_being_dropped(broker: EmbeddedBroker) -> None:
    async with broker.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        rights = lease_of(consumer).rights
        holder = Recorded(RenewedLease((broker.address,), rights.session, rights.token, 0.01))
        renewer = LeaseRenewer("a", client.limits, ManualClock(), Quiet(), SameLoop)  # type: ignore[arg-type]
        renewer._holders[holder] = None
        running = asyncio.ensure_future(renewer._run())
        await until(lambda: holder.renewals)
        [node] = renewer._nodes.values()
        link = node.link
        assert link is not None
        renewer.remove(holder)
        await until(lambda: node.closed is not None)
        assert not link.closed
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert link.closed


async def test_the_renewer_sends_late_heartbeats_while_the_loop_is_busy() -> None:
    with EmbeddedBroker(config=SHORT) as broker:
        limits = plait.ClientLimits(heartbeat_seconds=0.1)
        async with (
            plait.connect(broker.address, client_id="a", limits=limits) as client,
            client.consumer("s", group="g", ordered=True),
        ):
            late = client._consumers.heartbeats.late
            seen: list[m.MemberHeartbeatRequest] = []

            def spy() -> list[m.MemberHeartbeatRequest]:
                seen.extend(late())
                return late()

            client._consumers.heartbeats.late = spy  # type: ignore[method-assign]
            block_until(lambda: len(seen) > 1)
            assert seen[0].members == [("s", "g", True)]


@pytest.mark.parametrize("ordered", [False, True])
async def test_only_clients_with_ordered_consumers_have_a_lease_renewer(broker: EmbeddedBroker, ordered: bool) -> None:
    async with broker.connect() as client, client.consumer("s", group="g", ordered=ordered):
        assert len(lease_renewers()) == ordered
    assert lease_renewers() == []


def test_late_heartbeats_leave_out_overdue_members() -> None:
    class Slow:
        subject, client_id, group_name, affinity = "s", "a", "g", False
        slow = False

        def is_overdue(self) -> bool:
            return self.slow

    async def run() -> None:
        clock = ManualClock()
        heartbeats = MemberHeartbeats(None, plait.ClientLimits(), clock.monotonic)  # type: ignore[arg-type]
        one = heartbeats._loops["a"] = _HeartbeatLoop("a", 7, None, plait.ClientLimits(), clock.monotonic)  # type: ignore[arg-type]
        member = Slow()
        one.members["s", "g"] = member  # type: ignore[assignment]
        assert heartbeats.late() == []
        clock.advance(4)
        assert heartbeats.late() == [m.MemberHeartbeatRequest("a", [("s", "g", True)], instance=7)]
        member.slow = True
        assert heartbeats.late() == [m.MemberHeartbeatRequest("a", [], leaving=True, instance=7)]

    asyncio.run(run())
