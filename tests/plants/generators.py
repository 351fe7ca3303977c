"""The generators that find defects: what each runs from one seed, and how many seeds it needs at most.

A generator draws a sequence of events from a seed, applies it to the shipped classes, and checks the result against the
promises. No generator knows which defect is planted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from plait.testing.simulated_disk import SimulatedDisk
from tests.broker import ordered_world
from tests.broker.rate_model import RateModel
from tests.broker.test_filter_model import FilteredWorld, SharedModel, limited_examinations
from tests.broker.test_lost_files import LIVES, check_all, overwrite, remove_files
from tests.broker.test_priority_model import PriorityModel
from tests.broker.test_query_model import run_queries
from tests.broker.test_schedule_model import Scheduling
from tests.broker.test_transaction_model import MODES
from tests.broker.test_transaction_model import run as run_transactions
from tests.meta.firing_model import FiringModel
from tests.outbox.relay_world import RelayWorld
from tests.sim.cluster import Cluster
from tests.sim.ordered_cluster import OrderedCluster
from tests.sim.sink_cluster import SinkCluster
from tests.sim.world.world import World
from tests.support.broker_explorer import Explorer, either, kill
from tests.support.broker_trace import Trace
from tests.support.progress import within_cpu_seconds

#: A run that takes longer than this loops without progress.
CPU_SECONDS = 60.0
#: A world in which no group handles anything for this long is stuck.
QUIET_SECONDS = 12.0


class Generator(NamedTuple):
    """``run`` runs one seed, and raises for a broken promise."""

    name: str
    run: Callable[[int], None]
    #: Seeds within which a defect is found.
    seeds: int


def _world(seed: int) -> None:
    World(seed, seconds=4.0, quiet_seconds=QUIET_SECONDS).run()


def _ordered_cluster(seed: int) -> None:
    OrderedCluster(seed, quiet_seconds=QUIET_SECONDS, early=True).run()


def _shared_cluster(seed: int) -> None:
    # Without faults an at-most-once group gets every message.
    Cluster(seed, script=[]).run()


def _sink_cluster(seed: int) -> None:
    SinkCluster(seed).run()


def _crash_points(seed: int) -> None:
    if seed % 2:
        Explorer(seed, "sync", either, every=5, first=seed % 5).run()
    else:
        Explorer(seed, "async", kill, every=5, first=seed % 5).run()


def _ordered_model(seed: int) -> None:
    ordered_world.World(seed, "sync" if seed % 2 else "async").run(250, cpu_seconds=5.0)


def _schedule_model(seed: int) -> None:
    drawn = settings(
        max_examples=30,
        stateful_step_count=50,
        deadline=None,
        database=None,
        # Finding the defect is enough; shrinking the example takes longer.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    machine = hypothesis.seed(seed)(type("Seeded", (Scheduling,), {}))
    run_state_machine_as_test(machine, settings=drawn)


def _transaction_model(seed: int) -> None:
    run_transactions(seed, 150, MODES[seed % 2])


def _query_model(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_queries(seed, patch)


def _firing_model(seed: int) -> None:
    with tempfile.TemporaryDirectory() as data:
        model = FiringModel(seed, Path(data))
        try:
            model.run(50)
        finally:
            model.close()


def _lives(seed: int) -> None:
    Trace(seed, "sync" if seed % 2 else "async", SimulatedDisk()).run()


def _removed_files(seed: int) -> None:
    check_all(range(seed, seed + LIVES), remove_files)


def _overwritten_files(seed: int) -> None:
    check_all(range(seed, seed + LIVES), overwrite)


def _archivers(seed: int) -> None:
    # Imported late: Arrow and Spark's classes take a second.
    from tests.spark.slow_archivers import Archivers

    with tempfile.TemporaryDirectory() as data, pytest.MonkeyPatch.context() as patch:
        archivers = Archivers(seed, Path(data), patch)
        for plant in archivers_plants:
            plant(patch, archivers)
        archivers.run()


#: Defects of archivers patch the running archivers.
archivers_plants: list[Callable[..., None]] = []


def _pushed_filters(seed: int) -> None:
    # Imported late: Spark's classes take a second.
    from tests.spark.pushed_filters import check_pushed_filters

    check_pushed_filters(seed)


def _outbox(seed: int) -> None:
    RelayWorld(seed).run()


def _rate_model(seed: int) -> None:
    RateModel(seed).run(100)


def _filter_model(seed: int) -> None:
    # Most runs are without limits: the more rows a pull has, the more a defect of their ranges shows.
    with limited_examinations(seed if seed % 4 == 1 else 0):
        SharedModel(seed, "at_least_once").run(60)
        FilteredWorld(seed, "sync" if seed % 2 else "async").run(250, cpu_seconds=9.0)


def _priority_model(seed: int) -> None:
    PriorityModel(seed).run(80)


def _audited_priorities(seed: int) -> None:
    # Imported late: Spark's classes take a second.
    from tests.spark.auditing.test_models import audit_overtaking

    audit_overtaking(seed, kept=seed % 2 == 0)


WORLDS = Generator("worlds", _world, 60)
ORDERED_CLUSTER = Generator("ordered cluster", _ordered_cluster, 30)
SHARED_CLUSTER = Generator("shared cluster", _shared_cluster, 16)
SINK_CLUSTER = Generator("sink cluster", _sink_cluster, 20)
CRASH_POINTS = Generator("crash explorer", _crash_points, 16)
ORDERED_MODEL = Generator("model of ordered groups", _ordered_model, 80)
FILTER_MODEL = Generator("models of filters", _filter_model, 40)
PRIORITY_MODEL = Generator("model of priorities", _priority_model, 60)
AUDITED_PRIORITIES = Generator("audits of priorities", _audited_priorities, 20)
QUERY_MODEL = Generator("model of queries", _query_model, 60)
FIRING_MODEL = Generator("model of recurring messages", _firing_model, 60)
RATE_MODEL = Generator("model of rates", _rate_model, 40)
SCHEDULE_MODEL = Generator("model of delayed messages", _schedule_model, 20)
TRANSACTION_MODEL = Generator("model of transactions", _transaction_model, 200)
BROKER_LIVES = Generator("lives of a broker", _lives, 20)
REMOVED_FILES = Generator("lives whose files are removed", _removed_files, 8)
OVERWRITTEN_FILES = Generator("lives whose files are overwritten", _overwritten_files, 8)
ARCHIVERS = Generator("archivers", _archivers, 60)
PUSHED_FILTERS = Generator("filters of Spark", _pushed_filters, 40)
OUTBOX = Generator("simulated outbox", _outbox, 60)


#: Errors of a defect that does not fit the shipped classes any more.
BROKEN_CODE = (TypeError, AttributeError, NameError)


def finds(generator: Generator, seed: int) -> BaseException | None:
    """The error of a seed's run; None: there is none."""
    try:
        with within_cpu_seconds(CPU_SECONDS):
            generator.run(seed)
    except BROKEN_CODE:
        raise
    except Exception as error:
        if isinstance(error.__cause__, BROKEN_CODE):
            raise
        return error
    return None
