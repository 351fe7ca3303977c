"""Two processes with one client id: the second is refused while the first lives, and the first is not disturbed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

import plait
from plait import tasks
from plait.clock import ManualClock
from plait.limits import MetaLimits
from plait.meta.members.joining import Joining
from plait.server.meta.client_ids import ClientIds
from plait.testing import EmbeddedBroker
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


class Peer:
    """A connection."""

    closed = False

    def __init__(self, address: str) -> None:
        self.address = address


def client_ids(clock: ManualClock, instances: Sequence[tuple[int, Peer]]) -> ClientIds:
    made = ClientIds(clock, MetaLimits())
    for instance, peer in instances:
        assert made.refuse("c", instance, peer, leaving=False) is None
    return made


def test_a_restarted_process_replaces_one_whose_connection_is_closed() -> None:
    clock, dead = ManualClock(), Peer("a:1")
    known = client_ids(clock, [(1, dead)])
    assert "a:1" in str(known.refuse("c", 2, Peer("b:2"), leaving=False))
    dead.closed = True
    assert known.refuse("c", 2, Peer("b:2"), leaving=False) is None
    # The replaced process is refused while the new one lives.
    assert "b:2" in str(known.refuse("c", 1, Peer("a:3"), leaving=False))


def test_a_process_keeps_its_client_id_by_heartbeats_and_loses_it_without() -> None:
    clock, limits = ManualClock(), MetaLimits()
    one, two = Peer("a:1"), Peer("b:2")
    known = client_ids(clock, [(1, one)])
    for _ in range(20):
        clock.advance(limits.speaker_seconds / 2)
        assert known.refuse("c", 1, one, leaving=False) is None
        assert known.refuse("c", 2, two, leaving=False) is not None
    clock.advance(limits.speaker_seconds + 0.1)
    assert known.refuse("c", 2, two, leaving=False) is None


def test_a_refused_process_that_leaves_does_not_remove_the_other() -> None:
    one, two = Peer("a:1"), Peer("b:2")
    known = client_ids(ManualClock(), [(1, one)])
    assert known.refuse("c", 2, two, leaving=True) is not None
    assert known.refuse("c", 2, two, leaving=False) is not None
    assert known.refuse("c", 1, one, leaving=True) is None
    assert known.refuse("c", 2, two, leaving=False) is None


def test_silent_clients_are_forgotten() -> None:
    clock = ManualClock()
    known = ClientIds(clock, MetaLimits())
    for number in range(100):
        assert known.refuse(f"c{number}", 1, Peer("a:1"), leaving=False) is None
        clock.advance(1)
    assert len(known._owners) <= MetaLimits().member_lost_seconds + 1
