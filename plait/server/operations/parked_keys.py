"""Management of parked keys (R19): list, resume and skip them.

A key of a strict subject is parked when one of its messages becomes a dead letter. *Resume* delivers that message
again; *skip* leaves it as a dead letter and delivers the key's next message.
"""

from __future__ import annotations

import numpy as np

from plait.broker.groups.dead_letters import Choice
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.errors import InvalidArgument, KeyNotParked
from plait.frame.columns import Column
from plait.limits import LOGICAL_PARTITIONS, PARKED_PAGE_MAX
from plait.server.broker_host import BrokerHost
from plait.wire.admin.dead_letters import FoundKeys, ListParked, ParkedRow, Unpark


def list_parked(host: BrokerHost, request: ListParked) -> FoundKeys:
    if not 1 <= request.limit <= PARKED_PAGE_MAX:
        raise InvalidArgument(f"a page of {request.limit} parked keys is invalid; use 1 to {PARKED_PAGE_MAX}")
    group = _group(host, request.subject, request.group)
    letters = {
        cursor.key: cursor.letter
        for cursor in group.policy.parked()
        if cursor.key is not None and cursor.key > request.after
    }
    page = sorted(letters)[: request.limit]
    views = _views(host, group, {key: letters[key] for key in page})
    return FoundKeys(views, page[-1] if len(page) < len(letters) else None)


def _views(host: BrokerHost, group: OrderedGroup, letters: dict[int, int]) -> list[ParkedRow]:
    """The views of parked keys. A page is small enough for a loop over its letters."""
    sequences = [letter for letter in letters.values() if letter >= 0]
    found: dict[int, ParkedRow] = {}
    by_letter = {letter: key for key, letter in letters.items() if letter >= 0}
    pages, _ = host.broker.dead_letters.page(group, Choice(sequences), -1, max(len(sequences), 1))
    for numbers, frame, death in pages:
        if frame is None or death is None:
            continue
        keys = frame.binary(Column.KEY) if frame.has(Column.KEY) else None
        rows = np.searchsorted(frame.sequences(), numbers).tolist()
        for sequence, row in zip(numbers.tolist(), rows, strict=True):
            key = by_letter[sequence]
            found[key] = ParkedRow(
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
        or ParkedRow(hash=key, lp=key % LOGICAL_PARTITIONS, sequence=letters[key] if letters[key] >= 0 else None)
        for key in letters
    ]


def unpark(host: BrokerHost, request: Unpark, *, skip: bool) -> int:
    """Deliver the failed messages again, or ``skip`` them: they stay dead letters. Returns the number of keys."""
    group = _group(host, request.subject, request.group)
    if not 1 <= len(request.keys) <= PARKED_PAGE_MAX:
        raise InvalidArgument(f"the request names {len(request.keys)} keys; name 1 to {PARKED_PAGE_MAX} at a time")
    broker = host.broker
    broker.turn.refuse_when_stalled()
    parked = {cursor.key: cursor.owner for cursor in group.policy.parked()}
    # Ignore keys that a concurrent request has resumed already.
    owners = {parked[key] for key in request.keys if key in parked}
    count = sum(group.policy.resume(key, skip=skip) for key in dict.fromkeys(request.keys))
    if not count:
        raise KeyNotParked(
            f"none of these keys is parked in group {request.group!r} on {request.subject!r}",
            subject=request.subject,
            group=request.group,
        )
    for owner in sorted(owners):
        # If the key has moved to another partition, its owner finds out what to consume first.
        group.handover.notify(owner)
    broker.waking.wake_group(group)
    return count


def _group(host: BrokerHost, subject: str, name: str) -> OrderedGroup:
    group = host.membership.group(subject, name)
    if not isinstance(group, OrderedGroup):
        raise InvalidArgument(f"group {name!r} on {subject!r} is not ordered; only ordered groups park keys")
    return group
