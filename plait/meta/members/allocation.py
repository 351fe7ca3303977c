"""Which member of an exclusive group is to handle which logical partitions.

An allocation is a proposal: the broker's lock is the right to handle. Each LP has the *epoch* in which it last changed
hands, by which brokers tell the newer proposal from the older.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.balance import balance
from plait.model.lp_runs import NumberedRun, Numbers, edges, runs_of

_END = np.dtype("<u2")
_OWNER = np.dtype("<i4")
_BEHIND = np.dtype("<u4")


class _AllocationColumns(msgspec.Struct, array_like=True, frozen=True):
    """An allocation in the database: columns of runs with the same owner and epoch."""

    epoch: int
    members: list[str]
    ends: bytes
    owners: bytes
    #: How far the run's epoch is behind the newest.
    behind: bytes


class Allocation:
    """Every LP's owner and epoch. Without members nobody owns anything."""

    def __init__(self, members: tuple[str, ...], owners: Numbers, epochs: Numbers, epoch: int) -> None:
        #: In order; ``owners`` has indexes of it, or -1.
        self.members = members
        self.owners = owners
        self.epochs = epochs
        #: The newest of all.
        self.epoch = epoch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allocation) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash((self.members, self.epoch))

    @cached_property
    def floors(self) -> list[NumberedRun]:
        """(first, end, epoch): older epochs of these LPs have lost them for good."""
        return runs_of(self.epochs)

    @cached_property
    def _edges(self) -> Numbers:
        """Where runs with one owner and one epoch begin, and the end of the last."""
        return edges(self.owners, self.epochs)

    def by_member(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """First, end and epoch of all runs, nobody's and then member by member; where each one's begin, and the end."""
        firsts, ends = self._edges[:-1], self._edges[1:]
        owners = self.owners[firsts]
        # Each one's in order.
        order = np.argsort(owners, kind="stable")
        firsts = firsts[order]
        begins = np.searchsorted(owners[order], np.arange(len(self.members) + 1))
        return firsts, ends[order], self.epochs[firsts], begins

    def encode(self) -> bytes:
        """As it is in the database: about 10 bytes a run, and the names."""
        begins, ends = self._edges[:-1], self._edges[1:]
        return msgspec.msgpack.encode(
            _AllocationColumns(
                self.epoch,
                list(self.members),
                ends.astype(_END).tobytes(),
                self.owners[begins].astype(_OWNER).tobytes(),
                (self.epoch - self.epochs[begins]).astype(_BEHIND).tobytes(),
            )
        )


def decode(body: bytes) -> Allocation:
    """What ``encode`` has made."""
    stored = msgspec.msgpack.decode(body, type=_AllocationColumns)
    ends = np.frombuffer(stored.ends, dtype=_END).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    owners = np.repeat(np.frombuffer(stored.owners, dtype=_OWNER).astype(np.int64), lengths)
    epochs = stored.epoch - np.repeat(np.frombuffer(stored.behind, dtype=_BEHIND).astype(np.int64), lengths)
    return Allocation(tuple(stored.members), owners, epochs, stored.epoch)


def nobody(epoch: int = 0) -> Allocation:
    """The allocation of a group that has no members yet, whose epochs are to be above this one."""
    nothing = np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    return Allocation((), nothing, np.full(LOGICAL_PARTITIONS, epoch, dtype=np.int64), epoch)


def allocate(members: Sequence[str], present: Allocation | None, *, above: int = 0) -> Allocation:
    """Fair shares for these members: only what must move moves, and what moves gets a new epoch, above that number.

    The same members and the same allocation before give the same one after.
    """
    ordered = tuple(sorted(set(members)))
    if present is None:
        present = nobody()
    if ordered == present.members:
        return present
    before = _renumbered(present, ordered)
    after = balance(before, len(ordered)) if ordered else np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    # What has lost its owner and gets no other keeps its epoch: nobody is to be fenced out by nobody.
    moved = (after != before) & (after >= 0)
    if not moved.any():
        return Allocation(ordered, after, present.epochs, present.epoch)
    epoch = max(present.epoch, above) + 1
    return Allocation(ordered, after, np.where(moved, epoch, present.epochs), epoch)


def _renumbered(present: Allocation, members: tuple[str, ...]) -> Numbers:
    """The present owners as indexes of ``members``; -1 for those who left."""
    index = dict(zip(members, range(len(members)), strict=True))
    numbers = [index.get(member, -1) for member in present.members]
    # Nobody is nobody still.
    numbers.append(-1)
    return np.array(numbers, dtype=np.int64)[present.owners]
