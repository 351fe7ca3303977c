"""A broker, producers and shared consumers in a simulation with faults of every kind.

No message is lost, invented or stored twice, and none is delivered twice without a fault. ``Cluster(seed)`` repeats a
failure.
"""

from __future__ import annotations

import pytest

import plait
from plait.server import Server
from plait.testing.sim import Fault, Process, Simulation
from tests.sim.cluster import ADDRESS, CONFIG, Cluster, serve


@pytest.mark.parametrize("number", range(8))
def test_nothing_is_lost_or_invented_through_faults(seed: int, number: int):
    cluster = Cluster(seed, flush="sync" if number % 2 else "async")
    cluster.run()
    assert len(cluster.done) > 20


def test_without_faults_everything_is_handled_once():
    cluster = Cluster(1, script=[], lose=False)
    cluster.run()
    assert len(cluster.done) == len(cluster.history.sends) > 50
    successes = [handling.value for handling in cluster.history.handlings if handling.outcome == "ok"]
    assert len(successes) == len(set(successes))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", 3.0, 8.0, "broker"),
        Fault("pause", 3.0, 9.0, "broker"),
        Fault("pause", 3.0, 9.0, "consumer-0"),
        Fault("cut", 3.0, 9.0, "broker", "consumer-0"),
        Fault("cut_one_way", 3.0, 9.0, "consumer-0", "broker"),
        Fault("cut_one_way", 3.0, 9.0, "broker", "consumer-0"),
        Fault("cut", 3.0, 9.0, "broker", "producer-0"),
        Fault("cut_one_way", 3.0, 9.0, "producer-0", "broker"),
        Fault("cut_one_way", 3.0, 9.0, "broker", "producer-0"),
        Fault("jump", 3.0, 0.0, "broker", amount=-20.0),
        Fault("jump", 3.0, 0.0, "broker", amount=86_400.0),
        Fault("jump", 3.0, 0.0, "producer-0", amount=-86_400.0),
        Fault("crash_at", 3.0, 1.0, "broker", amount=3.0),
    ],
    ids=str,
)
def test_one_long_fault_alone_does_no_harm(fault: Fault):
    """Each fault lasts longer than the time after which a silent consumer is lost."""
    cluster = Cluster(2, script=[fault])
    cluster.run()
    assert len(cluster.done) > 50


def test_producers_do_not_notice_a_short_restart_of_the_broker():
    cluster = Cluster(5, script=[Fault("kill", at, 0.3, "broker") for at in (2.0, 5.0, 8.0)], lose=False)
    cluster.run()
    assert cluster.broker.lives == 4
    assert {send.outcome for send in cluster.history.sends} == {"ok"}


def test_large_batches_pass_small_windows_in_pieces(seed: int):
    """Replies are larger than the TCP window and arrive in pieces."""
    with Simulation(seed) as sim:
        sim.network.cut_odds = 0.5
        sim.process("broker", serve).start()
        bodies = [bytes([number % 256]) * 2000 for number in range(400)]

        async def main(process: Process) -> list[bytes]:
            got: list[bytes] = []
            async with process.connect(ADDRESS) as client:
                await client.send_many("big", bodies)
                async with client.consumer("big", "g") as consumer:
                    while len(got) < len(bodies):
                        batch = await consumer.fetch(150)
                        got += [message.body for message in batch]
                        await batch.ack()
            return got

        assert sim.run(main(sim.process("client"))) == bodies


def test_a_clean_stop_and_start_of_the_server_runs_in_a_simulation():
    with Simulation(3) as sim:
        broker = sim.process("broker")
        servers: list[Server] = []

        async def begin() -> None:
            servers.append(Server(broker.disk, CONFIG, clock=broker.clock))
            await servers[-1].start()

        async def send() -> plait.Receipt:
            async with sim.process("test").connect(ADDRESS) as client:
                return await client.send("s", b"body")

        for expected in range(3):
            broker.start(begin())
            assert sim.run(send()).sequence == expected
            sim.run_until(broker.start(servers[-1].stop()).done)
        assert len({id(server) for server in servers}) == 3
        assert not servers[-1].connections
