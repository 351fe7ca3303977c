"""How partitions share the prefetch of a consumer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.client.consume.prefetch import Prefetch
from plait.limits import PREFETCH_SHARE_MIN, PREFETCH_SHARES_MAX


@dataclass(eq=False)
class Partition:
    """The prefetched rows and bytes of one partition."""

    rows: int = 0
    asked: int = 0
    open_bytes: int = 0
    more: bool = False

    #: How often ``held`` was called.
    looks: int = 0

    @property
    def deliveries(self) -> Partition:
        return self

    @property
    def held(self) -> int:
        self.looks += 1
        return self.rows

    @property
    def bytes(self) -> int:
        return self.open_bytes


def shared_by(limits: plait.ClientLimits, *partitions: Partition) -> Prefetch[Partition]:
    prefetch: Prefetch[Partition] = Prefetch(limits)
    for partition in partitions:
        prefetch.add(partition)
    return prefetch


LIMITS = plait.ClientLimits(prefetch_count=100, prefetch_span=200, prefetch_bytes=1_000)


def test_a_busy_partition_gets_the_common_half() -> None:
    idle, busy = Partition(), Partition(more=True)
    prefetch = shared_by(LIMITS, idle, busy)
    assert (prefetch.wanted(idle), prefetch.wanted(busy)) == (25, 75)
    busy.rows = 75
    assert (prefetch.wanted(idle), prefetch.wanted(busy)) == (25, 0)


def test_the_bytes_of_one_partition_leave_the_other_its_share() -> None:
    idle, busy = Partition(), Partition(rows=10, more=True, open_bytes=750)
    prefetch = shared_by(LIMITS, idle, busy)
    assert (prefetch.wanted(idle), prefetch.wanted(busy)) == (25, 0)


def test_a_starved_partition_pulls_again_when_another_has_fewer_rows() -> None:
    first, second = Partition(rows=75, more=True), Partition(rows=25, more=True)
    prefetch = shared_by(LIMITS, first, second)
    assert prefetch.wanted(second) == 0
    assert prefetch.starved
    assert prefetch.relieved() is None
    first.rows = 60
    prefetch.report(first)
    assert prefetch.relieved() is second
    assert prefetch.relieved() is None
    assert prefetch.wanted(second) == 15


def test_a_partition_starved_by_bytes_pulls_again_too() -> None:
    first, second = Partition(rows=1, open_bytes=500), Partition(rows=1, more=True, open_bytes=300)
    prefetch = shared_by(LIMITS, first, second)
    assert prefetch.wanted(second) == 0
    first.open_bytes = 100
    prefetch.report(first)
    assert prefetch.relieved() is second


def test_a_removed_partition_leaves_its_share_to_the_others() -> None:
    first, second, third = Partition(rows=66, more=True), Partition(rows=17, more=True), Partition(rows=17)
    prefetch = shared_by(LIMITS, first, second, third)
    assert prefetch.wanted(second) == 0
    prefetch.remove(first)
    prefetch.report(second)
    assert prefetch.relieved() is second


def test_a_small_pull_is_sent_only_when_the_user_waits() -> None:
    partition, other = Partition(rows=20), Partition()
    prefetch = shared_by(LIMITS, partition, other)
    assert prefetch.wanted(partition) == 0
    assert prefetch.patient() == [partition]
    assert prefetch.wanted(partition, patient=False) == 5
    assert prefetch.patient() == []
    partition.rows = 12
    assert prefetch.wanted(partition) == 13


def test_each_of_many_partitions_has_a_minimal_share_unless_the_prefetch_is_small() -> None:
    many = [Partition() for _ in range(1_024)]
    assert shared_by(plait.ClientLimits(), *many).wanted(many[0]) == PREFETCH_SHARE_MIN
    assert shared_by(LIMITS, *many).wanted(many[0]) == 1


def test_a_pull_counts_only_its_own_partition() -> None:
    many = [Partition(more=True) for _ in range(1_024)]
    prefetch = shared_by(plait.ClientLimits(), *many)
    for each in many:
        each.rows += prefetch.wanted(each)
    looks = sum(each.looks for each in many)
    for each in many[:100]:
        each.rows -= 1
        prefetch.report(each)
        prefetch.wanted(each)
    assert sum(each.looks for each in many) - looks == 200


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.booleans(), st.integers(0, 1)), min_size=2, max_size=30),
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 3)), max_size=100),
)
def test_partitions_stay_within_the_limit_and_each_has_its_share(
    count: int, kinds: list[tuple[bool, int]], turns: list[tuple[int, int]]
) -> None:
    partitions = [Partition(more=more, asked=asked) for more, asked in kinds]
    prefetch = shared_by(plait.ClientLimits(prefetch_count=count), *partitions)
    for turn, done in turns:
        partition = partitions[turn % len(partitions)]
        partition.rows += prefetch.wanted(partition, patient=False)
        assert sum(each.rows + each.asked for each in partitions) <= most(count, partitions)
        partition.rows = max(partition.rows - done, 0)
        prefetch.report(partition)
    for each in partitions:
        each.rows += prefetch.wanted(each, patient=False)
        assert each.rows + each.asked >= max(count // (2 * len(partitions)), 1)
    assert sum(each.rows + each.asked for each in partitions) <= most(count, partitions)


def most(count: int, partitions: list[Partition]) -> int:
    """The limit for all partitions together."""
    return max(count, len(partitions) * max(min(count // PREFETCH_SHARES_MAX, PREFETCH_SHARE_MIN), 1))
