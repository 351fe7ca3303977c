"""A strict subject of one node: a killed owner's keys resume soon, and a stuck key does not slow down the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import plait
from plait.broker import BrokerConfig
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.limits import MIB, ServerLimits
from plait.meta.database.connection import file_url
from plait.server import Server
from plait.testing.embedded_broker import empty_database
from plait.testing.sim import Process, Simulation
from tests.sim.ordered_cluster import CONFIG


class StrictNode:
    """A node with a strict subject "s", into which a producer sends one message of each key again and again."""

    address = "plait://127.0.0.1:7450"

    def __init__(self, simulation: Simulation, database: Path, config: BrokerConfig, *, partitions: int) -> None:
        self._simulation = simulation
        self._config = config
        database.write_bytes(empty_database())
        self._meta = file_url(str(database))
        self.server: Server
        simulation.process("broker", self._serve).start()
        simulation.run(self._create(partitions))

    async def _serve(self, process: Process) -> None:
        self.server = Server(process.disk, self._config, clock=process.clock, meta=self._meta)
        await self.server.start()

    async def _create(self, partitions: int) -> None:
        async with self._simulation.process("test").connect(self.address) as client:
            await client.admin.create_subject("s", order="strict", partitions=partitions)

    async def produce(self, process: Process, keys: list[str], every_seconds: float) -> None:
        async with process.connect(self.address) as client:
            while True:
                await client.send_many("s", [b"x"] * len(keys), keys=keys)
                await self._simulation.sleep(every_seconds)

    def close(self) -> None:
        host = self.server.cluster._host
        assert host is not None
        assert host._store is not None
        host._store.close()


# --- a killed owner -----------------------------------------------------------------------------

LEASE = 2.0
#: Time for the new owner to learn its share, request the locks and receive the next message.
HANDOVER_SECONDS = 0.15
OWNED = [f"k{n}" for n in range(40)]
EVERY_SECONDS = 0.05
#: The victim stops acking this long before it is killed, so that it holds messages of all its keys.
HELD_SECONDS = 0.5


class Standstill(NamedTuple):
    """Times of one key of a killed owner, in seconds after the kill."""

    lease_end: float
    missed: float
    resumed: float


def standstills(database: Path, seed: int, killed_after: float) -> list[Standstill]:
    """When the owner's lease ends, when the meta server notices the loss, and when each key resumes."""
    limits = ServerLimits(lease_seconds=LEASE)
    config = msgspec.structs.replace(CONFIG, limits=limits)
    with Simulation(seed) as sim:
        node = StrictNode(sim, database, config, partitions=3)
        killed_at = math.inf
        #: Key → (partition, consumer, time) of each handled message.
        handled: dict[str, list[tuple[str, str, float]]] = {key: [] for key in OWNED}

        async def consume(process: Process) -> None:
            async with (
                process.connect(node.address, client_id=process.name) as client,
                client.consumer("s", "g", ordered=True) as consumer,
            ):
                async for message in consumer:
                    assert message.key is not None
                    handled[message.key].append((message.partition.name, process.name, sim.now))
                    # A key without messages in flight may resume sooner.
                    if process.name == "other" or sim.now < killed_at - HELD_SECONDS:
                        message.ack()

        for name in ("victim", "other"):
            sim.process(name, consume).start()
        sim.process("producer", lambda process: node.produce(process, OWNED, EVERY_SECONDS)).start()
        killed_at = sim.now + 6.0 + killed_after
        sim.run_for(killed_at - sim.now)
        sim.process("victim").kill()
        # Requests in flight still count.
        sim.run_for(0.1)
        broker, host = node.server.broker, node.server.cluster._host
        assert host is not None
        members = host.service.members
        members._pass_time()
        silent = members._watch._now - members._watch._noticed["victim"]
        missed = 0.1 + LEASE - silent
        ends = {}
        for name, partition in broker.subjects.items():
            renewed = partition.groups["g"].consumers["victim"].leased_until - broker.leases.longest
            longest = LEASE * (1 + limits.lease_margin)
            ends[name] = 0.1 + renewed + longest - broker.clock.monotonic()
        sim.run_for(2 * LEASE)
        node.close()
    found = []
    for events in handled.values():
        last = max((time for _, name, time in events if name == "victim"), default=0.0)
        if last > killed_at - 1.0:
            partition, resumed = min(
                ((where, time) for where, name, time in events if name == "other" and time > last),
                key=lambda event: event[1],
            )
            found.append(Standstill(ends[partition], missed, resumed - killed_at))
    return found


