"""Allocations are fair and sticky, and an LP gets a new epoch with each new owner."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.allocation import Allocation, allocate, decode
from plait.model.logical_partitions import NumberedRun

MEMBERS = st.lists(st.sampled_from([f"c{number}" for number in range(40)]), unique=True, max_size=40)


def names(count: int) -> list[str]:
    return [f"client-{number:04}" for number in range(count)]


def owner_of(allocation: Allocation) -> list[str | None]:
    return [allocation.members[owner] if owner >= 0 else None for owner in allocation.owners.tolist()]


def lps_of(allocation: Allocation, member: str) -> list[NumberedRun]:
    firsts, ends, epochs, begins = allocation.by_member()
    at = allocation.members.index(member)
    mine = slice(begins[at], begins[at + 1])
    return list(zip(firsts[mine].tolist(), ends[mine].tolist(), epochs[mine].tolist(), strict=True))


def check(allocation: Allocation) -> None:
    """Every LP has exactly one owner while there are members; shares differ by at most one LP."""
    owned = sorted(
        (first, end, member) for member in allocation.members for first, end, _ in lps_of(allocation, member)
    )
    if not allocation.members:
        assert owned == []
        return
    assert [first for first, _, _ in owned] == [0, *(end for _, end, _ in owned[:-1])]
    assert owned[-1][1] == LOGICAL_PARTITIONS
    counts = np.bincount(allocation.owners, minlength=len(allocation.members))
    assert counts.max() - counts.min() <= 1
    assert allocation.epochs.max() <= allocation.epoch


def test_the_same_members_change_nothing():
    before = allocate(names(5), None)
    assert allocate(names(5)[::-1], before) is before


def test_the_same_input_gives_the_same_output():
    assert allocate(names(9), allocate(names(4), None)) == allocate(names(9)[::-1], allocate(names(4)[::-1], None))


def test_with_more_members_than_lps_some_members_own_none():
    before = allocate(names(1500), None)
    check(before)
    assert lps_of(before, names(1500)[1499]) == []
    after = allocate([*names(1500), "zoe"], before)
    check(after)
    assert after.epoch == before.epoch


def test_floors_have_the_epoch_of_each_lp():
    allocation = allocate(["a", "b"], allocate(["a"], None))
    assert allocation.floors == [(0, 512, 1), (512, 1024, 2)]


@given(st.lists(MEMBERS, min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_epochs_only_grow_and_as_few_lps_as_possible_move(steps: list[list[str]]):
    allocation: Allocation | None = None
    for members in steps:
        before, allocation = allocation, allocate(members, allocation)
        check(allocation)
        back = decode(allocation.encode())
        assert back == allocation
        assert (back.owners == allocation.owners).all()
        assert (back.epochs == allocation.epochs).all()
        if before is None:
            continue
        old, new = owner_of(before), owner_of(allocation)
        moved = np.array([a != b for a, b in zip(old, new, strict=True)])
        assert (allocation.epochs[~moved] == before.epochs[~moved]).all()
        if members:
            assert (allocation.epochs[moved] == before.epoch + 1).all()
            counts = np.bincount([members.index(owner) for owner in old if owner in members], minlength=len(members))
            small, larger = divmod(LOGICAL_PARTITIONS, len(members))
            assert moved.sum() == LOGICAL_PARTITIONS - np.minimum(counts, small).sum() - min(
                larger, (counts > small).sum()
            )


def test_an_encoded_allocation_is_small():
    allocation = allocate(names(100), None)
    for number in range(50):
        allocation = allocate([*names(100)[number % 7 :], f"late-{number}"], allocation)
    assert len(allocation.encode()) < 12_000
