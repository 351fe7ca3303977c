"""Shares are packed many at a time, and clients read in them what was allocated."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.allocation import Allocation, allocate, nobody
from plait.meta.members.shares import Share, Shares, join, shared, split
from plait.model.lp_runs import NumberedRun
from plait.wire import messages as m

MEMBERS = st.lists(st.sampled_from([f"c{number}" for number in range(40)]), unique=True, max_size=40)


def heard(packed: msgspec.Raw) -> list[tuple[str, str, str, list[NumberedRun]]]:
    """What a client finds in the answer to its heartbeat."""
    answer = m.MemberHeartbeatReply(1, packed)  # type: ignore[arg-type]
    told = m.decode(m.MemberHeartbeatReply.KIND, memoryview(m.encode(answer)))
    assert isinstance(told, m.MemberHeartbeatReply)
    return told.members


def lps_of(allocation: Allocation, member: str) -> dict[int, int]:
    """Epochs by logical partition, one by one."""
    owners, epochs = allocation.owners.tolist(), allocation.epochs.tolist()
    return {
        lp: epochs[lp]
        for lp in range(LOGICAL_PARTITIONS)
        if owners[lp] >= 0 and allocation.members[owners[lp]] == member
    }


@settings(deadline=None)
@given(st.lists(MEMBERS, min_size=1, max_size=4), st.sampled_from([0, 200, 2**31, 2**40]))
def test_every_member_hears_of_all_that_is_its_and_of_nothing_else(rounds: list[list[str]], epoch: int):
    allocation = nobody(epoch)
    for members in rounds:
        allocation = allocate(members, allocation)
    shares = Shares("subject", "group", allocation)
    told = heard(join([shares.of(member) for member in allocation.members]))
    for member, (subject, group, strategy, runs) in zip(allocation.members, told, strict=True):
        assert (subject, group, strategy) == ("subject", "group", "exclusive")
        found = [(lp, of) for first, end, of in runs for lp in range(first, end)]
        assert dict(found) == lps_of(allocation, member)
        assert len(found) == len(dict(found))


def test_who_nothing_is_allocated_to_yet_has_nothing():
    shares = Shares("s", "g", allocate(["a"], None))
    assert split(join([shares.of("b")])) == [Share("s", "g", "exclusive", [])]
    assert split(join([shares.of("a")])) == [Share("s", "g", "exclusive", [(0, LOGICAL_PARTITIONS, 1)])]


@pytest.mark.parametrize("runs", [1, 15, 16, LOGICAL_PARTITIONS])
def test_a_share_may_be_in_as_many_runs_as_there_are_logical_partitions(runs: int):
    epochs = np.minimum(np.arange(LOGICAL_PARTITIONS), runs - 1)
    allocation = Allocation(("a",), np.zeros(LOGICAL_PARTITIONS, dtype=np.int64), epochs, runs)
    (share,) = split(join([Shares("s", "g", allocation).of("a")]))
    assert share.lps == [
        *((lp, lp + 1, lp) for lp in range(runs - 1)),
        (runs - 1, LOGICAL_PARTITIONS, runs - 1),
    ]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_a_list_may_be_of_any_length_and_of_both_kinds(count: int):
    exclusive = Shares("\u0416" * 40, "g", allocate(["a"], None)).of("a")
    each = [exclusive, shared("t", "h")]
    assert heard(join([each[number % 2] for number in range(count)])) == [
        ("t", "h", "shared", []) if number % 2 else ("\u0416" * 40, "g", "exclusive", [(0, LOGICAL_PARTITIONS, 1)])
        for number in range(count)
    ]
