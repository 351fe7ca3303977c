"""``Definition``: what a recurrence sends and when, as stored in the database; checked when it is made."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from plait.errors import InvalidArgument, TooLarge
from plait.frame.columns import TAG_SEPARATOR
from plait.limits import (
    KEY_SIZE_MAX,
    RECURRENCE_BODY_MAX,
    RECURRENCE_HEADERS_MAX,
    RECURRENCE_SECONDS_MAX,
    RECURRENCE_SECONDS_MIN,
    TAGS_MAX,
)
from plait.meta.recurring.occurrences import NEVER, Rule
from plait.model import names
from plait.wire.admin.recurrences import CatchUp, CreateRecurrence, HeaderValue, SetRecurrence

#: The headers of every firing: the recurrence, the number of the firing, and its due time in microseconds.
NAME_HEADER: Final = "plait-recurrence"
NUMBER_HEADER: Final = "plait-firing"
DUE_HEADER: Final = "plait-due"
_OWN_HEADERS: Final = (NAME_HEADER, NUMBER_HEADER, DUE_HEADER)

_encoder = msgspec.msgpack.Encoder()


class Definition(msgspec.Struct, frozen=True, array_like=True):
    """The rule and the message of a recurrence."""

    body: bytes
    cron: str | None
    zone: str
    #: The interval in microseconds, and the moment from which it counts.
    every: int | None
    start: int
    catch_up: CatchUp
    key: str | None
    tags: list[str]
    headers: dict[str, HeaderValue]

    @classmethod
    def of(cls, request: CreateRecurrence, now: int) -> Definition:
        """The checked definition that a request asks for."""
        names.check("recurrence", request.name)
        names.check("subject", request.subject)
        return _made(request, now)

    def changed(self, request: SetRecurrence, now: int) -> Definition:
        """The definition with the fields that a request sets. A new rule counts from now."""
        given = {
            field: value
            for field in SetRecurrence.__struct_fields__
            if field != "name" and (value := getattr(request, field)) is not msgspec.UNSET
        }
        if "cron" in given and "every" in given:
            raise InvalidArgument("give cron or every, not both: a recurrence has one rule")
        if "zone" in given and self.cron is None and "cron" not in given:
            raise InvalidArgument("a zone applies to a cron expression only; this recurrence has an interval")
        fields: dict[str, Any] = {
            "name": request.name,
            "subject": request.name,
            "body": self.body,
            "cron": None if "every" in given else self.cron,
            "zone": "UTC" if "every" in given else self.zone,
            "every": None if "cron" in given or self.every is None else self.every / 1_000_000,
            "catch_up": self.catch_up,
            "key": self.key,
            "tags": self.tags,
            "headers": self.headers,
        }
        start = now if "every" in given else self.start
        return _made(CreateRecurrence(**fields | given), start)

    @property
    def rule(self) -> Rule:
        return Rule(self.cron, self.zone, self.every, self.start)

    def encoded(self) -> bytes:
        return _encoder.encode(self)

    def same_as(self, other: Definition) -> bool:
        """Whether both send the same at the same times, apart from the moment of their creation."""
        return msgspec.structs.replace(self, start=0) == msgspec.structs.replace(other, start=0)

    def tag_column(self) -> bytes:
        return (TAG_SEPARATOR + TAG_SEPARATOR.join(self.tags) + TAG_SEPARATOR).encode() if self.tags else b""

    def header_column(self, name: str, number: int, due: int) -> bytes:
        """The encoded headers of one firing."""
        return _encoder.encode(self.headers | {NAME_HEADER: name, NUMBER_HEADER: number, DUE_HEADER: due})


_decoder = msgspec.msgpack.Decoder(Definition)
decode = _decoder.decode


def rule_of(cron: str | None, zone: str, every: float | None, start: int) -> Rule:
    """The checked rule of a request."""
    if (cron is None) == (every is None):
        raise InvalidArgument("give cron or every: a recurrence has one rule")
    if every is not None and not RECURRENCE_SECONDS_MIN <= every <= RECURRENCE_SECONDS_MAX:
        raise InvalidArgument(
            f"an interval of {every} seconds is not possible; use {RECURRENCE_SECONDS_MIN:g} second "
            f"to {RECURRENCE_SECONDS_MAX / 86_400:.0f} days"
        )
    if every is not None and zone != "UTC":
        raise InvalidArgument(f"zone {zone!r} applies to a cron expression only; leave it out for an interval")
    rule = Rule(cron, zone, None if every is None else round(every * 1_000_000), start)
    if rule.after(start) >= NEVER:
        raise InvalidArgument(f"cron expression {cron!r} matches no time in the next 50 years")
    return rule


def _made(request: CreateRecurrence, start: int) -> Definition:
    rule_of(request.cron, request.zone, request.every, start)
    if len(request.body) > RECURRENCE_BODY_MAX:
        raise TooLarge(
            f"a body of {len(request.body)} bytes is over the limit of {RECURRENCE_BODY_MAX} for a recurrence; "
            "store it elsewhere and send a reference",
            limit="RECURRENCE_BODY_MAX",
            value=RECURRENCE_BODY_MAX,
            size=len(request.body),
        )
    if request.key is not None and not 0 < len(request.key.encode()) <= KEY_SIZE_MAX:
        raise InvalidArgument(f"a key has 1 to {KEY_SIZE_MAX} bytes, not {len(request.key.encode())}")
    if len(request.tags) > TAGS_MAX:
        raise InvalidArgument(f"{len(request.tags)} tags are over the limit of {TAGS_MAX}; use headers for the rest")
    for tag in request.tags:
        names.check_tag(tag)
    for name, value in request.headers.items():
        if not name or name in _OWN_HEADERS:
            raise InvalidArgument(f"header name {name!r} is not possible: Plait sets {', '.join(_OWN_HEADERS)}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgument(f"header {name!r} does not fit 64 bits; send it as text")
    if (size := len(_encoder.encode(request.headers))) > RECURRENCE_HEADERS_MAX:
        raise TooLarge(
            f"headers of {size} bytes are over the limit of {RECURRENCE_HEADERS_MAX} for a recurrence",
            limit="RECURRENCE_HEADERS_MAX",
            value=RECURRENCE_HEADERS_MAX,
            size=size,
        )
    return Definition(
        request.body,
        request.cron,
        request.zone,
        None if request.every is None else round(request.every * 1_000_000),
        start,
        request.catch_up,
        request.key,
        request.tags,
        request.headers,
    )
