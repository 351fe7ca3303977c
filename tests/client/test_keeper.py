"""Leases are renewed beside the user's loop, as long as the user takes, and no longer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

import plait
from plait.client.consume.ordered.lease_renewer import LeaseRenewer, RenewedLease
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats, _HeartbeatLoop
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.clock import ManualClock
from plait.limits import ServerLimits
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from plait.wire import messages as m
from tests.client.support import PATIENCE_SECONDS, until

#: Leases that are over before anybody gets impatient.
SHORT = msgspec.structs.replace(TEST_CONFIG, limits=ServerLimits(lease_seconds=0.8))


def block_until(condition: Callable[[], object]) -> None:
    """Keep the loop's thread busy, as a handler that computes does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline


def keepers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "plait-keeper"]


def lease_of(consumer: plait.Consumer) -> OrderedPullClient:
    [pulling] = consumer._clients
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
        assert keepers() == []


async def test_a_message_in_hands_for_too_long_ends_the_lease_while_the_loop_is_blocked() -> None:
    with EmbeddedBroker(config=SHORT) as broker:
        async with plait.connect(broker.address, client_id="a") as client:
            await client.send("s", b"0", key="k")
            async with client.consumer("s", group="g", ordered=True, handling=0.2) as consumer:
                await consumer.fetch(1, wait=PATIENCE_SECONDS)
                rights = lease_of(consumer).rights
                block_until(lambda: not rights.valid())


class Recorded:
    """A holder of a lease, and what it was told."""

    def __init__(self, lease: RenewedLease | None) -> None:
        self.wanted = lease
        self.told: list[int] = []

    def lease(self) -> RenewedLease | None:
        return self.wanted

    def renewed(self, session: int, sent: float) -> None:
        self.told.append(session)


class SameLoop:
    """The keeper's work on the test's own loop."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.get_running_loop().create_task(work)

    def stop(self) -> None:
        assert self.task is not None
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


class Quiet:
    """Heartbeats that leave by themselves."""

    addresses = ("plait://127.0.0.1:1",)

    def late(self) -> list[m.MemberHeartbeatRequest]:
        return []


async def test_one_session_that_is_over_does_not_cost_the_others(broker: EmbeddedBroker) -> None:
    async with broker.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        rights = lease_of(consumer).rights
        alive = Recorded(RenewedLease((broker.address,), rights.session, rights.token, 0.01))
        over = Recorded(RenewedLease((broker.address,), rights.session + 1, 5, 0.01))
        wrong = Recorded(RenewedLease((broker.address,), rights.session, rights.token + 1, 0.01))
        keeper = LeaseRenewer("a", client.limits, ManualClock(), Quiet(), SameLoop)  # type: ignore[arg-type]
        for holder in (over, wrong, alive, Recorded(None)):
            keeper.add(holder)
        await until(lambda: len(alive.told) > 2)
        assert (over.told, wrong.told) == ([], [])
        keeper.remove(alive)
        await keeper.close()


async def test_a_link_that_is_being_parted_with_when_the_end_comes_is_closed(broker: EmbeddedBroker) -> None:
    async with broker.connect(client_id="a") as client, client.consumer("s", group="g", ordered=True) as consumer:
        rights = lease_of(consumer).rights
        holder = Recorded(RenewedLease((broker.address,), rights.session, rights.token, 0.01))
        keeper = LeaseRenewer("a", client.limits, ManualClock(), Quiet(), SameLoop)  # type: ignore[arg-type]
        keeper._holders[holder] = None
        running = asyncio.ensure_future(keeper._run())
        await until(lambda: holder.told)
        [node] = keeper._nodes.values()
        link = node.link
        assert link is not None
        keeper.remove(holder)
        await until(lambda: node.closed is not None)
        assert not link.closed
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert link.closed


async def test_heartbeats_leave_from_elsewhere_when_the_loop_is_busy() -> None:
    with EmbeddedBroker(config=SHORT) as broker:
        limits = plait.ClientLimits(heartbeat_seconds=0.1)
        async with (
            plait.connect(broker.address, client_id="a", limits=limits) as client,
            client.consumer("s", group="g", ordered=True),
        ):
            late = client._membership.late
            seen: list[m.MemberHeartbeatRequest] = []

            def spy() -> list[m.MemberHeartbeatRequest]:
                seen.extend(late())
                return late()

            client._membership.late = spy  # type: ignore[method-assign]
            block_until(lambda: len(seen) > 1)
            assert seen[0].members == [("s", "g", True)]


@pytest.mark.parametrize("ordered", [False, True])
async def test_only_clients_with_ordered_consumers_have_the_thread(broker: EmbeddedBroker, ordered: bool) -> None:
    async with broker.connect() as client, client.consumer("s", group="g", ordered=ordered):
        assert len(keepers()) == ordered
    assert keepers() == []


def test_members_that_take_too_long_are_not_named_by_late_heartbeats() -> None:
    class Slow:
        subject, client_id, group_name, affinity = "s", "a", "g", False
        slow = False

        def too_long(self) -> bool:
            return self.slow

    async def run() -> None:
        clock = ManualClock()
        membership = MemberHeartbeats(None, plait.ClientLimits(), clock.monotonic)  # type: ignore[arg-type]
        beats = membership._beats["a"] = _HeartbeatLoop("a", 7, None, plait.ClientLimits(), clock.monotonic)  # type: ignore[arg-type]
        member = Slow()
        beats.members["s", "g"] = member  # type: ignore[assignment]
        assert membership.late() == []
        clock.advance(4)
        assert membership.late() == [m.MemberHeartbeatRequest("a", [("s", "g", True)], instance=7)]
        member.slow = True
        assert membership.late() == [m.MemberHeartbeatRequest("a", [], leaving=True, instance=7)]

    asyncio.run(run())
