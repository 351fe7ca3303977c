"""Shares are packed in bulk, and a client decodes exactly what was allocated."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.allocation import Allocation, allocate, unallocated
from plait.meta.members.shares import Shares, join, shared
from plait.model.logical_partitions import NumberedRun
from plait.wire import codec
from plait.wire import messages as m

MEMBERS = st.lists(st.sampled_from([f"c{number}" for number in range(40)]), unique=True, max_size=40)


def decoded(packed: msgspec.Raw) -> list[tuple[str, str, str, list[NumberedRun]]]:
    """The shares that a client finds in the reply to its heartbeat."""
    answer = m.MemberHeartbeatReply(1, packed)  # type: ignore[arg-type]
    reply = codec.decode(m.MemberHeartbeatReply.KIND, memoryview(codec.encode(answer)))
    assert isinstance(reply, m.MemberHeartbeatReply)
    return reply.members


def lps_of(allocation: Allocation, member: str) -> dict[int, int]:
    """The epoch of each LP of a member."""
    owners, epochs = allocation.owners.tolist(), allocation.epochs.tolist()
    return {
        lp: epochs[lp]
        for lp in range(LOGICAL_PARTITIONS)
        if owners[lp] >= 0 and allocation.members[owners[lp]] == member
    }


@settings(deadline=None)
@given(st.lists(MEMBERS, min_size=1, max_size=4), st.sampled_from([0, 200, 2**31, 2**40]))
def test_every_member_receives_all_of_its_share_and_nothing_else(rounds: list[list[str]], epoch: int):
    allocation = unallocated(epoch)
    for members in rounds:
        allocation = allocate(members, allocation)
    shares = Shares("subject", "group", allocation)
    reply = decoded(join([shares.of(member) for member in allocation.members]))
    for member, (subject, group, strategy, runs) in zip(allocation.members, reply, strict=True):
        assert (subject, group, strategy) == ("subject", "group", "exclusive")
        found = [(lp, of) for first, end, of in runs for lp in range(first, end)]
        assert dict(found) == lps_of(allocation, member)
        assert len(found) == len(dict(found))


def test_a_member_without_an_allocation_has_an_empty_share():
    shares = Shares("s", "g", allocate(["a"], None))
    assert decoded(join([shares.of("b")])) == [("s", "g", "exclusive", [])]
    assert decoded(join([shares.of("a")])) == [("s", "g", "exclusive", [(0, LOGICAL_PARTITIONS, 1)])]


@pytest.mark.parametrize("runs", [1, 15, 16, LOGICAL_PARTITIONS])
def test_a_share_may_have_as_many_runs_as_there_are_lps(runs: int):
    epochs = np.minimum(np.arange(LOGICAL_PARTITIONS), runs - 1)
    allocation = Allocation(("a",), np.zeros(LOGICAL_PARTITIONS, dtype=np.int64), epochs, runs)
    assert Shares("s", "g", allocation).lps("a") == [
        *((lp, lp + 1, lp) for lp in range(runs - 1)),
        (runs - 1, LOGICAL_PARTITIONS, runs - 1),
    ]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_a_reply_may_have_any_number_of_shares_of_both_kinds(count: int):
    exclusive = Shares("\u0416" * 40, "g", allocate(["a"], None)).of("a")
    each = [exclusive, shared("t", "h")]
    assert decoded(join([each[number % 2] for number in range(count)])) == [
        ("t", "h", "shared", []) if number % 2 else ("\u0416" * 40, "g", "exclusive", [(0, LOGICAL_PARTITIONS, 1)])
        for number in range(count)
    ]
