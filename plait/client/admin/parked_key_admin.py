"""Management of parked keys: keys of a strict subject that wait for ``resume`` or ``skip`` of a dead letter.

A key is parked in the partition of its dead letter. If its LP has moved to other partitions since, these hold back the
key as well until it is resumed. The requests here go only to the partition of the dead letter; the key's consumer
resumes the later partitions in order.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from plait.client.arguments import to_datetime
from plait.client.net.admin_calls import Calls, Partition, PartitionNode
from plait.client.send.encoding import encode_key
from plait.client.types import PartitionName
from plait.errors import KeyNotParked
from plait.limits import PARKED_PAGE_MAX
from plait.model.reason import Reason
from plait.wire.admin.dead_letters import LIST_PARKED, RESUME_KEYS, SKIP_KEYS, ParkedRow
from plait.wire.admin.operation import Operation


class ParkedKey(msgspec.Struct, frozen=True):
    """A parked key, and the dead letter that holds it back.

    If the letter was purged, or its partition no longer exists, the fields about it are empty.
    """

    subject: str
    group: str
    #: None if the dead letter is not available.
    key: str | None
    #: xxh3_64 of the key, and its logical partition.
    hash: int
    lp: int
    partition: PartitionName
    #: The sequence of the dead letter, as ``dead_letter`` takes it.
    sequence: int | None
    attempts: int
    since: datetime | None
    reason: Reason


class _FoundKeys(NamedTuple):
    place: PartitionNode
    parked: ParkedRow


class ParkedAdmin(Calls):
    """The operations of ``plait group parked``, ``resume`` and ``skip``."""

    async def parked(self, subject: str, group: str, *, partition: Partition | None = None) -> list[ParkedKey]:
        """The parked keys of a group, longest wait first."""
        found = await self._parked(subject, group, partition)
        keys = [
            ParkedKey(
                subject,
                group,
                each.key,
                each.hash,
                each.lp,
                place.name,
                each.sequence,
                each.attempts,
                None if each.since is None else to_datetime(each.since),
                each.reason,
            )
            for place, each in found
        ]
        return sorted(keys, key=lambda each: (each.since is not None, each.since, str(each.partition), each.hash))

    async def resume_key(self, subject: str, group: str, key: str | int | ParkedKey) -> None:
        """Resume a parked key with the message that failed; ``KeyNotParked`` if it is not parked."""
        await self._resume_one(subject, group, key, RESUME_KEYS)

    async def skip_key(self, subject: str, group: str, key: str | int | ParkedKey) -> None:
        """Resume a parked key after the message that failed, which stays a dead letter."""
        await self._resume_one(subject, group, key, SKIP_KEYS)

    async def resume_all(self, subject: str, group: str) -> int:
        """``resume_key`` for every parked key of a group; returns their number."""
        return await self._resume_found(await self._parked(subject, group, None), group, RESUME_KEYS)

    async def skip_all(self, subject: str, group: str) -> int:
        """``skip_key`` for every parked key of a group; returns their number."""
        return await self._resume_found(await self._parked(subject, group, None), group, SKIP_KEYS)

    async def _resume_one(
        self, subject: str, group: str, key: str | int | ParkedKey, operation: Operation[int]
    ) -> None:
        shown = (key.key or f"{key.hash:#x}") if isinstance(key, ParkedKey) else encode_key(key)
        number = key.hash if isinstance(key, ParkedKey) else xxh3_64_intdigest(shown.encode())
        found = [each for each in await self._parked(subject, group, None) if each.parked.hash == number]
        if not await self._resume_found(found, group, operation):
            raise KeyNotParked(
                f"key {shown!r} is not parked in group {group!r} on {subject!r}", subject=subject, group=group
            )

    async def _resume_found(self, found: list[_FoundKeys], group: str, operation: Operation[int]) -> int:
        """Send the operation to each partition, page by page; returns the number of keys that were still parked."""
        count = 0
        by_place: dict[PartitionName, tuple[PartitionNode, list[int]]] = {}
        for place, parked in found:
            by_place.setdefault(place.name, (place, []))[1].append(parked.hash)
        for place, keys in by_place.values():
            for at in range(0, len(keys), PARKED_PAGE_MAX):
                page = keys[at : at + PARKED_PAGE_MAX]
                try:
                    count += await self._run(operation, at=place.node, subject=place.name.name, group=group, keys=page)
                except KeyNotParked:
                    # Another client has resumed or skipped them.
                    continue
        return count

    async def _parked(self, subject: str, group: str, partition: Partition | None) -> list[_FoundKeys]:
        """All parked keys, each with the partition where it can be resumed."""
        answers = await self._all(await self._places(subject, partition), lambda place: self._pages(place, group))
        found = [_FoundKeys(place, each) for place, parked in answers for each in parked]
        # A key without a letter is inherited from another partition. List it only if that partition no longer has it.
        first_hand = {each.parked.hash for each in found if each.parked.sequence is not None}
        return [each for each in found if each.parked.sequence is not None or each.parked.hash not in first_hand]

    async def _pages(self, place: PartitionNode, group: str) -> list[ParkedRow]:
        keys: list[ParkedRow] = []
        after: int | None = -1
        while after is not None:
            page = await self._run(LIST_PARKED, at=place.node, subject=place.name.name, group=group, after=after)
            keys += page.rows
            after = page.next
        return keys
