"""The keys of a killed owner resume as soon as its lease has ended and the meta server has noticed the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from plait.limits import ServerLimits
from plait.testing.sim import Process, Simulation
from tests.sim.ordered_cluster import CONFIG
from tests.sim.users import StrictNode

LEASE_SECONDS = 2.0
#: Time for the new owner to learn its share, request the locks and receive the next message.
HANDOVER_SECONDS = 0.15
KEYS = [f"k{n}" for n in range(40)]
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
    limits = ServerLimits(lease_seconds=LEASE_SECONDS)
    config = msgspec.structs.replace(CONFIG, limits=limits)
    with Simulation(seed) as sim:
        node = StrictNode(sim, database, config, partitions=3)
        killed_at = math.inf
        #: Key → (partition, consumer, time) of each handled message.
        handled: dict[str, list[tuple[str, str, float]]] = {key: [] for key in KEYS}

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
        sim.process("producer", lambda process: node.produce(process, KEYS, EVERY_SECONDS)).start()
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
        missed = 0.1 + LEASE_SECONDS - silent
        ends = {}
        for name, partition in broker.subjects.items():
            renewed = partition.groups["g"].consumers["victim"].leased_until - broker.leases.longest
            longest = LEASE_SECONDS * (1 + limits.lease_margin)
            ends[name] = 0.1 + renewed + longest - broker.clock.monotonic()
        sim.run_for(2 * LEASE_SECONDS)
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
