"""Which member of an exclusive group is to handle which logical partitions.

An allocation is a proposal: the broker's lock is the right to handle. Each LP has the *epoch* in which it last changed
hands, by which brokers tell the newer proposal from the older.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.meta.balance import balance
from plait.meta.lps import NumberedRun, Numbers, cut

_END = np.dtype("<u2")
_OWNER = np.dtype("<i4")
_BEHIND = np.dtype("<u4")


class _Stored(msgspec.Struct, array_like=True, frozen=True):
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

    def lps_of(self, member: str) -> list[NumberedRun]:
        """(first, end, epoch) of what a member is to handle; nothing if it is no member."""
        runs, begins, places = self._by_member
        at = places.get(member)
        if at is None:
            return []
        numbers = iter(runs[begins[at] : begins[at + 1]])
        return list(zip(numbers, numbers, numbers, strict=True))

    @cached_property
    def floors(self) -> list[NumberedRun]:
        """(first, end, epoch): older epochs of these LPs have lost them for good."""
        edges = cut(self.epochs)
        return list(zip(edges, edges[1:], self.epochs[edges[:-1]].tolist(), strict=False))

    @cached_property
    def _by_member(self) -> tuple[array[int], list[int], dict[str, int]]:
        """First, end and epoch of all runs, member by member; where each one's begin; which member is which.

        As one array: a hundred thousand lists would be looked through by every garbage collection. Not one of numpy's:
        it is asked for a few numbers at a time, a hundred times in a heartbeat.
        """
        edges = np.array(cut(self.owners, self.epochs))
        firsts, ends = edges[:-1], edges[1:]
        owners = self.owners[firsts]
        # Each one's in order.
        order = np.argsort(owners, kind="stable")
        runs = np.column_stack((firsts, ends, self.epochs[firsts]))[order]
        begins = 3 * np.searchsorted(owners[order], np.arange(len(self.members) + 1))
        return (
            array("q", runs.tobytes()),
            begins.tolist(),
            dict(zip(self.members, range(len(self.members)), strict=True)),
        )

    def encode(self) -> bytes:
        """As it is in the database: about 10 bytes a run, and the names."""
        edges = np.array(cut(self.owners, self.epochs))
        begins = edges[:-1]
        return msgspec.msgpack.encode(
            _Stored(
                self.epoch,
                list(self.members),
                edges[1:].astype(_END).tobytes(),
                self.owners[begins].astype(_OWNER).tobytes(),
                (self.epoch - self.epochs[begins]).astype(_BEHIND).tobytes(),
            )
        )


def decode(body: bytes) -> Allocation:
    """What ``encode`` has made."""
    stored = msgspec.msgpack.decode(body, type=_Stored)
    ends = np.frombuffer(stored.ends, dtype=_END).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    owners = np.repeat(np.frombuffer(stored.owners, dtype=_OWNER).astype(np.int64), lengths)
    epochs = stored.epoch - np.repeat(np.frombuffer(stored.behind, dtype=_BEHIND).astype(np.int64), lengths)
    return Allocation(tuple(stored.members), owners, epochs, stored.epoch)


def nobody(epoch: int = 0) -> Allocation:
    """The allocation of a group that has no members yet, whose epochs are to be above this one."""
    nothing = np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    return Allocation((), nothing, np.full(LOGICAL_PARTITIONS, epoch, dtype=np.int64), epoch)


def allocate(members: Sequence[str], present: Allocation | None) -> Allocation:
    """Fair shares for these members: only what must move moves, and what moves gets a new epoch.

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
    epoch = present.epoch + 1
    return Allocation(ordered, after, np.where(moved, epoch, present.epochs), epoch)


def _renumbered(present: Allocation, members: tuple[str, ...]) -> Numbers:
    """The present owners as indexes of ``members``; -1 for those who left."""
    index = dict(zip(members, range(len(members)), strict=True))
    numbers = [index.get(member, -1) for member in present.members]
    # Nobody is nobody still.
    numbers.append(-1)
    return np.array(numbers, dtype=np.int64)[present.owners]
