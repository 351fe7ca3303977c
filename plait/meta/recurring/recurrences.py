"""Recurrences: created, listed, changed, paused, resumed and removed. Each call is one transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from plait.errors import InvalidArgument, LimitExceeded, RecurrenceExists, RecurrenceNotFound, SubjectNotFound
from plait.limits import RECURRENCE_PAGE_MAX
from plait.meta.core import Core
from plait.meta.database.schema import RECURRENCES, SubjectRow
from plait.meta.recurring.definition import Definition, decode, rule_of
from plait.meta.recurring.occurrences import NEVER, Rule
from plait.wire.admin.recurrences import (
    CreateRecurrence,
    ListRecurrences,
    PreviewFirings,
    RecurrencePage,
    RecurrenceRow,
    SetRecurrence,
)

_T = TypeVar("_T")
_C: Final = RECURRENCES.c


class Recurrences:
    """The recurrences of the cluster."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def create(self, request: CreateRecurrence) -> RecurrenceRow:
        """Create a recurrence for an existing subject. If it exists with the same definition, nothing changes."""
        now = self._core.clock.now()
        definition = Definition.of(request, now)

        def create(connection: sa.Connection) -> RecurrenceRow:
            known = _find(connection, request.name)
            if known is not None:
                if known.subject == request.subject and decode(known.body).same_as(definition):
                    return _row(known)
                raise RecurrenceExists(
                    f"recurrence {request.name!r} exists already, with another definition; "
                    "change it or use another name",
                    name=request.name,
                )
            self._check_subject(connection, request.subject)
            limit = self._core.limits.recurrences
            if (connection.scalar(sa.select(sa.func.count()).select_from(RECURRENCES)) or 0) >= limit:
                raise LimitExceeded(
                    f"recurrence limit reached ({limit} per cluster, limit `recurrences`); "
                    "remove unused ones or raise it",
                    limit="recurrences",
                    value=limit,
                )
            values = {
                "name": request.name,
                "subject": request.subject,
                "body": definition.encoded(),
                "paused": False,
                "created": now,
                "next": definition.rule.after(now),
                "firings": 0,
                "last": 0,
                "behind": 0,
            }
            connection.execute(sa.insert(RECURRENCES).values(**values))
            return _row(_found(connection, request.name))

        return self._write(create)

    @staticmethod
    def _check_subject(connection: sa.Connection, subject: str) -> None:
        """Refuse a missing subject, and lock an existing one against its deletion until the transaction ends."""
        table = SubjectRow.TABLE
        living = sa.select(table.c.name).where(table.c.name == subject, ~table.c.deleted).with_for_update(read=True)
        if connection.execute(living).first() is None:
            raise SubjectNotFound(f"subject {subject!r} does not exist; create it first", subject=subject)

    def set(self, request: SetRecurrence) -> RecurrenceRow:
        """Change a recurrence. Firings that are decided already keep their old message."""
        now = self._core.clock.now()

        def change(connection: sa.Connection) -> RecurrenceRow:
            row = _found(connection, request.name)
            before = decode(row.body)
            after = before.changed(request, now)
            values: dict[str, Any] = {"body": after.encoded()}
            same_rule = (before.cron, before.zone, before.every, before.start) == (
                after.cron,
                after.zone,
                after.every,
                after.start,
            )
            if not same_rule and not row.paused:
                values |= _restarted(after.rule, now, row.last)
            _update(connection, request.name, values)
            return _row(_found(connection, request.name))

        return self._write(change)

    def pause(self, name: str, *, paused: bool) -> RecurrenceRow:
        """Pause a recurrence, or resume it. Times that pass meanwhile are not made up for."""
        now = self._core.clock.now()

        def change(connection: sa.Connection) -> RecurrenceRow:
            row = _found(connection, name)
            if row.paused != paused:
                times = {"next": NEVER} if paused else _restarted(decode(row.body).rule, now, row.last)
                _update(connection, name, {"paused": paused, **times})
            return _row(_found(connection, name))

        return self._write(change)

    def remove(self, name: str) -> None:
        """Remove a recurrence. A firing that is decided already is still sent."""

        def remove(connection: sa.Connection) -> None:
            if not connection.execute(sa.delete(RECURRENCES).where(_C.name == name)).rowcount:
                raise _missing(name)

        self._write(remove)

    def describe(self, name: str) -> RecurrenceRow:
        with self._core.noted(), self._core.store.database.reading() as connection:
            return _row(_found(connection, name, lock=False))

    def page(self, request: ListRecurrences) -> RecurrencePage:
        """A page of recurrences by name."""
        _check_count("limit", request.limit, RECURRENCE_PAGE_MAX)
        wanted = sa.select(RECURRENCES).where(_C.name > request.after).order_by(_C.name).limit(request.limit + 1)
        if request.subject is not None:
            wanted = wanted.where(_C.subject == request.subject)
        with self._core.noted(), self._core.store.database.reading() as connection:
            rows = [_row(row) for row in connection.execute(wanted)]
        more = len(rows) > request.limit
        return RecurrencePage(rows[: request.limit], rows[request.limit - 1].name if more else None)

    def preview(self, request: PreviewFirings) -> list[int]:
        """The next times of a recurrence or of a rule, in microseconds."""
        _check_count("count", request.count, RECURRENCE_PAGE_MAX)
        moment = self._core.clock.now()
        if request.name is None:
            rule = rule_of(request.cron, request.zone, request.every, moment)
        else:
            if request.cron is not None or request.every is not None:
                raise InvalidArgument("give the name of a recurrence or a rule, not both")
            with self._core.noted(), self._core.store.database.reading() as connection:
                row = _found(connection, request.name, lock=False)
            if row.paused:
                return []
            # A due firing that is not decided yet counts as the next one.
            rule, moment = decode(row.body).rule, row.next - 1
        times: list[int] = []
        while len(times) < request.count and (moment := rule.after(moment)) < NEVER:
            times.append(moment)
        return times

    def _write(self, call: Callable[[sa.Connection], _T]) -> _T:
        def write() -> _T:
            with self._core.noted(), self._core.store.database.writing() as connection:
                return call(connection)

        return self._core.decide(write)


