"""The simulation itself: time, turns, processes, and exact repetition from a seed."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait import chance
from plait.testing.sim import Process, SimLoop, Simulation, SimulationFailed

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def sim() -> Iterator[Simulation]:
    with Simulation(1) as simulation:
        yield simulation


def test_virtual_time_takes_no_real_time(sim: Simulation):
    async def main() -> float:
        begun = asyncio.get_running_loop().time()
        await sim.sleep(3000.0)
        return asyncio.get_running_loop().time() - begun

    assert sim.run(main()) == pytest.approx(3000.0, abs=1.0)
    assert sim.now == pytest.approx(3000.0, abs=1.0)


def test_call_soon_runs_callbacks_in_order_and_in_the_next_turn(sim: Simulation):
    seen: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(3):
            loop.call_soon(seen.append, number)
        loop.call_soon(lambda: loop.call_soon(seen.append, "later"))
        assert seen == []
        await asyncio.sleep(0)
        assert seen == [0, 1, 2]
        await asyncio.sleep(0)
        assert seen == [0, 1, 2, "later"]

    sim.run(main())


def test_timers_fire_in_order_and_cancelled_ones_never(sim: Simulation):
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(10 - number, seen.append, number) for number in range(10)]
        handles[4].cancel()
        for _ in range(500):
            loop.call_later(20.0, seen.append, -1).cancel()
        await sim.sleep(30.0)

    sim.run(main())
    assert seen == [9, 8, 7, 6, 5, 3, 2, 1, 0]


def test_executor_functions_run_in_order_and_take_time(sim: Simulation):
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        jobs = [loop.run_in_executor(None, seen.append, number) for number in range(20)]
        assert seen == []
        await asyncio.gather(*jobs)
        assert loop.time() > begun
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        # A thread has no running loop.
        with pytest.raises(RuntimeError):
            await loop.run_in_executor(None, asyncio.get_running_loop)

    sim.run(main())
    assert seen == list(range(20))


def test_a_busy_process_does_not_stop_the_clock(sim: Simulation):
    async def spin() -> None:
        while True:  # noqa: ASYNC110 - busy on purpose
            await asyncio.sleep(0)

    sim.process("busy").start(spin())
    sim.run(sim.sleep(0.05))
    assert 0.05 <= sim.now < 0.06


def test_a_process_can_have_several_loops_that_wake_each_other(sim: Simulation):
    process = sim.process("p")
    seen: list[SimLoop] = []

    async def main() -> None:
        other = process.loop("renewals")
        woken = asyncio.get_running_loop().create_future()

        def on_other_loop() -> None:
            seen.append(asyncio.get_running_loop())  # type: ignore[arg-type]
            process.loop().call_soon_threadsafe(woken.set_result, None)

        other.call_soon_threadsafe(on_other_loop)
        await woken

    task = process.start(main())
    sim.run_until(task.done)
    assert seen == [process.loop("renewals")]


# --- failures -----------------------------------------------------------------------------------


async def fails() -> None:
    raise ValueError("broken")


def test_calls_outside_of_all_processes_have_no_running_loop(sim: Simulation):
    seen: list[object] = []

    async def main() -> None:
        sim.call_later(0.0, lambda: seen.append(asyncio._get_running_loop()))
        await sim.sleep(1.0)
        seen.append(asyncio.get_running_loop())

    sim.run(main())
    assert seen == [None, sim.process("test").loop()]


def test_an_error_in_a_process_fails_the_simulation_with_its_seed_and_traceback():
    with Simulation(17) as sim:
        sim.process("p").start(fails())
        with pytest.raises(SimulationFailed, match="broken") as failure:
            sim.run_for(1.0)
    assert "ValueError" in str(failure.value)
    notes = "\n".join(failure.value.__notes__)
    assert "seed=17" in notes
    assert "test_an_error_in_a_process" in notes
    assert "p            starts" in notes


def test_an_expected_error_is_only_an_event(sim: Simulation):
    process = sim.process("p")
    process.expect(ValueError)
    process.start(fails())
    process.loop().call_soon(lambda: int("x"))
    sim.run_for(1.0)
    assert any("expected" in line for line in sim.trace.lines())


def test_an_error_that_plait_logs_fails_the_simulation_unless_it_is_allowed():
    async def complain() -> None:
        logging.getLogger("plait.server").error("the disk is slow")

    with pytest.raises(SimulationFailed, match="the disk is slow"), Simulation(1) as sim:
        sim.run(complain())
    with Simulation(1, allow_logs=["the disk *"]) as sim:
        sim.run(complain())


def test_a_run_that_takes_too_long_fails():
    with pytest.raises(SimulationFailed, match="sleep is not done and 10 s have passed"), Simulation(1) as sim:
        sim.run(sim.sleep(11.0), seconds=10.0)


def test_a_run_that_cannot_end_fails_at_once():
    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationFailed, match="no event is left"), Simulation(1) as sim:
        sim.run(wait_for_nothing())


def test_a_failed_assertion_of_the_test_names_the_seed():
    with pytest.raises(AssertionError) as failure, Simulation(23):
        assert [] == [1]
    assert "seed=23" in "\n".join(failure.value.__notes__)


# --- killing and pausing ------------------------------------------------------------------------


def test_a_killed_process_stops_without_clean_up():
    seen: list[str] = []

    async def main(process: Process) -> None:
        try:
            seen.append("begun")
            await sim.sleep(10.0)
            seen.append("continued")
        finally:
            if not over:
                seen.append("cleaned up")

    over = False
    with Simulation(1) as sim:
        process = sim.process("p", main)
        process.start()
        sim.run_for(1.0)
        process.kill()
        assert not process.alive
        sim.run_for(20.0)
        assert seen == ["begun"]
        process.start()
        sim.run_for(20.0)
        assert seen == ["begun", "begun", "continued", "cleaned up"]
        assert process.lives == 2
        over = True


def test_a_kill_hits_all_loops_of_a_process(sim: Simulation):
    process = sim.process("p")
    ticks: list[str] = []

    def tick(name: str) -> None:
        ticks.append(name)
        process.loop(name).call_later(1.0, tick, name)

    for name in ("main", "renewals"):
        process.loop(name).call_soon(tick, name)
    sim.run_for(5.5)
    assert ticks.count("main") == ticks.count("renewals") == 6
    process.kill()
    sim.run_for(5.0)
    assert len(ticks) == 12


def test_a_resumed_process_runs_the_timers_that_came_due_during_the_pause(sim: Simulation):
    process = sim.process("p")
    at: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        loop.call_later(2.0, lambda: at.append(loop.time() - begun))
        await sim.sleep(1000.0)

    process.start(main())
    sim.run_for(1.0)
    process.pause()
    sim.run_for(10.0)
    assert at == []
    process.resume()
    sim.run_for(1.0)
    assert at == [pytest.approx(11.0, abs=0.1)]


def test_a_coroutine_that_does_not_end_does_not_block_close():
    async def clings() -> None:
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)

    with Simulation(1) as sim:
        sim.process("p").start(clings())
        sim.run_for(1.0)
        sim.process("p").kill()


# --- disks --------------------------------------------------------------------------------------


def test_a_power_loss_loses_unsynced_writes():
    lost = 0
    for seed in range(20):
        with Simulation(seed) as sim:
            process = sim.process("p")
            process.start(sim.sleep(100.0))
            synced = process.disk.open("synced", create=True)
            synced.write([b"written"], 0)
            synced.sync()
            process.disk.open("unsynced", create=True)
            process.disk.sync_directory("")
            process.disk.open("unsynced").write([b"written"], 0)
            process.kill(power_loss=True)
            process.start(sim.sleep(100.0))
            assert process.disk.read("synced") == b"written"
            lost += process.disk.read("unsynced") != b"written"
    assert 0 < lost < 20


def test_a_process_can_be_killed_in_the_middle_of_a_write():
    sizes = set()
    for seed in range(20):
        with Simulation(seed) as sim:
            process = sim.process("p")
            seen: list[str] = []

            async def main(process: Process = process, seen: list[str] = seen) -> None:
                file = process.disk.open("f", create=True)
                process.crash_at(1)
                file.write([b"first"], 0)
                file.write([b"second"], 5)
                seen.append("continued")

            process.start(main())
            sim.run_for(1.0)
            assert not process.alive
            assert seen == []
            sizes.add(len(process.disk.read("f")))
    assert min(sizes) == 5
    assert max(sizes) == 11
    assert len(sizes) > 3


# --- clocks and chance --------------------------------------------------------------------------


def test_every_machine_has_its_own_monotonic_clock(sim: Simulation):
    clocks = [sim.process(name).clock for name in "abc"]
    begun = [each.monotonic() for each in clocks]
    assert len(set(begun)) == 3
    sim.run_for(1000.0)
    passed = [each.monotonic() - before for each, before in zip(clocks, begun, strict=True)]
    assert passed == [pytest.approx(1000.0, abs=1.0)] * 3
    assert len(set(passed)) == 3


def test_only_the_wall_clock_jumps(sim: Simulation):
    process = sim.process("p")
    wall, monotonic = process.clock.now(), process.clock.monotonic()
    process.jump(-100.0)
    assert process.clock.now() == wall - 100_000_000
    assert process.clock.monotonic() == monotonic


def test_random_choices_of_shipped_code_follow_from_the_seed():
    async def draw() -> int:
        return chance.bits(63)

    def drawn(seed: int) -> int:
        with Simulation(seed) as sim:
            return sim.run(draw())

    assert drawn(1) == drawn(1) != drawn(2)
    assert chance.bits(63) != chance.bits(63)


# --- repeating ----------------------------------------------------------------------------------

SCENARIO = """
import sys
sys.path.insert(0, {root!r})
from tests.sim.cluster import Cluster
cluster = Cluster(int(sys.argv[1]), seconds=6.0)
cluster.run()
print(cluster.simulation.trace.digest)
"""


def test_a_seed_repeats_a_run_exactly_in_one_process_and_in_two():
    from tests.sim.cluster import Cluster

    def digest(seed: int) -> str:
        cluster = Cluster(seed, seconds=6.0)
        cluster.run()
        return cluster.simulation.trace.digest

    here = digest(3)
    assert digest(3) == here
    assert digest(4) != here
    elsewhere = subprocess.run(
        [sys.executable, "-c", SCENARIO.format(root=str(ROOT)), "3"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)},
    )
    assert elsewhere.stdout.strip() == here
