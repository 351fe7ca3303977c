"""A stuck key of a strict subject does not slow down the other keys of its partition."""

from __future__ import annotations

from pathlib import Path

import msgspec

import plait
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.limits import MIB
from plait.testing.sim import Process, Simulation
from tests.sim.ordered_cluster import CONFIG
from tests.sim.users import StrictNode

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
