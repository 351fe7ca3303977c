"""An allocation as it is sent to members: the share of each in msgpack, packed once for all heartbeats.

Every number has a fixed size, even where msgpack has a shorter encoding. All runs are therefore packed in one array
operation, and a share is a slice of the result. A heartbeat's reply concatenates such slices.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from plait.errors import PlaitError
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.allocation import Allocation
from plait.model.logical_partitions import NumberedRun

#: (first, end, epoch) of LPs: a msgpack array of three numbers, each preceded by its type byte.
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
#: The msgpack header of a list of n runs, by n.
_COUNTS: Final = [b"\xdc" + count.to_bytes(2, "big") for count in range(LOGICAL_PARTITIONS + 1)]
_NONE: Final = b"\x90"


class Share(NamedTuple):
    """The share of one member of a group."""

    subject: str
    group: str
    #: "exclusive" or "shared".
    strategy: str
    #: (first, end, epoch) of LPs; empty if the strategy is shared.
    lps: list[NumberedRun]


def shared(subject: str, group: str) -> bytes:
    return msgspec.msgpack.encode(Share(subject, group, "shared", []))


def join(shares: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd%b%b" % (len(shares).to_bytes(4, "big"), b"".join(shares)))


class HeartbeatView(NamedTuple):
    """The reply to a client's heartbeat."""

    #: The newest change that the reply includes. It differs from the client's number if there is something new.
    seen: int
    #: The shares that the client does not have yet, as they are sent.
    packed: msgspec.Raw
    #: Refused memberships, by (subject, group), and the reasons.
    refused: dict[tuple[str, str], PlaitError]
    #: Subject → route version.
    routes: dict[str, int]

    @property
    def shares(self) -> list[Share]:
        """``packed``, decoded."""
        return msgspec.msgpack.decode(self.packed, type=list[Share])


class Shares:
    """The shares of an ordered group's members."""

    # One buffer for all shares: most shares are never requested before the next change.
    __slots__ = ("_begins", "_head", "_members", "_runs")

    def __init__(self, subject: str, group: str, allocation: Allocation) -> None:
        self._head = msgspec.msgpack.encode(Share(subject, group, "exclusive", []))[:-1]
        #: Sorted.
        self._members = allocation.members
        firsts, ends, epochs, begins = allocation.by_member()
        #: Byte offsets. An array, not a list, which the garbage collector would traverse.
        self._begins = array("I", (begins * _RUN_SIZE).astype(np.uint32).tobytes())
        runs = np.repeat(_EMPTY, len(firsts))
        runs["first"], runs["end"], runs["epoch"] = firsts, ends, epochs
        self._runs = runs.tobytes()

    def of(self, client: str) -> bytes:
        """The packed share of a member; empty if nothing is allocated to it yet."""
        members = self._members
        at = bisect_left(members, client)
        if at == len(members) or members[at] != client:
            return self._head + _NONE
        begin, end = self._begins[at], self._begins[at + 1]
        return self._head + _COUNTS[(end - begin) // _RUN_SIZE] + self._runs[begin:end]

    def lps(self, client: str) -> list[NumberedRun]:
        return msgspec.msgpack.decode(self.of(client), type=Share).lps
