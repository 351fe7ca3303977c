"""Scripts of random faults: they follow from a seed, and every fault ends before its script ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from plait.testing.sim import Fault, Faults, Process, Simulation, play

NAMES = ["broker", "a", "b"]
PAIRS = [("broker", "a"), ("broker", "b")]


def faults(seed: int) -> Faults:
    return Faults(random.Random(seed), NAMES, PAIRS, disks=["broker"])


async def live(process: Process) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.fixture
def sim() -> Iterator[Simulation]:
    with Simulation(1) as simulation:
        yield simulation


def test_a_script_follows_from_its_seed():
    assert faults(1).script(100.0) == faults(1).script(100.0) != faults(2).script(100.0)


@pytest.mark.parametrize("number", range(10))
def test_a_script_is_in_order_of_time_and_no_fault_outlasts_it(number: int):
    script = faults(number).script(60.0)
    assert [fault.at for fault in script] == sorted(fault.at for fault in script)
    assert all(fault.end <= 60.0 for fault in script)
    assert all(fault.process == "broker" for fault in script if fault.kind == "crash_at")


def test_every_kind_of_fault_is_drawn_short_and_long():
    script = faults(1).script(5000.0)
    assert {fault.kind for fault in script} == {"kill", "crash_at", "pause", "cut", "cut_one_way", "jump"}
    lasting = [fault.seconds for fault in script if fault.kind == "pause"]
    assert min(lasting) < 1.0 < 8.0 < max(lasting) <= 12.0


def test_only_possible_faults_are_drawn():
    script = Faults(random.Random(1), NAMES).script(1000.0)
    assert {fault.kind for fault in script} == {"kill", "pause", "jump"}
    script = Faults(random.Random(1), NAMES, weights={"power_loss": 1}).script(100.0)
    assert {fault.kind for fault in script} == {"power_loss"}


def test_a_fault_prints_its_time_kind_and_processes():
    assert str(Fault("cut", 1.5, 2.0, "a", "b")) == "1.500 s: cut a from b for 2.000 s"
    assert str(Fault("jump", 1.0, 0.0, "a", amount=-5.0)) == "1.000 s: jump a by -5 for 0.000 s"


def test_faults_happen_at_their_times_and_end(sim: Simulation):
    a, b = sim.process("a", live), sim.process("b", live)
    a.start()
    b.start()
    begun: list[tuple[float, str]] = []
    script = [
        Fault("kill", 1.0, 2.0, "a"),
        Fault("pause", 4.0, 2.0, "a"),
        Fault("cut_one_way", 7.0, 2.0, "a", "b"),
        Fault("cut", 10.0, 2.0, "a", "b"),
        Fault("power_loss", 13.0, 2.0, "a"),
    ]
    end = play(sim, script, lambda fault: begun.append((sim.now, fault.kind)))
    assert end == 15.0
    states = []
    for _ in script:
        sim.run_for(2.0)
        states.append((a.alive, a.paused, sim.network.is_cut(a, b), sim.network.is_cut(b, a), a.powered))
        sim.run_for(1.0)
        assert a.alive
        assert not a.paused
        assert not sim.network.is_cut(a, b)
    assert states == [
        (False, False, False, False, True),
        (True, True, False, False, True),
        (True, False, True, False, True),
        (True, False, True, True, True),
        (False, False, False, False, False),
    ]
    assert begun == [(fault.at, fault.kind) for fault in script]


def test_a_planned_crash_without_enough_operations_does_not_happen(sim: Simulation):
    process = sim.process("a", live)
    process.start()
    play(sim, [Fault("crash_at", 1.0, 1.0, "a", amount=3)])
    sim.run_for(1.5)
    process.disk.open("f", create=True)
    sim.run_for(1.0)
    for _ in range(10):
        process.disk.open("f").write([b"x"], 0)
    assert process.lives == 1
