"""Many seeds of the simulated clusters; the ordinary tests run a few of each."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.sim.cluster import Cluster
from tests.sim.ordered_cluster import OrderedCluster
from tests.sim.sink_cluster import SinkCluster
from tests.sim.world.world import World
from tests.support.deep import Cycles

#: Seeds of one cycle: enough to keep two processes busy, few enough to repeat after an interruption.
SEEDS = 20


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), collect_by_hand) as pool:
        yield pool


def collect_by_hand() -> None:
    """Exempt imported modules from garbage collection; ``outcome`` collects explicitly."""
    gc.freeze()
    gc.disable()


def survive(pool: ProcessPoolExecutor, run: Callable[[int, int], str], seed: int, numbers: Iterable[int]) -> None:
    """Run the seeds in parallel; fails with all their errors."""
    listed = list(numbers)
    failures = [failure for failure in pool.map(run, [seed] * len(listed), listed) if failure]
    assert not failures, "\n".join(failures)


def shared(flush: str, seed: int, number: int) -> str:
    cluster = Cluster(seed + number, flush="sync" if flush == "sync" else "async", seconds=15.0 + number % 4 * 10.0)
    return outcome(f"Cluster({seed + number}, {flush!r})", cluster.run)


def shared_async(seed: int, number: int) -> str:
    return shared("async", seed, number)


def shared_sync(seed: int, number: int) -> str:
    return shared("sync", seed, number)


def ordered(seed: int, number: int) -> str:
    seconds = 4.0 + number % 4
    return outcome(f"OrderedCluster({seed + number}, {seconds=})", OrderedCluster(seed + number, seconds=seconds).run)


def world(seed: int, number: int) -> str:
    seconds = 3.0 + number % 4
    return outcome(f"World({seed + number}, {seconds=})", World(seed + number, seconds=seconds).run)


def sink(seed: int, number: int) -> str:
    return outcome(f"SinkCluster({seed + number})", SinkCluster(seed + number).run)


def outcome(name: str, run: Callable[[], object]) -> str:
    """Run one seed: the error as text; "" if there is none."""
    # Frees the previous cluster, whose objects form reference cycles.
    gc.collect()
    try:
        run()
    except BaseException as failure:  # noqa: BLE001 - the caller reports it
        return "\n".join([f"{name}: {type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())])
    return ""


# One suite each, so that none takes more than half an hour.
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(ordered, marks=pytest.mark.deep("sim")),
        pytest.param(world, marks=pytest.mark.deep("sim-world")),
        pytest.param(sink, marks=pytest.mark.deep("sim-sink")),
        pytest.param(shared_async, marks=pytest.mark.deep("sim-shared")),
        pytest.param(shared_sync, marks=pytest.mark.deep("sim-shared")),
    ],
)
def test_a_cluster_survives_two_thousand_seeds(
    seed: int, cycles: Cycles, processes: ProcessPoolExecutor, run: Callable[[int, int], str]
):
    for cycle in cycles(2000 // SEEDS):
        survive(processes, run, seed, range(cycle * SEEDS, (cycle + 1) * SEEDS))
