"""Two processes with one client id: the second is refused while the first lives, and the first is not disturbed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import plait
from plait import tasks
from plait.clock import ManualClock
from plait.limits import MetaLimits
from plait.meta.members.joining import Joining
from plait.server.cluster.links import BrokerOrders
from plait.server.meta.meta_host import MetaHost
from plait.server.meta.meta_requests import MetaHandlers
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.support import PATIENCE_SECONDS, lose, until

HASTY = plait.ClientLimits(request_seconds=0.5, heartbeat_seconds=0.05)


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The client of each join that the meta server stored."""
    written: list[str] = []
    join = Joining.join

    def counted(self: Joining, client: str, wanted: Any) -> Any:
        written.append(client)
        return join(self, client, wanted)

    monkeypatch.setattr(Joining, "join", counted)
    return written


async def test_a_second_live_process_is_refused_and_the_first_keeps_its_groups(
    broker: EmbeddedBroker, joins: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        broker.connect(client_id="same", limits=HASTY) as first,
        broker.connect(client_id="same", limits=HASTY) as second,
        first.consumer("one", group="g", ordered=True) as consumer,
    ):
        with caplog.at_level(logging.WARNING), pytest.raises(plait.GroupBusy, match=r"'same'.*another live process"):
            async with second.consumer("two", group="g", ordered=True):
                pass
        assert joins == ["same"]
        assert caplog.text.count("two processes use client id") == 1
        assert caplog.text.count("until then this process is not a member") == 1
        await first.send("one", b"1", key="k")
        assert [message.body for message in await consumer.fetch(1, wait=PATIENCE_SECONDS)] == [b"1"]


async def test_a_refused_process_joins_when_the_other_has_left(broker: EmbeddedBroker) -> None:
    async def consume() -> None:
        async with second.consumer("two", group="g", ordered=True):
            pass

    async with broker.connect(client_id="same", limits=HASTY) as first, broker.connect(client_id="same") as second:
        async with first.consumer("one", group="g", ordered=True):
            opening = tasks.child(consume(), "opening")
            await until(lambda: any(loop.refusals for loop in second._consumers.heartbeats._loops.values()))
        await opening


async def test_a_restarted_process_joins_at_once(broker: EmbeddedBroker) -> None:
    # The lease renewer sends heartbeats too, but only when the loop is late by three heartbeats.
    first = broker.connect(client_id="same", limits=plait.ClientLimits(request_seconds=0.5))
    await first.open()
    async with first.consumer("one", group="g", ordered=True):
        await lose(first)
        async with (
            broker.connect(client_id="same", limits=HASTY) as second,
            second.consumer("two", group="g", ordered=True),
        ):
            pass
    await first.close()


def connection(address: str) -> Any:
    return SimpleNamespace(address=address, closed=False)


def handlers(clock: ManualClock) -> MetaHandlers:
    return MetaHandlers(MetaHost("sqlite:///unused", BrokerOrders(), clock))


def refusal(known: MetaHandlers, instance: int, peer: Any, client: str = "c", *, leaving: bool = False) -> str | None:
    return known.refuse(peer, m.MemberHeartbeatRequest(client, [], leaving=leaving, instance=instance))


def test_a_restarted_process_replaces_one_whose_connection_is_closed() -> None:
    known, dead = handlers(ManualClock()), connection("a:1")
    assert refusal(known, 1, dead) is None
    assert "a:1" in str(refusal(known, 2, connection("b:2")))
    dead.closed = True
    assert refusal(known, 2, connection("b:2")) is None
    # The replaced process is refused while the new one lives.
    assert "b:2" in str(refusal(known, 1, connection("a:3")))


def test_a_process_keeps_its_client_id_by_heartbeats_and_loses_it_without() -> None:
    clock, limits = ManualClock(), MetaLimits()
    known, one, two = handlers(clock), connection("a:1"), connection("b:2")
    assert refusal(known, 1, one) is None
    for _ in range(20):
        clock.advance(limits.speaker_seconds / 2)
        assert refusal(known, 1, one) is None
        assert refusal(known, 2, two) is not None
    clock.advance(limits.speaker_seconds + 0.1)
    assert refusal(known, 2, two) is None


def test_a_refused_process_that_leaves_does_not_remove_the_other() -> None:
    known, one, two = handlers(ManualClock()), connection("a:1"), connection("b:2")
    assert refusal(known, 1, one) is None
    assert refusal(known, 2, two, leaving=True) is not None
    assert refusal(known, 2, two) is not None
    assert refusal(known, 1, one, leaving=True) is None
    assert refusal(known, 2, two) is None


def test_silent_clients_are_forgotten() -> None:
    clock = ManualClock()
    known = handlers(clock)
    for number in range(100):
        assert refusal(known, 1, connection("a:1"), f"c{number}") is None
        clock.advance(1)
    assert len(known._id_owners) <= MetaLimits().member_lost_seconds + 1
