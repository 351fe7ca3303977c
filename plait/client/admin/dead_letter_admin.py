"""Dead letters: messages that failed for good, per subject and group; looking at them, resending and purging them.

Everything goes in pages, each a request of its own, so that no answer and no pause of the broker is long however many
there are. A resent or purged letter is none any more: what was interrupted is simply done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack

import msgspec

from plait.client.arguments import is_number, limit_of, micros_of, sequences_of, shown, to_datetime
from plait.client.net.admin_calls import Calls, Partition, PartitionNode
from plait.client.send.encoding import decode_headers, decode_tags
from plait.client.types import HeaderValue, MessageId, PartitionName
from plait.errors import DeadLetterNotFound, InvalidArgument
from plait.limits import DEAD_LIST_MAX, DEAD_PAGE_MAX
from plait.model.reason import Reason, type_name

#: Sequences that one request names: they have to fit into the head of a packet.
SEQUENCES_MAX: Final = 4_000
#: With a rate, a page is what is due in this time...
PACE_SECONDS: Final = 0.05
#: ...and after a pause at most what was due in this one: a rate is a maximum.
CATCH_UP_SECONDS: Final = 0.1
#: More a second than any server does.
RATE_MAX: Final = 1e9


class DeadQueue(msgspec.Struct, frozen=True):
    """A group of a subject that has dead letters, and how many."""

    subject: str
    group: str
    count: int


class DeadHistory(msgspec.Struct, frozen=True):
    """An earlier death of a letter that was resent since."""

    attempts: int
    time: datetime
    reason: Reason


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that failed for good. ``body`` is None where it was not asked for."""

    subject: str
    group: str
    #: Its place in the subject, by which it is resent and purged.
    sequence: int
    message_id: MessageId
    key: str | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    body: bytes | None
    #: Of the body.
    size: int
    send_time: datetime | None
    store_time: datetime
    #: How often it was tried, over all its lives.
    attempts: int
    #: When it failed for the first time (to the second) and for the last.
    first_time: datetime
    last_time: datetime
    reason: Reason
    history: list[DeadHistory]
    #: Where it is stored.
    partition: PartitionName


class DeadReason(msgspec.Struct, frozen=True):
    """How many letters died of one type of error in one handler; ``text`` is what one of them says."""

    type: str
    handler: str
    text: str
    count: int
    first_time: datetime
    last_time: datetime


class _History(msgspec.Struct):
    attempts: int
    time: int
    reason: Reason


class _Letter(msgspec.Struct):
    """A letter as the broker tells of it."""

    sequence: int
    producer: int
    producer_sequence: int
    key: str | None
    tags: bytes
    headers: bytes
    body: bytes | None
    size: int
    send_time: int | None
    store_time: int
    attempts: int
    first_time: int
    last_time: int
    reason: Reason
    history: list[_History]


class _Letters(msgspec.Struct):
    letters: list[_Letter]
    next: int | None


class _Reason(msgspec.Struct):
    type: str
    handler: str
    text: str
    count: int
    first_time: int
    last_time: int


class _Reasons(msgspec.Struct):
    reasons: list[_Reason]
    next: int | None


class _LettersDone(msgspec.Struct):
    count: int
    next: int | None


class LetterQuery(TypedDict, total=False):
    """Which letters are meant: all of what is given has to hold."""

    sequences: Iterable[int]
    #: Of the reason: what it says, or the exception itself.
    type: str | type[BaseException]
    handler: str
    #: They died before this time.
    before: datetime


class LetterSelection(msgspec.Struct, frozen=True):
    """The same, checked before anything is asked."""

    sequences: list[int] | None = None
    type: str | None = None
    handler: str | None = None
    before: int | None = None

    @classmethod
    def of(cls, select: LetterQuery) -> LetterSelection:
        unknown = set(select) - set(cls.__struct_fields__)
        if unknown:
            raise InvalidArgument(
                f"letters cannot be selected by {unknown.pop()!r}; use {', '.join(cls.__struct_fields__)}"
            )
        kind: Any = select.get("type")
        handler: Any = select.get("handler")
        sequences, before = select.get("sequences"), select.get("before")
        if isinstance(kind, type) and issubclass(kind, BaseException):
            kind = type_name(kind)
        for name, value in (("type", kind), ("handler", handler)):
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(f"{name} {shown(value)} is a {type(value).__name__}; use its name")
        return cls(
            None if sequences is None else sequences_of(sequences),
            kind,
            handler,
            None if before is None else micros_of(before, "before"),
        )

    def parts(self) -> list[dict[str, Any]]:
        """As requests have it; many sequences are asked for piece by piece."""
        given = {"type": self.type, "handler": self.handler, "before": self.before}
        if self.sequences is None:
            return [{"sequences": None, **given}]
        numbers = sorted(set(self.sequences))
        pieces = [numbers[at : at + SEQUENCES_MAX] for at in range(0, len(numbers), SEQUENCES_MAX)]
        return [{"sequences": piece, **given} for piece in pieces]


