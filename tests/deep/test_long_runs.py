"""Long runs of the models, of the crash explorer, and of real processes under kills and faults."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.broker.ordered_world import World
from tests.broker.test_retry_model import Retrying
from tests.broker.test_schedule_model import Scheduling
from tests.support.broker_explorer import Explorer, Survive, either, every_byte, kill, power_loss
from tests.support.deep import Cycles
from tests.support.durability import Load
from tests.support.ordered_chaos import Chaos
from tests.support.process import ServerProcess
from tests.test_durability import FLUSHES, TIGHT

EXAMPLES = 50


@pytest.mark.deep("models")
@pytest.mark.parametrize("machine", [Retrying, Scheduling])
def test_a_state_machine_finds_nothing(machine: type[RuleBasedStateMachine], seed: int, cycles: Cycles):
    many = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        deadline=None,
        derandomize=False,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for number in cycles(100):
        drawn = hypothesis.seed(seed + number)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(drawn, settings=many)


@pytest.mark.deep("models")
def test_keys_are_handled_in_order_once_and_completely(seed: int, cycles: Cycles):
    for number in cycles(1_000):
        World(seed + number, FLUSHES[number % 2]).run(250)


#: The flush mode, the kind of crash, and whether everything acknowledged must survive it.
MODES: list[tuple[str, Survive, bool]] = [
    ("sync", power_loss, True),
    ("async", power_loss, False),
    ("sync", kill, True),
    ("async", kill, True),
]
#: The test is split into this many parts, which together crash at every byte.
PARTS = 10


@pytest.mark.deep("crash")
def test_every_byte_of_every_write_is_a_crash_point(seed: int, cycles: Cycles):
    for number in cycles(PARTS * len(MODES)):
        part, mode = divmod(number, len(MODES))
        flush, survive, all_written = MODES[mode]
        explorer = Explorer(seed, flush, survive, bytes_of=every_byte, all_written=all_written, every=PARTS, first=part)
        explorer.run()
        assert explorer.crashes > 1_000
        assert explorer.failed_syncs > 80


@pytest.mark.deep("crash")
def test_many_lives_are_survived(seed: int, cycles: Cycles):
    for number in cycles(200):
        flush, survive, all_written = MODES[number % len(MODES)]
        if flush == "sync":
            survive = either
        explorer = Explorer(seed + number, flush, survive, all_written=all_written, operations=300)
        explorer.run()
        assert explorer.crashes > 1_000
        assert explorer.failed_syncs > 80


@pytest.mark.deep("crash")
@pytest.mark.parametrize("settings", [None, TIGHT], ids=["serve", "tight"])
async def test_a_server_killed_fifty_times_keeps_its_promises(
    tmp_path: Path, seed: int, cycles: Cycles, settings: dict[str, Any] | None
):
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        server.start()
        async with Load(server, random.Random(seed)) as load:
            for number in cycles(50):
                await load.cycle(FLUSHES[(number + 1) % 2])


@pytest.mark.deep("ordered")
async def test_ordered_messages_keep_their_order_for_ten_minutes_of_faults(tmp_path: Path, seed: int, cycles: Cycles):
    for number in cycles(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        await Chaos(directory, seed + number, seconds=60.0).run()
        shutil.rmtree(directory)