@pytest.mark.parametrize("phase", range(4))
def test_the_keys_of_a_killed_owner_resume_when_its_lease_has_ended(tmp_path: Path, phase: int):
    found = standstills(tmp_path / "meta.db", phase, phase * 0.19)
    assert len(found) > 5
    for each in found:
        # Not before the lease ends: the owner might be alive.
        assert each.resumed >= each.lease_end
        assert each.resumed <= max(each.lease_end, each.missed) + HANDOVER_SECONDS


# --- a stuck key --------------------------------------------------------------------------------

MINUTES = 3
#: Messages of each key per second: 32 in total.
BATCHES = 2
KEYS = [f"k{n}" for n in range(16)]
STUCK = KEYS[0]


def handled_others(
    database: Path, *, stuck: bool, seconds: float = 0.0, minutes: int = MINUTES
) -> tuple[int, list[int]]:
    """How many messages of the other keys were handled, and how much the broker remembers after each minute.

    The consumer takes ``seconds`` for a message.
    """
    config = msgspec.structs.replace(CONFIG, checkpoint_seconds=60.0, message_segment_size=MIB, action_segment_size=MIB)
    with Simulation(5) as sim:
        node = StrictNode(sim, database, config, partitions=1)
        sizes: list[int] = []
        count = 0

        async def consume(process: Process) -> None:
            nonlocal count
            retry = plait.Retry(attempts=10_000, first=1.0, longest=5.0)
            async with (
                process.connect(node.address) as client,
                client.consumer("s", "g", ordered=True, retry=retry) as consumer,
            ):
                while True:
                    for message in await consumer.fetch(200, wait=5.0):
                        await sim.sleep(seconds)
                        if stuck and message.key == STUCK:
                            message.nack()
                        else:
                            message.ack()
                            count += message.key != STUCK

        sim.process("consumer", consume).start()
        sim.process("producer", lambda process: node.produce(process, KEYS, 1.0 / BATCHES)).start()
        for _ in range(minutes):
            sim.run_for(60.0)
            [group] = node.server.broker.subjects["s"].groups.values()
            assert isinstance(group, OrderedGroup)
            ranges = sum(
                len(cursor.returned) + len(cursor.waiting) + len(cursor.all_held()) for cursor in group.cursors
            )
            sizes.append(len(list(group.cursors)) + ranges)
        node.close()
        return count, sizes


def test_a_stuck_key_slows_down_no_other_key_and_memory_stays_flat(tmp_path: Path):
    usual, _ = handled_others(tmp_path / "usual.db", stuck=False)
    beside, sizes = handled_others(tmp_path / "beside.db", stuck=True)
    assert beside >= 0.95 * usual
    assert usual >= 0.99 * MINUTES * 60 * BATCHES * (len(KEYS) - 1)
    assert sizes[-1] <= sizes[1] + 5


def test_an_overloaded_consumer_handles_as_much_with_a_stuck_key_as_without(tmp_path: Path):
    busy, minutes = 1.25 / (BATCHES * len(KEYS)), 2
    usual, _ = handled_others(tmp_path / "usual.db", stuck=False, seconds=busy, minutes=minutes)
    beside, _ = handled_others(tmp_path / "beside.db", stuck=True, seconds=busy, minutes=minutes)
    assert usual <= 0.85 * minutes * 60 * BATCHES * (len(KEYS) - 1)
    assert beside >= 0.95 * usual