class DeadAdmin(Calls):
    """What ``plait dlq`` does, as methods.

    Sequences are those of a partition: where a subject has several, ``partition`` says which.
    """

    async def dead_queues(self, subject: str | None = None) -> list[DeadQueue]:
        """The groups that have dead letters, of a subject or of all."""
        if subject is None:
            answers = await self._everywhere("dlq.queues", list[DeadQueue])
        else:
            answers = [a for _, a in await self._each(await self._places(subject), "dlq.queues", list[DeadQueue])]
        counts: dict[tuple[str, str], int] = {}
        for queue in (queue for answer in answers for queue in answer):
            counts[queue.subject, queue.group] = counts.get((queue.subject, queue.group), 0) + queue.count
        return [DeadQueue(*key, counts[key]) for key in sorted(counts)]

    async def _letter_places(
        self, subject: str, group: str, partition: Partition | None, by: LetterSelection
    ) -> list[PartitionNode]:
        """The partitions whose letters are meant; those that the group never came to have none."""
        if by.sequences is not None:
            return [await self._place(subject, partition, "sequences")]
        places = await self._places(subject, partition)
        if len(places) == 1:
            return places
        return [place for place, _ in await self._each(places, "group.describe", msgspec.Raw, group=group)]

    async def dead_letters(
        self,
        subject: str,
        group: str,
        *,
        partition: Partition | None = None,
        limit: int = 100,
        bodies: bool = False,
        **select: Unpack[LetterQuery],
    ) -> list[DeadLetter]:
        """A group's dead letters, oldest first; with their bodies where asked for.

        ``sequences``, ``type`` and ``handler`` of the reason and ``before``, a time, select among them.
        """
        limit = limit_of(limit)
        selection = LetterSelection.of(select)
        places = await self._letter_places(subject, group, partition, selection)
        if len(places) == 1:
            return await self._letters_at(places[0], subject, group, limit, bodies, selection)
        found = [
            letter
            for place in places
            for letter in await self._letters_at(place, subject, group, limit, bodies, selection)
        ]
        found.sort(key=lambda letter: (letter.store_time, letter.partition, letter.sequence))
        return found[:limit]

    async def _letters_at(
        self, place: PartitionNode, subject: str, group: str, limit: int, bodies: bool, selection: LetterSelection
    ) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        for part in selection.parts():
            after: int | None = -1
            while after is not None and len(found) < limit:
                page: _Letters = await self._run(
                    "dlq.list",
                    _Letters,
                    at=place.node,
                    subject=place.name.name,
                    group=group,
                    select=part,
                    after=after,
                    limit=min(limit - len(found), DEAD_LIST_MAX),
                    bodies=bodies,
                )
                found += [_letter(subject, group, letter, place.name) for letter in page.letters]
                after = page.next
        return found

    async def dead_letter(
        self, subject: str, group: str, sequence: int, *, partition: Partition | None = None
    ) -> DeadLetter:
        """One dead letter with its body; ``DeadLetterNotFound`` when there is none."""
        found = await self.dead_letters(subject, group, partition=partition, limit=1, bodies=True, sequences=[sequence])
        if not found:
            raise DeadLetterNotFound(
                f"message {sequence} of {subject!r} is no dead letter of group {group!r}",
                subject=subject,
                group=group,
                sequence=sequence,
            )
        return found[0]

    async def dead_reasons(self, subject: str, group: str, *, partition: Partition | None = None) -> list[DeadReason]:
        """Why a group's messages died: types of errors and handlers, the most frequent first."""
        merged: dict[tuple[str, str], _Reason] = {}
        for place in await self._letter_places(subject, group, partition, LetterSelection()):
            after: int | None = -1
            while after is not None:
                page: _Reasons = await self._run(
                    "dlq.reasons",
                    _Reasons,
                    at=place.node,
                    subject=place.name.name,
                    group=group,
                    after=after,
                    limit=DEAD_PAGE_MAX,
                )
                for part in page.reasons:
                    _add_reason(merged, part)
                after = page.next
        ordered = sorted(merged.values(), key=lambda reason: (-reason.count, reason.type, reason.handler))
        return [
            DeadReason(r.type, r.handler, r.text, r.count, to_datetime(r.first_time), to_datetime(r.last_time))
            for r in ordered
        ]

    async def resend_dead(
        self,
        subject: str,
        group: str,
        *,
        partition: Partition | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        **select: Unpack[LetterQuery],
    ) -> int:
        """Deliver dead letters to their group again, and to no other; how many. Id, attempts and history are kept.

        ``rate`` is so many a second at most; ``progress`` is called with the count so far; with ``dry_run`` they are
        only counted.
        """
        selection = LetterSelection.of(select)
        rate = rate_of(rate)
        pace = LetterRate(None if dry_run else rate, progress)
        for place in await self._letter_places(subject, group, partition, selection):
            await self._work_off("dlq.resend", place, group, selection, pace, dry_run)
        return pace.count

    async def purge_dead(
        self,
        subject: str,
        group: str,
        *,
        partition: Partition | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        **select: Unpack[LetterQuery],
    ) -> int:
        """Give dead letters up for good; how many. The arguments are those of ``resend_dead``."""
        selection = LetterSelection.of(select)
        rate = rate_of(rate)
        pace = LetterRate(None if dry_run else rate, progress)
        for place in await self._letter_places(subject, group, partition, selection):
            await self._work_off("dlq.purge", place, group, selection, pace, dry_run)
        return pace.count

    async def _work_off(
        self, operation: str, place: PartitionNode, group: str, select: LetterSelection, pace: LetterRate, dry_run: bool
    ) -> None:
        for part in select.parts():
            after: int | None = -1
            while after is not None:
                limit = await pace.turn()
                page: _LettersDone = await self._run(
                    operation,
                    _LettersDone,
                    at=place.node,
                    subject=place.name.name,
                    group=group,
                    select=part,
                    after=after,
                    limit=limit,
                    dry_run=dry_run,
                )
                after = page.next
                pace.did(page.count)


