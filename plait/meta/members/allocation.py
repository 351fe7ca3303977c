"""Which member of an ordered group is to own which logical partitions.

An allocation is a proposal; the pull lock of a broker is the right to consume. Each LP has the lock *epoch* at which
its owner last changed, so that brokers can order proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NumberedRun, Numbers, balance, edges, runs_with

_END = np.dtype("<u2")
_OWNER = np.dtype("<i4")
_BEHIND = np.dtype("<u4")


class _AllocationColumns(msgspec.Struct, array_like=True, frozen=True):
    """An allocation in the database: columns of runs with the same owner and epoch."""

    epoch: int
    members: list[str]
    ends: bytes
    owners: bytes
    #: The newest epoch minus the epoch of the run.
    behind: bytes


class Allocation:
    """The owner and the epoch of every LP. Without members no LP has an owner."""

    def __init__(self, members: tuple[str, ...], owners: Numbers, epochs: Numbers, epoch: int) -> None:
        #: Sorted. ``owners`` has indexes into it, or -1 for no owner.
        self.members = members
        self.owners = owners
        self.epochs = epochs
        #: The newest epoch.
        self.epoch = epoch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allocation) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash((self.members, self.epoch))

    @cached_property
    def floors(self) -> list[NumberedRun]:
        """(first, end, epoch): owners with older epochs have permanently lost these LPs."""
        return runs_with(self.epochs, self.epochs >= 0)

    @cached_property
    def _edges(self) -> Numbers:
        """The starts of the runs with one owner and one epoch, and the end of the last."""
        return edges(self.owners, self.epochs)

    def by_member(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """First, end and epoch of all runs, ordered by owner, and per member the index of its first run.

        Runs without an owner come first. The index list has the total as its last entry.
        """
        firsts, ends = self._edges[:-1], self._edges[1:]
        owners = self.owners[firsts]
        # Stable: the runs of one owner stay in order.
        order = np.argsort(owners, kind="stable")
        firsts = firsts[order]
        begins = np.searchsorted(owners[order], np.arange(len(self.members) + 1))
        return firsts, ends[order], self.epochs[firsts], begins

    def encode(self) -> bytes:
        """The stored form: about 10 bytes per run, and the member names."""
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
    """The inverse of ``Allocation.encode``."""
    stored = msgspec.msgpack.decode(body, type=_AllocationColumns)
    ends = np.frombuffer(stored.ends, dtype=_END).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    owners = np.repeat(np.frombuffer(stored.owners, dtype=_OWNER).astype(np.int64), lengths)
    epochs = stored.epoch - np.repeat(np.frombuffer(stored.behind, dtype=_BEHIND).astype(np.int64), lengths)
    return Allocation(tuple(stored.members), owners, epochs, stored.epoch)


def unallocated(epoch: int = 0) -> Allocation:
    """The allocation of a group without members. Later epochs are higher than ``epoch``."""
    nothing = np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    return Allocation((), nothing, np.full(LOGICAL_PARTITIONS, epoch, dtype=np.int64), epoch)


def allocate(members: Sequence[str], present: Allocation | None, *, above: int = 0) -> Allocation:
    """Allocate the LPs to these members in equal shares, moving as few LPs as possible.

    LPs that move get a new epoch, higher than ``above``. The result depends only on the arguments.
    """
    ordered = tuple(sorted(set(members)))
    if present is None:
        present = unallocated()
    if ordered == present.members:
        return present
    before = _renumbered(present, ordered)
    after = balance(before, len(ordered)) if ordered else np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    # An LP that only lost its owner keeps its epoch: there is no new owner to fence for.
    moved = (after != before) & (after >= 0)
    if not moved.any():
        return Allocation(ordered, after, present.epochs, present.epoch)
    epoch = max(present.epoch, above) + 1
    return Allocation(ordered, after, np.where(moved, epoch, present.epochs), epoch)


def _renumbered(present: Allocation, members: tuple[str, ...]) -> Numbers:
    """The present owners as indexes into ``members``; -1 for owners that left."""
    index = dict(zip(members, range(len(members)), strict=True))
    numbers = [index.get(member, -1) for member in present.members]
    # Index -1 (no owner) maps to -1.
    numbers.append(-1)
    return np.array(numbers, dtype=np.int64)[present.owners]
