"""Management of dead letters, page by page, so that each request is bounded, and of the keys that they park (R19).

A key of a strict subject is parked when one of its messages becomes a dead letter. *Resume* delivers that message
again; *skip* leaves it as a dead letter and delivers the key's next message.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.broker.groups.dead_letters import Choice, Letters
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.waking import wake_group
from plait.errors import InvalidArgument, KeyNotParked
from plait.frame.columns import Column
from plait.frame.header import SEQUENCE_MAX
from plait.frame.view import FrameView
from plait.limits import DEAD_LIST_MAX, DEAD_PAGE_MAX, DEAD_SEQUENCES_MAX, KIB, LOGICAL_PARTITIONS, MIB, PARKED_PAGE_MAX
from plait.model.reason import Reason
from plait.server.broker_host import BrokerHost
from plait.server.operations.subjects_and_groups import partitions_of
from plait.storage.logs.retained_log import DeathRecord
from plait.wire.admin.dead_letters import (
    ChangedLetters,
    ChangeLetters,
    DeadQueue,
    LetterPage,
    LetterRow,
    ListLetters,
    ListParked,
    ParkedRow,
    PastDeath,
    ReasonRow,
    Unpark,
)
from plait.wire.admin.operation import Page
from plait.wire.admin.subjects import OfSubjects

#: Approximate size limit of one page. A page has at least one letter.
PAGE_BYTES = 8 * MIB
#: Upper bound for the size of a letter's reason, in addition to its message.
LETTER_BYTES = 8 * KIB


def list_queues(host: BrokerHost, request: OfSubjects) -> list[DeadQueue]:
    return [
        DeadQueue(partition.row.subject, name, group.failures.dead.count)
        for partition in partitions_of(host, request)
        for name, group in sorted(partition.groups.items())
        if group.failures.dead
    ]


def list_letters(host: BrokerHost, request: ListLetters) -> Page[LetterRow]:
    group, found, following = _page(host, request, DEAD_LIST_MAX)
    if found:
        # Cut before the letters are copied: together they may be larger than a packet.
        sequences = np.concatenate([part.sequences for part in found])
        sizes = np.concatenate([_sizes(part, bodies=request.bodies) for part in found])
        order = np.argsort(sequences)
        room = int(np.searchsorted(np.cumsum(sizes[order]), PAGE_BYTES, "right"))
        if room < len(order):
            following = int(sequences[order[max(room, 1) - 1]])
            found = [part._replace(sequences=part.sequences[part.sequences <= following]) for part in found]
    letters = [view for part in found if len(part.sequences) for view in _views(group, part, bodies=request.bodies)]
    letters.sort(key=lambda letter: letter.sequence)
    return Page(letters, following)


def _sizes(letters: Letters, *, bodies: bool) -> npt.NDArray[np.int64]:
    sequences, frame, death = letters
    if frame is None or death is None:
        return np.full(len(sequences), LETTER_BYTES)
    rows = np.searchsorted(frame.sequences(), sequences)
    sizes = np.full(len(rows), LETTER_BYTES * (1 + len(death.history)))
    for column in (Column.KEY, Column.TAGS, Column.HEADERS, *([Column.BODY] if bodies else [])):
        if frame.has(column):
            sizes += np.diff(frame.variable(column)[0])[rows]
    return sizes


def count_reasons(host: BrokerHost, request: LetterPage) -> Page[ReasonRow]:
    _, found, following = _page(host, request, DEAD_PAGE_MAX)
    reasons: dict[tuple[str, str], ReasonRow] = {}
    for sequences, _, death in found:
        known = death or DeathRecord(0, 0, 0, Reason("Unreadable"))
        reason, time = known.reason, known.last_time
        row = ReasonRow(reason.type, reason.handler, reason.text, len(sequences), time, time)
        same = reasons.setdefault((reason.type, reason.handler), row)
        if same is not row:
            same.add(row)
    return Page(list(reasons.values()), following)


def change(host: BrokerHost, request: ChangeLetters, *, purge: bool) -> ChangedLetters:
    """Resend or purge one page of letters."""
    group, found, following = _page(host, request, DEAD_PAGE_MAX)
    if request.dry_run:
        count = sum(len(letters.sequences) for letters in found)
    else:
        letters = host.broker.dead_letters
        count = letters.purge(group, found) if purge else letters.resend(group, found)
    return ChangedLetters(count, following)


def _page(host: BrokerHost, request: LetterPage, limit: int) -> tuple[Group, list[Letters], int | None]:
    if not 1 <= request.limit <= limit:
        raise InvalidArgument(f"a page of {request.limit} dead letters is invalid; use 1 to {limit}")
    group = host.membership.group(request.subject, request.group)
    select = request.select
    if select.sequences is not None:
        if len(select.sequences) > DEAD_SEQUENCES_MAX:
            raise InvalidArgument(
                f"{len(select.sequences)} sequences are too many; name {DEAD_SEQUENCES_MAX} at a time"
            )
        if any(not 0 <= sequence < SEQUENCE_MAX for sequence in select.sequences):
            raise InvalidArgument(f"the sequence of a dead letter must be 0 to {SEQUENCE_MAX - 1}")
    choice = Choice(select.sequences, select.type, select.handler, select.before)
    # Search up to ``limit`` letters per page: with few matches, a smaller search would take very many pages.
    return group, *host.broker.dead_letters.page(group, choice, request.after, request.limit, limit)


def _views(group: Group, letters: Letters, *, bodies: bool) -> list[LetterRow]:
    """The views of a frame's letters. A page is small enough for a loop over its rows."""
    sequences, frame, death = letters
    if frame is None or death is None:
        attempts = [group.failures.dead.overlap(s, s + 1)[0].attempt for s in sequences.tolist()]
        return [LetterRow(sequence=s, attempts=a) for s, a in zip(sequences.tolist(), attempts, strict=True)]
    rows = np.searchsorted(frame.sequences(), sequences).tolist()
    producers, numbers = frame.message_ids()
    offsets, _ = frame.variable(Column.BODY)
    sizes = np.diff(offsets)
    keys, tags, headers = (_texts(frame, column) for column in (Column.KEY, Column.TAGS, Column.HEADERS))
    stored = frame.binary(Column.BODY) if bodies else None
    sent = frame.fixed(Column.SEND_TIME) if frame.has(Column.SEND_TIME) else None
    history = [PastDeath(past.attempts, past.last_time, past.reason) for past in death.history]
    return [
        LetterRow(
            sequence=sequence,
            attempts=death.attempts,
            producer=int(producers[row]),
            producer_sequence=int(numbers[row]),
            key=keys[row].decode() or None,
            tags=tags[row],
            headers=headers[row],
            body=None if stored is None else stored[row].as_py(),
            size=int(sizes[row]),
            send_time=None if sent is None else int(sent[row]),
            store_time=frame.store_time,
            first_time=death.first_time,
            last_time=death.last_time,
            reason=death.reason,
            history=history,
        )
        for sequence, row in zip(sequences.tolist(), rows, strict=True)
    ]


