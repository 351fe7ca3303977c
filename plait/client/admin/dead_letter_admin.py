"""Management of the dead letters of a subject and group: listing, resending and purging them.

Every operation works in pages, one request each, so that no reply and no pause of the broker is long. A letter that is
resent or purged is no longer a dead letter, so an interrupted operation can simply be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack

import msgspec

from plait.client.arguments import is_number, limit_of, micros_of, sequences_of, shown, to_datetime
from plait.client.net.admin_calls import Calls, Partition, PartitionNode
from plait.client.net.rate_limit import RateLimit
from plait.client.send.encoding import decode_tags
from plait.client.types import HeaderValue, MessageId, PartitionName
from plait.errors import DeadLetterNotFound, InvalidArgument
from plait.frame.header_block import decode_headers
from plait.limits import DEAD_LIST_MAX, DEAD_PAGE_MAX
from plait.model.reason import Reason, type_name
from plait.wire.admin import dead_letters as d
from plait.wire.admin.dead_letters import DeadQueue, LetterFilter
from plait.wire.admin.operation import Operation
from plait.wire.admin.subjects import DESCRIBE_GROUP

#: Sequences that one request names: they must fit into the header of a packet.
SEQUENCES_MAX: Final = 4_000
#: With a rate, a page has the letters that the rate allows within this time...
PACE_SECONDS: Final = 0.05
#: ...and after a delay at most the letters of this time in addition, because a rate is a maximum.
CATCH_UP_SECONDS: Final = 0.1
#: Letters per second; more than any server handles.
RATE_MAX: Final = 1e9


class DeadHistory(msgspec.Struct, frozen=True):
    """An earlier failure of a dead letter that was resent since."""

    attempts: int
    time: datetime
    reason: Reason


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter. ``body`` is None if bodies were not requested."""

    subject: str
    group: str
    #: Its sequence in the partition; selects it for resending and purging.
    sequence: int
    message_id: MessageId
    key: str | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    body: bytes | None
    #: Bytes of the body.
    size: int
    send_time: datetime | None
    store_time: datetime
    #: The number of attempts, including those before it was resent.
    attempts: int
    #: The times of its first failure (rounded to a second) and its last one.
    first_time: datetime
    last_time: datetime
    reason: Reason
    history: list[DeadHistory]
    #: The partition that stores it.
    partition: PartitionName


class DeadReason(msgspec.Struct, frozen=True):
    """The number of dead letters with one type of error in one handler; ``text`` is the text of the latest one."""

    type: str
    handler: str
    text: str
    count: int
    first_time: datetime
    last_time: datetime


class LetterQuery(TypedDict, total=False):
    """Selects dead letters: all given conditions must hold."""

    sequences: Iterable[int]
    #: The type of the reason: its name, or the exception class.
    type: str | type[BaseException]
    handler: str
    #: They became dead letters before this time.
    before: datetime