def _add_reason(merged: dict[tuple[str, str], _Reason], part: _Reason) -> None:
    known = merged.setdefault((part.type, part.handler), part)
    if known is not part:
        if part.last_time >= known.last_time:
            known.text = part.text
        known.count += part.count
        known.first_time = min(known.first_time, part.first_time)
        known.last_time = max(known.last_time, part.last_time)


def rate_of(value: Any) -> float | None:
    """So many a second; None: as fast as it goes."""
    if value is None:
        return None
    if not is_number(value):
        raise InvalidArgument(f"rate {shown(value)} is a {type(value).__name__}; use a number a second")
    if not 0 < value <= RATE_MAX:
        raise InvalidArgument(f"rate must be more than 0 a second and at most {RATE_MAX:g}, not {shown(value)}")
    return float(value)


class LetterRate:
    """So many a second at most. A page that is a little late does not make the next ones late.

    In no time do more than ``rate`` times it pass, and what is due in ``PACE_SECONDS`` and ``CATCH_UP_SECONDS`` more:
    whatever held it up, what was missed meanwhile is not made up for.
    """

    def __init__(self, rate: float | None, progress: Callable[[int], None] | None = None) -> None:
        self._rate = rate
        self._progress = progress
        self._begun: float | None = None
        self.count = 0

    async def turn(self) -> int:
        """Wait for the time of the next page; how large it may be."""
        rate = self._rate
        if rate is None:
            return DEAD_PAGE_MAX
        loop = asyncio.get_running_loop()
        if self._begun is None:
            self._begun = loop.time()
        await asyncio.sleep(max(self._begun + self.count / rate - loop.time(), 0.0))
        self._begun = max(self._begun, loop.time() - self.count / rate - CATCH_UP_SECONDS)
        behind = (loop.time() - self._begun) * rate - self.count
        return max(1, min(int(behind + PACE_SECONDS * rate), DEAD_PAGE_MAX))

    def did(self, count: int) -> None:
        """So many were done."""
        self.count += count
        if self._progress is not None:
            self._progress(self.count)


def _letter(subject: str, group: str, letter: _Letter, partition: PartitionName) -> DeadLetter:
    return DeadLetter(
        subject,
        group,
        letter.sequence,
        MessageId(letter.producer, letter.producer_sequence),
        letter.key,
        decode_tags(letter.tags),
        decode_headers(letter.headers),
        letter.body,
        letter.size,
        None if letter.send_time is None else to_datetime(letter.send_time),
        to_datetime(letter.store_time),
        letter.attempts,
        to_datetime(letter.first_time),
        to_datetime(letter.last_time),
        letter.reason,
        [DeadHistory(old.attempts, to_datetime(old.time), old.reason) for old in letter.history],
        partition,
    )
