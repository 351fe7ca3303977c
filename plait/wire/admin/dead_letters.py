"""Dead letters and parked keys, page by page, so that each request is bounded however many letters there are."""

from __future__ import annotations

import msgspec

from plait.limits import DEAD_LIST_MAX, PARKED_PAGE_MAX
from plait.model.reason import Reason
from plait.wire.admin.operation import Operation, Page
from plait.wire.admin.subjects import OfGroup, OfSubjects


class LetterFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the letters that match every field that is set."""

    sequences: list[int] | None = None
    type: str | None = None
    handler: str | None = None
    #: Select letters that became dead letters before this time, in microseconds.
    before: int | None = None


class LetterPage(OfGroup):
    """At most ``limit`` selected letters of a group, after the sequence ``after``."""

    select: LetterFilter = LetterFilter()
    after: int = -1
    limit: int = DEAD_LIST_MAX


class ListLetters(LetterPage):
    """List a page of letters."""

    bodies: bool = False


class ChangeLetters(LetterPage):
    """Resend or purge a page of letters; with ``dry_run`` only count them."""

    dry_run: bool = False


class DeadQueue(msgspec.Struct, frozen=True):
    """A group of a subject that has dead letters, and their number."""

    subject: str
    group: str
    count: int


class PastDeath(msgspec.Struct, frozen=True):
    """An earlier death of a letter that was resent."""

    attempts: int
    time: int
    reason: Reason


class LetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter. If it is unreadable, only its sequence and attempts are set."""

    sequence: int
    attempts: int
    producer: int = 0
    producer_sequence: int = 0
    key: str | None = None
    tags: bytes = b""
    headers: bytes = b""
    body: bytes | None = None
    size: int = 0
    send_time: int | None = None
    store_time: int = 0
    first_time: int = 0
    last_time: int = 0
    reason: Reason = Reason()
    history: list[PastDeath] = []


class ReasonRow(msgspec.Struct):
    """The number of letters with one type of reason and handler; ``text`` is from the latest of them."""

    type: str
    handler: str
    text: str
    count: int
    first_time: int
    last_time: int

    def add(self, other: ReasonRow) -> None:
        """Add the letters of another row with the same type and handler."""
        if other.last_time >= self.last_time:
            self.text = other.text
        self.count += other.count
        self.first_time = min(self.first_time, other.first_time)
        self.last_time = max(self.last_time, other.last_time)


class ChangedLetters(msgspec.Struct):
    """How many letters of a page were resent or purged, and the sequence after which the next page starts."""

    count: int
    next: int | None


class ListParked(OfGroup):
    """List at most ``limit`` parked keys of a group, in order of their hashes, after the hash ``after``."""

    after: int = -1
    limit: int = PARKED_PAGE_MAX


class Unpark(OfGroup):
    """Resume or skip parked keys, given by their hashes."""

    keys: list[int]


class ParkedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A parked key. If its letter is unreadable or in another partition, only the first three fields are set."""

    hash: int
    lp: int
    #: The sequence of the dead letter; None: the letter is in the key's earlier partition.
    sequence: int | None
    key: str | None = None
    attempts: int = 0
    #: Time of death in microseconds.
    since: int | None = None
    reason: Reason = Reason()


LIST_QUEUES = Operation("dlq.queues", OfSubjects, list[DeadQueue])
LIST_LETTERS = Operation("dlq.list", ListLetters, Page[LetterRow])
COUNT_REASONS = Operation("dlq.reasons", LetterPage, Page[ReasonRow])
RESEND_LETTERS = Operation("dlq.resend", ChangeLetters, ChangedLetters)
PURGE_LETTERS = Operation("dlq.purge", ChangeLetters, ChangedLetters)
LIST_PARKED = Operation("group.parked", ListParked, Page[ParkedRow])
#: Deliver the failed messages of parked keys again. Returns the number of keys.
RESUME_KEYS = Operation("group.resume", Unpark, int)
#: Continue after the failed messages of parked keys, which stay dead letters. Returns the number of keys.
SKIP_KEYS = Operation("group.skip", Unpark, int)
