"""An allocation as its members hear of it: the share of each in msgpack, packed once for all heartbeats.

Every number has one size, also where msgpack has a shorter word for it: so all runs are packed at once, and a share is
a piece of that. A heartbeat's answer puts pieces together.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.allocation import Allocation
from plait.model.lp_runs import NumberedRun

#: (first, end, epoch) of logical partitions: an array of three numbers, each behind a byte that tells its size.
_RUN: Final = np.dtype(
    [
        ("array", "u1"),
        ("first_size", "u1"),
        ("first", ">u2"),
        ("end_size", "u1"),
        ("end", ">u2"),
        ("epoch_size", "u1"),
        ("epoch", ">u8"),
    ]
)
_EMPTY: Final = np.array([(0x93, 0xCD, 0, 0xCD, 0, 0xCF, 0)], dtype=_RUN)


_RUN_SIZE: Final = _RUN.itemsize
#: What stands before a list of so many runs.
_COUNTS: Final = [b"\xdc" + count.to_bytes(2, "big") for count in range(LOGICAL_PARTITIONS + 1)]
_NONE: Final = b"\x90"


class Share(NamedTuple):
    """What one member of a group is to do."""

    subject: str
    group: str
    #: "exclusive" or "shared".
    strategy: str
    #: (first, end, epoch) of logical partitions; only where the strategy is exclusive.
    lps: list[NumberedRun]


_decoder = msgspec.msgpack.Decoder(list[Share])


def shared(subject: str, group: str) -> bytes:
    """The share of every member of a group that is not ordered."""
    return msgspec.msgpack.encode(Share(subject, group, "shared", []))


def join(shares: Sequence[bytes]) -> msgspec.Raw:
    """A list of them."""
    return msgspec.Raw(b"\xdd%b%b" % (len(shares).to_bytes(4, "big"), b"".join(shares)))


def split(joined: msgspec.Raw) -> list[Share]:
    """What is in such a list."""
    return _decoder.decode(joined)


class Shares:
    """The shares of an ordered group's members."""

    # One piece of memory for all: most are cut out for few members before the next change.
    __slots__ = ("_begins", "_head", "_members", "_runs")

    def __init__(self, subject: str, group: str, allocation: Allocation) -> None:
        self._head = msgspec.msgpack.encode(Share(subject, group, "exclusive", []))[:-1]
        #: In order.
        self._members = allocation.members
        firsts, ends, epochs, begins = allocation.by_member()
        #: In bytes. Not a list, which the garbage collector would look through.
        self._begins = array("I", (begins * _RUN_SIZE).astype(np.uint32).tobytes())
        runs = np.repeat(_EMPTY, len(firsts))
        runs["first"], runs["end"], runs["epoch"] = firsts, ends, epochs
        self._runs = runs.tobytes()

    def of(self, client: str) -> bytes:
        """A member's share; one that nothing is allocated to yet has nothing."""
        members = self._members
        at = bisect_left(members, client)
        if at == len(members) or members[at] != client:
            return self._head + _NONE
        begin, end = self._begins[at], self._begins[at + 1]
        return self._head + _COUNTS[(end - begin) // _RUN_SIZE] + self._runs[begin:end]
