"""Management of parked keys (R19): which there are, and going on with them.

A key of a strict subject is parked when one of its messages has failed for good: the dead letter holds the key's place.
To *resume* goes on with that message, to *skip* behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from plait.broker.groups.dead_letters import Choice
from plait.broker.groups.ordered_group import OrderedGroup
from plait.errors import InvalidArgument, KeyNotParked
from plait.frame.columns import Column
from plait.limits import LOGICAL_PARTITIONS, PARKED_PAGE_MAX
from plait.model.reason import Reason

if TYPE_CHECKING:
    from plait.server.broker_server import Server


class ListParked(msgspec.Struct, forbid_unknown_fields=True):
    """A page of a group's parked keys: at most ``limit`` of those whose hashes come after one."""

    subject: str
    group: str
    after: int = -1
    limit: int = PARKED_PAGE_MAX


class Unpark(msgspec.Struct, forbid_unknown_fields=True):
    """Parked keys to go on with, by their hashes."""

    subject: str
    group: str
    keys: list[int]


class ParkedView(msgspec.Struct, frozen=True, kw_only=True):
    """A parked key. Of a letter that does not read back, or is in another partition, less is known."""

    hash: int
    lp: int
    #: The dead letter that holds the key's place; None: it is in the partition where the key's rows were before.
    sequence: int | None
    key: str | None = None
    attempts: int = 0
    #: When it died, in microseconds.
    since: int | None = None
    reason: Reason = Reason()


def list_parked(server: Server, request: ListParked) -> dict[str, Any]:
    if not 1 <= request.limit <= PARKED_PAGE_MAX:
        raise InvalidArgument(f"a page of {request.limit} parked keys is not possible; use 1 to {PARKED_PAGE_MAX}")
    group = _group(server, request.subject, request.group)
    letters = {
        strand.key: strand.letter for strand in group.parked() if strand.key is not None and strand.key > request.after
    }
    page = sorted(letters)[: request.limit]
    views = _views(server, group, {key: letters[key] for key in page})
    return {"keys": views, "next": page[-1] if len(page) < len(letters) else None}


def _views(server: Server, group: OrderedGroup, letters: dict[int, int]) -> list[ParkedView]:
    """Each key with what its letter says; a page has few enough to look at one by one."""
    sequences = [letter for letter in letters.values() if letter >= 0]
    found: dict[int, ParkedView] = {}
    by_letter = {letter: key for key, letter in letters.items() if letter >= 0}
    pages, _ = server.broker.dead_letters.page(group, Choice(sequences), -1, max(len(sequences), 1))
    for numbers, frame, death in pages:
        if frame is None or death is None:
            continue
        keys = frame.binary(Column.KEY) if frame.has(Column.KEY) else None
        rows = np.searchsorted(frame.sequences(), numbers).tolist()
        for sequence, row in zip(numbers.tolist(), rows, strict=True):
            key = by_letter[sequence]
            found[key] = ParkedView(
                hash=key,
                lp=key % LOGICAL_PARTITIONS,
                sequence=sequence,
                key=None if keys is None else keys[row].as_py().decode(errors="replace"),
                attempts=death.attempts,
                since=death.last_time,
                reason=death.reason,
            )
    return [
        found.get(key)
        or ParkedView(hash=key, lp=key % LOGICAL_PARTITIONS, sequence=letters[key] if letters[key] >= 0 else None)
        for key in letters
    ]


def resume(server: Server, request: Unpark) -> int:
    """Go on with the messages that failed; with how many keys."""
    return _go_on(server, request, skip=False)


def skip(server: Server, request: Unpark) -> int:
    """Go on behind the messages that failed, which stay dead letters; with how many keys."""
    return _go_on(server, request, skip=True)


def _go_on(server: Server, request: Unpark, *, skip: bool) -> int:
    group = _group(server, request.subject, request.group)
    if not 1 <= len(request.keys) <= PARKED_PAGE_MAX:
        raise InvalidArgument(f"{len(request.keys)} keys are named; name 1 to {PARKED_PAGE_MAX} at a time")
    broker = server.broker
    broker.refuse_when_stalled()
    parked = {strand.key: strand.owner for strand in group.parked()}
    # Some may have been resumed by others meanwhile, which is as good.
    owners = {parked[key] for key in request.keys if key in parked}
    count = sum(group.resume(key, broker, skip=skip) for key in dict.fromkeys(request.keys))
    if not count:
        raise KeyNotParked(
            f"no such key is parked in group {request.group!r} on {request.subject!r}",
            subject=request.subject,
            group=request.group,
        )
    for owner in sorted(owners):
        # Where the route has led on, it looks at what is to be done first.
        broker.leases.news(group, owner)
    broker.wake_group(group)
    return count


def _group(server: Server, subject: str, name: str) -> OrderedGroup:
    group = server.membership.group(subject, name)
    if not isinstance(group, OrderedGroup):
        raise InvalidArgument(f"group {name!r} on {subject!r} is not an ordered one; no key of it is ever parked")
    return group
