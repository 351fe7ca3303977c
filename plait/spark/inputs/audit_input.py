"""The interface between the audit and its input: a data directory or an archive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from plait.errors import InvalidArgument
from plait.spark.auditing.block import Block
from plait.spark.auditing.group_facts import GroupFacts
from plait.storage.reading.log_chunks import WantedRows


@dataclass(frozen=True)
class AuditedPartition:
    """The facts about a partition that reports need."""

    subject: str
    #: ``name@group``.
    name: str
    #: The log has sequences [first, end), except those that are missing.
    first: int
    end: int
    missing: list[tuple[int, int]]
    #: The number of requested rows according to the frame headers. 0: not known, or every row can be read.
    readable: int = 0
    #: Its subject promises to store a key's messages in the order of sending.
    strict: bool = False


class Cause(NamedTuple):
    """The reason that dead letters of a group share."""

    group: int
    #: The exception's type and the handler that raised it.
    type: str
    handler: str


@dataclass(frozen=True)
class AuditInput(ABC):
    """Planned work. Each task gets all of it and reads its own part."""

    #: The path, for messages to the user.
    place: str
    wanted: WantedRows
    partitions: dict[int, AuditedPartition]
    groups: dict[int, GroupFacts]
    time_min: int
    time_max: int

    @abstractmethod
    def __len__(self) -> int:
        """The number of parts."""

    @abstractmethod
    def blocks(self, number: int) -> Iterator[Block]:
        """The rows of a part, by partition."""

    @abstractmethod
    def deaths(self) -> Counter[Cause]:
        """Dead letters by cause, where the reason is still stored."""


def requested_groups(
    groups: Mapping[int, GroupFacts], partitions: Container[int], names: frozenset[str], place: str
) -> dict[int, GroupFacts]:
    """The groups of these partitions and names (none: all). Raises ``InvalidArgument`` if a name does not exist."""
    there = {number: group for number, group in groups.items() if group.partition in partitions}
    known = sorted({group.name for group in there.values()})
    missing = sorted(names.difference(known))
    if missing:
        hint = f"there are {', '.join(known)}" if known else "the subjects have no groups"
        raise InvalidArgument(f"group {', '.join(map(repr, missing))} is not in {place}; {hint}")
    return {number: group for number, group in there.items() if not names or group.name in names}
