"""What the audit needs of what it reads: a data directory, or an archive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from plait.errors import InvalidArgument
from plait.spark.auditing.block import Block
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.inputs.death_causes import Cause

#: What is being done, how much of it, of how much.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class AuditedPartition:
    """A partition as far as reports speak of it."""

    subject: str
    #: ``name@group``.
    name: str
    #: Sequences [first, end) that the log has, but for what is missing.
    first: int
    end: int
    missing: list[tuple[int, int]]
    #: Of the rows that are asked for so many are there by their headers; 0: it is not known, or all can be read.
    readable: int = 0
    #: Its subject promises that a key's messages are stored in the order of sending.
    strict: bool = False


class AuditInput(Protocol):
    """Planned work; sent whole to each task, which reads its own part."""

    @property
    def place(self) -> str:
        """Where it is, for messages."""

    @property
    def partitions(self) -> Mapping[int, AuditedPartition]: ...

    @property
    def groups(self) -> Mapping[int, GroupFacts]: ...

    @property
    def time_min(self) -> int: ...

    @property
    def time_max(self) -> int: ...

    def __len__(self) -> int:
        """So many parts of the work."""

    def blocks(self, number: int) -> Iterator[Block]:
        """The rows of a part, by partition."""

    def deaths(self) -> Counter[Cause]:
        """What messages died of, as far as it is kept."""


def check_groups(wanted: frozenset[str], there: Iterable[str], place: str) -> None:
    """``InvalidArgument`` where a group that is asked for is not there."""
    known = sorted(set(there))
    missing = sorted(wanted.difference(known))
    if missing:
        hint = f"there are {', '.join(known)}" if known else "the subjects have none"
        raise InvalidArgument(f"group {', '.join(map(repr, missing))} is not in {place}; {hint}")
