"""Broker groups of the simulated cluster that are emptied as the documentation says, and switched off (R26).

After a run has drained, an operator leads every subject to the other broker groups, waits until nothing is taken by or
draining at one of them, and ends its broker. All consumers are started again, so none of them remembers what it was
told; what is sent then has to be handled without the broker.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import plait
from plait.errors import PlaitError
from plait.testing.sim import Fault, Simulation

if TYPE_CHECKING:
    from tests.sim.ordered_cluster import OrderedCluster

#: How many of the runs end so.
SHARE = 0.12
#: The broker group that is emptied, and those that take its messages.
EMPTIED, OTHERS = "g3", ("g1", "g2")
#: How long is sent without it.
SEND_SECONDS = 2.0


def is_chosen(seed: int) -> bool:
    """A run of this seed ends with a broker group that is emptied."""
    return random.Random(f"{seed} emptied").random() < SHARE


def switch_off(cluster: OrderedCluster, subjects: list[str], addresses: list[str]) -> None:
    """Empty the broker group, end its broker, and send and handle more."""
    sim = cluster.simulation
    test = sim.process("test")
    sim.run(empty(sim, test.connect(addresses), subjects, EMPTIED, OTHERS), seconds=120.0)
    for process in (*cluster.consumers, *cluster.producers, sim.process(EMPTIED)):
        cluster._fault(Fault("kill", sim.now, 0.0, process.name))
        process.kill()
    cluster.senders.sending = True
    for process in (*cluster.consumers, *cluster.producers):
        process.start()
    sim.run_for(SEND_SECONDS)
    cluster.senders.sending = False


async def empty(
    sim: Simulation, client: plait.Client, subjects: Iterable[str], emptied: str, others: Sequence[str]
) -> None:
    """Lead the subjects to other broker groups, and wait until nothing is taken by or draining at the emptied one."""
    async with client:
        for subject in subjects:
            places = [f"{subject}@{group}" for group in others]
            await client.admin._run("subject.expand", dict, subject=subject, partitions=places)
            while not await _is_empty(client, subject, emptied):
                await sim.sleep(0.5)


async def _is_empty(client: plait.Client, subject: str, emptied: str) -> bool:
    try:
        route = await client.admin.route(subject)
    except PlaitError:
        return False
    mine = [share for share in route.partitions if str(share.partition).partition("@")[2] == emptied]
    return route.reached and not any(share.takes or share.draining for share in mine)