def selection_of(select: LetterQuery) -> LetterFilter:
    """A validated ``LetterQuery``."""
    fields = LetterFilter.__struct_fields__
    unknown = set(select) - set(fields)
    if unknown:
        raise InvalidArgument(f"dead letters cannot be selected by {unknown.pop()!r}; use {', '.join(fields)}")
    kind: Any = select.get("type")
    handler: Any = select.get("handler")
    sequences, before = select.get("sequences"), select.get("before")
    if isinstance(kind, type) and issubclass(kind, BaseException):
        kind = type_name(kind)
    for name, value in (("type", kind), ("handler", handler)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{name} {shown(value)} is a {type(value).__name__}; use its name")
    return LetterFilter(
        None if sequences is None else sorted(set(sequences_of(sequences))),
        kind,
        handler,
        None if before is None else micros_of(before, "before"),
    )


def _parts(selection: LetterFilter) -> list[LetterFilter]:
    """The selections of the requests; many sequences are split over several requests."""
    numbers = selection.sequences
    if numbers is None:
        return [selection]
    pages = [numbers[at : at + SEQUENCES_MAX] for at in range(0, len(numbers), SEQUENCES_MAX)]
    return [msgspec.structs.replace(selection, sequences=page) for page in pages]


class DeadAdmin(Calls):
    """The operations of ``plait dlq``.

    Sequences belong to a partition: where a subject has several, ``partition`` selects it.
    """

    async def dead_queues(self, subject: str | None = None) -> list[DeadQueue]:
        """The groups that have dead letters, of a subject or of all subjects."""
        if subject is None:
            answers = await self._everywhere(d.LIST_QUEUES)
        else:
            answers = [a for _, a in await self._each(await self._places(subject), d.LIST_QUEUES)]
        counts: dict[tuple[str, str], int] = {}
        for queue in (queue for answer in answers for queue in answer):
            counts[queue.subject, queue.group] = counts.get((queue.subject, queue.group), 0) + queue.count
        return [DeadQueue(*key, counts[key]) for key in sorted(counts)]

    async def _letter_places(
        self, subject: str, group: str, partition: Partition | None, by: LetterFilter
    ) -> list[PartitionNode]:
        """The selected partitions, without those that the group has never attached to: they have no letters."""
        if by.sequences is not None:
            return [await self._place(subject, partition, "sequences")]
        places = await self._places(subject, partition)
        if len(places) == 1:
            return places
        return [place for place, _ in await self._each(places, DESCRIBE_GROUP, group=group)]

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
        """A group's dead letters, oldest first; with their bodies if ``bodies``.

        ``sequences``, the ``type`` and ``handler`` of the reason, and ``before``, a time, select letters.
        """
        limit = limit_of(limit)
        selection = selection_of(select)
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
        self, place: PartitionNode, subject: str, group: str, limit: int, bodies: bool, selection: LetterFilter
    ) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        for part in _parts(selection):
            after: int | None = -1
            while after is not None and len(found) < limit:
                page = await self._run(
                    d.LIST_LETTERS,
                    at=place.node,
                    subject=place.name.name,
                    group=group,
                    select=part,
                    after=after,
                    limit=min(limit - len(found), DEAD_LIST_MAX),
                    bodies=bodies,
                )
                found += [_letter(subject, group, letter, place.name) for letter in page.rows]
                after = page.next
        return found

    async def dead_letter(
        self, subject: str, group: str, sequence: int, *, partition: Partition | None = None
    ) -> DeadLetter:
        """One dead letter with its body; ``DeadLetterNotFound`` when there is none."""
        found = await self.dead_letters(subject, group, partition=partition, limit=1, bodies=True, sequences=[sequence])
        if not found:
            raise DeadLetterNotFound(
                f"message {sequence} of {subject!r} is not a dead letter of group {group!r}",
                subject=subject,
                group=group,
                sequence=sequence,
            )
        return found[0]

    async def dead_reasons(self, subject: str, group: str, *, partition: Partition | None = None) -> list[DeadReason]:
        """Why a group's messages became dead letters: error types and handlers, most frequent first."""
        merged: dict[tuple[str, str], d.ReasonRow] = {}
        for place in await self._letter_places(subject, group, partition, LetterFilter()):
            after: int | None = -1
            while after is not None:
                page = await self._run(
                    d.COUNT_REASONS,
                    at=place.node,
                    subject=place.name.name,
                    group=group,
                    after=after,
                    limit=DEAD_PAGE_MAX,
                )
                for part in page.rows:
                    known = merged.setdefault((part.type, part.handler), part)
                    if known is not part:
                        known.add(part)
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
        """Deliver dead letters to their group again, and to no other group; returns their number.

        Message id, attempts and history are kept. ``rate`` is the maximum per second, ``progress`` is called with the
        count so far, and with ``dry_run`` the letters are only counted.
        """
        pace = LetterRate(rate, progress, dry_run)
        return await self._change(d.RESEND_LETTERS, subject, group, partition, pace, selection_of(select))

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
        """Delete dead letters permanently; returns their number. The arguments are those of ``resend_dead``."""
        pace = LetterRate(rate, progress, dry_run)
        return await self._change(d.PURGE_LETTERS, subject, group, partition, pace, selection_of(select))

    async def _change(
        self,
        operation: Operation[d.ChangedLetters],
        subject: str,
        group: str,
        partition: Partition | None,
        pace: LetterRate,
        selection: LetterFilter,
    ) -> int:
        """Resend or purge the selected letters, page by page at the given pace."""
        for place in await self._letter_places(subject, group, partition, selection):
            for select in _parts(selection):
                after: int | None = -1
                while after is not None:
                    limit = await pace.turn()
                    page = await self._run(
                        operation,
                        at=place.node,
                        subject=place.name.name,
                        group=group,
                        select=select,
                        after=after,
                        limit=limit,
                        dry_run=pace.dry_run,
                    )
                    after = page.next
                    pace.did(page.count)
        return pace.count


class LetterRate:
    """Limits letters to ``rate`` per second. A page that is a little late does not delay the next ones.

    In any period of t seconds at most ``rate * (t + PACE_SECONDS + CATCH_UP_SECONDS)`` letters pass. After a longer
    delay the rate does not rise to catch up.
    """

    def __init__(
        self, rate: float | None, progress: Callable[[int], None] | None = None, dry_run: bool = False
    ) -> None:
        if rate is not None and not is_number(rate):
            raise InvalidArgument(f"rate {shown(rate)} is a {type(rate).__name__}; use a number of messages per second")
        if rate is not None and not 0 < rate <= RATE_MAX:
            raise InvalidArgument(f"rate must be more than 0 and at most {RATE_MAX:g} per second, not {shown(rate)}")
        self.dry_run = dry_run
        self._rate = None if dry_run or rate is None else float(rate)
        self._progress = progress
        self._limit: RateLimit | None = None
        self.count = 0

    async def turn(self) -> int:
        """Wait until the next page is due; returns its maximum number of letters."""
        rate = self._rate
        if rate is None:
            return DEAD_PAGE_MAX
        loop = asyncio.get_running_loop()
        if self._limit is None:
            self._limit = RateLimit(rate, CATCH_UP_SECONDS, start=loop.time())
        await asyncio.sleep(self._limit.take(0, loop.time()))
        return max(1, min(int(self._limit.room(loop.time()) + PACE_SECONDS * rate), DEAD_PAGE_MAX))

    def did(self, count: int) -> None:
        """Count the letters of a page."""
        self.count += count
        if self._limit is not None:
            self._limit.take(count, asyncio.get_running_loop().time())
        if self._progress is not None:
            self._progress(self.count)


def _letter(subject: str, group: str, letter: d.LetterRow, partition: PartitionName) -> DeadLetter:
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
