"""The memory of an ordered group: a broker may have hundreds of thousands of them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import plait
from plait.broker.groups.group import AttachedConsumer
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import ZEROS, LpNumbers
from tests.broker.ordered_node import NEWEST, SUBJECT, make_subject
from tests.support.broker_node import Node

GROUPS = 100
KIB = 1024
#: Only the broker's files are counted: clients of other tests may run in threads of this process.
PACKAGE = Path(plait.__file__).parent


def bytes_of_each(make: Callable[[], None]) -> float:
    """Bytes per group that ``make`` allocates in the broker; files of the simulated disk are not counted."""
    # Collect garbage of other tests until there is none: finalizers can free more objects, and allocate.
    while gc.collect():
        pass
    tracemalloc.start()
    try:
        make()
        gc.collect()
        found = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, f"{PACKAGE}/{part}/*") for part in ("broker", "storage", "frame")]
        )
    finally:
        tracemalloc.stop()
    # Shown when a test fails.
    print(*found.statistics("lineno")[:10], sep="\n")
    return sum(trace.size for trace in found.traces) / GROUPS


@pytest.fixture
def node() -> Node:
    node = Node()
    make_subject(node)
    # Allocate one-time state before the measurement.
    node.membership.detach(leased(node, "first", [(0, 512, 1, 0)]))
    return node


def leased(node: Node, group: str, wants: list[tuple[int, int, int, int]]) -> AttachedConsumer:
    consumer = node.attach(SUBJECT, group, ordered=True)
    node.broker.leases.ask(consumer, wants, [], [], NEWEST)
    return consumer


def test_an_ordered_group_without_locks_takes_little_more_than_a_shared_one(node: Node) -> None:
    def make() -> None:
        for number in range(GROUPS):
            node.membership.detach(node.attach(SUBJECT, f"g{number}", ordered=True))
        node.turn()

    assert bytes_of_each(make) <= 4.5 * KIB


def test_a_group_whose_locks_are_one_run_takes_the_memory_of_one_run(node: Node) -> None:
    consumers: list[AttachedConsumer] = []

    def make() -> None:
        consumers.extend(leased(node, f"g{number}", [(100, 700, 1, 5)]) for number in range(GROUPS))
        node.turn()

    assert bytes_of_each(make) <= 16 * KIB
    assert node.group(SUBJECT, "g7").locks.owner.tolist() == [
        consumers[7].id if 100 <= lp < 700 else 0 for lp in range(LOGICAL_PARTITIONS)
    ]


def test_the_floors_of_a_meta_server_are_kept_as_runs(node: Node) -> None:
    floors = {(SUBJECT, f"g{number}"): [(0, 512, number + 1), (512, 1024, 7)] for number in range(GROUPS)}
    assert bytes_of_each(lambda: node.broker.leases.set_floors(floors)) <= 1 * KIB


def test_lp_numbers_keep_the_numbers_that_they_were_made_of() -> None:
    rng = np.random.default_rng(5)
    for changes in [0, 1, 2, 30, 1023]:
        numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first in rng.integers(0, LOGICAL_PARTITIONS, changes).tolist():
            numbers[first:] = rng.integers(0, 2**62)
        steps = LpNumbers.of(numbers)
        assert np.array_equal(steps.array(), numbers)
        assert steps.any() == numbers.any()
        assert steps.same(LpNumbers.of(numbers.copy()))
        numbers[-1] += 1
        assert not steps.same(LpNumbers.of(numbers))
    assert LpNumbers.of(np.zeros(LOGICAL_PARTITIONS, np.int64)) is ZEROS