def _restarted(rule: Rule, now: int, last: int) -> dict[str, int]:
    """The times of a rule that starts now. They are after the last firing, also if the clock was set back."""
    return {"next": rule.after(max(now, last)), "behind": 0}


def _find(connection: sa.Connection, name: str, *, lock: bool = True) -> Any:
    wanted = sa.select(RECURRENCES).where(_C.name == name)
    return connection.execute(wanted.with_for_update() if lock else wanted).first()


def _found(connection: sa.Connection, name: str, *, lock: bool = True) -> Any:
    row = _find(connection, name, lock=lock)
    if row is None:
        raise _missing(name)
    return row


def _missing(name: str) -> RecurrenceNotFound:
    return RecurrenceNotFound(f"there is no recurrence {name!r}; list them with 'plait cron list'", name=name)


def _update(connection: sa.Connection, name: str, values: dict[str, Any]) -> None:
    connection.execute(sa.update(RECURRENCES).where(_C.name == name).values(**values))


def _check_count(name: str, count: int, limit: int) -> None:
    if not 1 <= count <= limit:
        raise InvalidArgument(f"{name} {count} is not possible; use 1 to {limit}")


def _row(row: Any) -> RecurrenceRow:
    definition = decode(row.body)
    return RecurrenceRow(
        row.name,
        row.subject,
        definition.body,
        definition.cron,
        definition.zone,
        None if definition.every is None else definition.every / 1_000_000,
        definition.catch_up,
        definition.key,
        definition.tags,
        definition.headers,
        row.paused,
        row.created,
        None if row.next >= NEVER else row.next,
        row.firings,
        row.last or None,
    )
