"""Emptying and switching off a broker group of the simulated cluster, as the documentation says (R26).

After a run has drained, the operator routes every subject to the other broker groups, waits until the emptied group
accepts no rows and has nothing to drain, and ends its broker. All consumers restart, so that none of them has cached
state. Every message that is sent afterwards must be handled without the broker.
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

#: Share of the runs that end with an emptied broker group.
SHARE = 0.12
#: The broker group that is emptied, and the broker groups that accept its messages instead.
EMPTIED, OTHERS = "g3", ("g1", "g2")
#: How long producers send without it.
SEND_SECONDS = 2.0


def is_chosen(seed: int) -> bool:
    """Whether the run of this seed ends with an emptied broker group."""
    return random.Random(f"{seed} emptied").random() < SHARE


def switch_off(cluster: OrderedCluster, subjects: list[str], addresses: list[str]) -> None:
    """Empty the broker group, end its broker, and send more messages."""
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
    """Route the subjects to other broker groups, and wait until the emptied one accepts no rows and has drained."""
    async with client:
        for subject in subjects:
            places = [f"{subject}@{group}" for group in others]
            await client.admin.expand_subject(subject, places)
            while not await _is_empty(client, subject, emptied):
                await sim.sleep(0.5)


async def _is_empty(client: plait.Client, subject: str, emptied: str) -> bool:
    try:
        route = await client.admin.route(subject)
    except PlaitError:
        return False
    mine = [share for share in route.partitions if str(share.partition).partition("@")[2] == emptied]
    return route.reached and not any(share.takes or share.draining for share in mine)