def _texts(frame: FrameView, column: Column) -> list[bytes]:
    if not frame.has(column):
        return [b""] * frame.count
    rows: list[bytes] = frame.binary(column).to_pylist()
    return rows


def list_parked(host: BrokerHost, request: ListParked) -> Page[ParkedRow]:
    if not 1 <= request.limit <= PARKED_PAGE_MAX:
        raise InvalidArgument(f"a page of {request.limit} parked keys is invalid; use 1 to {PARKED_PAGE_MAX}")
    group = _group(host, request.subject, request.group)
    letters = {
        cursor.key: cursor.letter
        for cursor in group.policy.parked()
        if cursor.key is not None and cursor.key > request.after
    }
    page = sorted(letters)[: request.limit]
    views = _parked_rows(host, group, {key: letters[key] for key in page})
    return Page(views, page[-1] if len(page) < len(letters) else None)


def _parked_rows(host: BrokerHost, group: OrderedGroup, letters: dict[int, int]) -> list[ParkedRow]:
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
    wake_group(group)
    return count


def _group(host: BrokerHost, subject: str, name: str) -> OrderedGroup:
    group = host.membership.group(subject, name)
    if not isinstance(group, OrderedGroup):
        raise InvalidArgument(f"group {name!r} on {subject!r} is not ordered; only ordered groups park keys")
    return group
