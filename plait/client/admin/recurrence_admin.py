"""Recurring messages: creating, listing, changing, pausing and removing recurrences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from plait.client.arguments import Duration, limit_of, seconds_of, shown, to_datetime
from plait.client.net.admin_calls import Calls
from plait.client.send.encoding import encode_body, encode_headers, encode_key, encode_tags
from plait.errors import InvalidArgument, TooLarge
from plait.limits import RECURRENCE_BODY_MAX, RECURRENCE_PAGE_MAX
from plait.wire.admin import recurrences as r
from plait.wire.admin.recurrences import CatchUp


class Recurrence(msgspec.Struct, frozen=True):
    """A recurrence: a message that is sent again and again, by a cron expression or at an interval."""

    name: str
    subject: str
    body: bytes
    #: The rule: a cron expression in a time zone, or an interval in seconds.
    cron: str | None
    zone: str
    every: float | None
    catch_up: CatchUp
    key: str | None
    tags: list[str]
    headers: dict[str, Any]
    paused: bool
    created: datetime
    #: The due time of the next firing; None: there is none, or the recurrence is paused.
    next: datetime | None
    #: The number of the last firing, 0 before the first, and its due time.
    firings: int
    last: datetime | None


class RecurrenceAdmin(Calls):
    """The operations of ``plait cron``."""

    async def create_recurrence(
        self,
        name: str,
        subject: str,
        body: Any,
        *,
        cron: str | None = None,
        zone: str = "UTC",
        every: Duration | None = None,
        catch_up: CatchUp = "one",
        key: str | int | None = None,
        tags: Iterable[str] | str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> Recurrence:
        """Send a message to a subject again and again: by a cron expression in a time zone, or ``every`` so long.

        Each firing is stored exactly once, and never before its due time. ``catch_up`` says what happens with firings
        that were missed while no server ran: "one" for all of them, "all" of them (1,000 at most), or "none". A
        repeated call with the same arguments changes nothing; ``RecurrenceExists`` if the definition differs.
        """
        row = await self._run(
            r.CREATE_RECURRENCE,
            name=_text(name, "name"),
            subject=_text(subject, "subject"),
            cron=_rule_text(cron, "cron"),
            zone=_text(zone, "zone"),
            every=None if every is None else seconds_of(every),
            catch_up=_catch_up(catch_up),
            **_message(body, key, tags, headers),
        )
        return _recurrence(row)

    async def set_recurrence(
        self,
        name: str,
        *,
        body: Any = msgspec.UNSET,
        cron: str | msgspec.UnsetType = msgspec.UNSET,
        zone: str | msgspec.UnsetType = msgspec.UNSET,
        every: Duration | msgspec.UnsetType = msgspec.UNSET,
        catch_up: CatchUp | msgspec.UnsetType = msgspec.UNSET,
        key: str | int | msgspec.UnsetType | None = msgspec.UNSET,
        tags: Iterable[str] | str | msgspec.UnsetType | None = msgspec.UNSET,
        headers: Mapping[str, Any] | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> Recurrence:
        """Change what is given. A new rule counts from now; the numbers of the firings continue."""
        fields: dict[str, Any] = {}
        if body is not msgspec.UNSET:
            fields["body"] = _body(body)
        if not isinstance(key, msgspec.UnsetType):
            fields["key"] = None if key is None else encode_key(key)
        if not isinstance(tags, msgspec.UnsetType):
            fields["tags"] = _tags(tags)
        if not isinstance(headers, msgspec.UnsetType):
            fields["headers"] = _headers(headers)
        if not isinstance(cron, msgspec.UnsetType):
            fields["cron"] = _text(cron, "cron")
        if not isinstance(zone, msgspec.UnsetType):
            fields["zone"] = _text(zone, "zone")
        if not isinstance(every, msgspec.UnsetType):
            fields["every"] = seconds_of(every)
        if not isinstance(catch_up, msgspec.UnsetType):
            fields["catch_up"] = _catch_up(catch_up)
        return _recurrence(await self._run(r.SET_RECURRENCE, name=_text(name, "name"), **fields))

    async def recurrences(self, subject: str | None = None) -> list[Recurrence]:
        """The recurrences of a subject, or all, by name."""
        found: list[Recurrence] = []
        after: str | None = ""
        while after is not None:
            page = await self._run(r.LIST_RECURRENCES, subject=subject, after=after, limit=RECURRENCE_PAGE_MAX)
            found += map(_recurrence, page.rows)
            after = page.next
        return found

    async def recurrence(self, name: str) -> Recurrence:
        """One recurrence; raises ``RecurrenceNotFound``."""
        return _recurrence(await self._run(r.DESCRIBE_RECURRENCE, name=_text(name, "name")))

    async def pause_recurrence(self, name: str) -> Recurrence:
        """Pause a recurrence: it does not fire until it is resumed."""
        return _recurrence(await self._run(r.PAUSE_RECURRENCE, name=_text(name, "name"), paused=True))

    async def resume_recurrence(self, name: str) -> Recurrence:
        """Resume a recurrence. The times that passed meanwhile are not made up for."""
        return _recurrence(await self._run(r.PAUSE_RECURRENCE, name=_text(name, "name"), paused=False))

    async def remove_recurrence(self, name: str) -> None:
        """Remove a recurrence. A firing that is decided already is still sent."""
        await self._run(r.REMOVE_RECURRENCE, name=_text(name, "name"))

    async def firing_times(
        self,
        name: str | None = None,
        *,
        cron: str | None = None,
        zone: str = "UTC",
        every: Duration | None = None,
        count: int = 10,
    ) -> list[datetime]:
        """The next times of a recurrence, or of a rule that you want to try."""
        times = await self._run(
            r.PREVIEW_FIRINGS,
            name=None if name is None else _text(name, "name"),
            cron=_rule_text(cron, "cron"),
            zone=_text(zone, "zone"),
            every=None if every is None else seconds_of(every),
            count=limit_of(count),
        )
        return [to_datetime(each) for each in times]


def _recurrence(row: r.RecurrenceRow) -> Recurrence:
    fields = msgspec.structs.asdict(row)
    fields["created"] = to_datetime(row.created)
    fields["next"] = None if row.next is None else to_datetime(row.next)
    fields["last"] = None if row.last is None else to_datetime(row.last)
    return Recurrence(**fields)


def _message(body: Any, key: Any, tags: Any, headers: Any) -> dict[str, Any]:
    return {
        "body": _body(body),
        "key": None if key is None else encode_key(key),
        "tags": _tags(tags),
        "headers": _headers(headers),
    }


def _body(body: Any) -> bytes:
    encoded = encode_body(body)
    if len(encoded) > RECURRENCE_BODY_MAX:
        # Before it is sent: a request has a limit of its own.
        raise TooLarge(
            f"a body of {len(encoded)} bytes is over the limit of {RECURRENCE_BODY_MAX} for a recurrence; "
            "store it elsewhere and send a reference",
            limit="RECURRENCE_BODY_MAX",
            value=RECURRENCE_BODY_MAX,
            size=len(encoded),
        )
    return encoded


def _tags(tags: Any) -> list[str]:
    encode_tags(tags)
    return [] if not tags else [tags] if isinstance(tags, str) else list(tags)


def _headers(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    encode_headers(headers)
    return dict(headers or {})


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} {shown(value)} is a {type(value).__name__}; use a str")
    return value


def _rule_text(value: Any, name: str) -> str | None:
    return None if value is None else _text(value, name)


def _catch_up(value: Any) -> CatchUp:
    if value not in ("one", "all", "none"):
        raise InvalidArgument(f"catch_up {shown(value)} is not known; use 'one', 'all' or 'none'")
    return value  # type: ignore[no-any-return]
