"""Decides which recurrences fire, and keeps the frames of their firings until a broker has stored them.

A firing is *decided* in one transaction, which moves the recurrence to its next time and adds its message to a frame.
The frame is stored in the database with the producer id and the sequences that it is sent under. Any meta server may
send it, any number of times: brokers recognize a resend (R7). So a crash of a meta server between any two steps neither
loses a firing nor stores it twice. A partition gets no new frame while it has an unconfirmed one. The frames that one
meta server process makes for a partition have one producer id, so each follows the one before. Another process, or one
that starts again, uses an id of its own: the database, which may be restored from an older copy, does not number
frames.

The rows are delayed messages that are due at once: they enter the schedule of a partition, whose broker delivers none
of them before its own clock has passed the due time. If the broker refuses a frame because a logical partition has
moved (R5), the frame is not stored and never will be, and its rows get new frames that follow the route. A partition
with an unconfirmed frame stays in the route (``Retiring``).

Only the wall clock of the server that decides is compared with due times. The next time of a recurrence only grows, so
a clock that is set back, or the slower clock of another server, never repeats a firing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import sqlalchemy as sa
from xxhash import xxh3_64_intdigest

from plait import chance
from plait.frame.view import FrameView
from plait.limits import CATCH_UP_MAX, FIRING_LATE_SECONDS, LOGICAL_PARTITIONS, MIB
from plait.meta.brokers import Brokers
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.schema import FIRING_FRAMES, RECURRENCES, PartitionAssignment
from plait.meta.recurring.definition import Definition, decode
from plait.meta.recurring.firing_frames import Firing, frame_of, part_of, targets_of
from plait.meta.recurring.occurrences import NEVER
from plait.model import route as routes
from plait.model.logical_partitions import Numbers
from plait.model.route import PartitionId

#: Recurrences that one transaction examines, and about how many bytes of messages it puts into a frame.
PAGE: Final = 100
FRAME_BYTES: Final = 1 * MIB
#: Firings of one recurrence that one transaction makes up for.
CATCH_UP_STEP: Final = 50
#: Partitions whose producers a process remembers. For others it takes a new one.
PRODUCERS_MAX: Final = 10_000
#: Unconfirmed frames that are read at once.
PENDING_PAGE: Final = 64

_R: Final = RECURRENCES.c
_F: Final = FIRING_FRAMES.c
_ASSIGNED: Final = PartitionAssignment.TABLE


class PendingFrame(NamedTuple):
    """A frame that a broker has not confirmed."""

    subject: str
    place: PartitionId
    producer: int
    #: The producer sequence of its last row.
    last: int
    frame: bytes


class Decided(NamedTuple):
    """The result of one step."""

    #: Frames to send.
    frames: list[PendingFrame]
    #: True if there may be more due recurrences now.
    more: bool
    #: Seconds until the next recurrence is due; None: there is none.
    wait: float | None


class Firings:
    """The firings of all recurrences, as one meta server decides them."""

    def __init__(self, core: Core, brokers: Brokers) -> None:
        self._core = core
        self._brokers = brokers
        #: The (time, name) of the last recurrence that was examined: one whose brokers are down delays no other.
        self._after = (0, "")
        #: Spreads the frames of a subject over its partitions.
        self.turn = 0
        #: For partitions that frames were made for: the producer of this process, and its last sequence.
        self._producers: dict[PartitionId, tuple[int, int]] = {}
        #: The last producer of the last page of ``pending``.
        self._seen = 0

    # --- decisions ------------------------------------------------------------------------------

    def decide(self) -> Decided:
        """Decide due firings: one page of recurrences, in one transaction."""
        core = self._core
        now = core.clock.now()
        with core.noted(), core.store.database.reading() as connection:
            first = connection.scalar(sa.select(sa.func.min(_R.next)))
        if first is None or first >= NEVER:
            return Decided([], False, None)
        if first > now:
            self._after = (0, "")
            return Decided([], False, (first - now) / 1_000_000)
        core.refresh()
        try:
            with core.noted(), core.store.database.writing() as connection:
                rows = self._due(connection, now)
                frames = list(self._fire(connection, rows, now))
        except ConcurrentChange:
            # Another meta server used the same partition first.
            return Decided([], True, 0.0)
        # After the last page the first one is examined again, a little later: what it left may be possible then.
        full = len(rows) == PAGE
        more = full or (not rows and self._after != (0, ""))
        self._after = (rows[-1].next, rows[-1].name) if full else (0, "")
        return Decided(frames, more, 0.0)

    def _due(self, connection: sa.Connection, now: int) -> Sequence[Any]:
        time, name = self._after
        later = sa.or_(_R.next > time, sa.and_(_R.next == time, _R.name > name))
        due = sa.select(RECURRENCES).where(_R.next <= now, _R.next >= time, later)
        # Rows that another meta server has locked are its own.
        page = due.order_by(_R.next, _R.name).limit(PAGE).with_for_update(skip_locked=True)
        return connection.execute(page).all()

    def _fire(self, connection: sa.Connection, rows: Sequence[Any], now: int) -> Iterator[PendingFrame]:
        """Make the frames of due recurrences, one for each partition."""
        for subject, group in groupby(sorted(rows, key=lambda row: str(row.subject)), key=lambda row: str(row.subject)):
            choice = _Choice(self, connection, subject)
            firings: dict[PartitionId, list[Firing]] = defaultdict(list)
            changes: list[dict[str, Any]] = []
            size = 0
            for row in sorted(group, key=lambda row: (row.next, row.name)):
                definition = decode(row.body)
                place = choice.of(definition.key)
                # Without an available broker they stay due. So do those that are too many for one transaction.
                if size < FRAME_BYTES and place is not None:
                    mine, change = _advance(row, definition, now)
                    size += len(mine) * len(definition.body)
                    firings[place] += mine
                    changes.append(change)
            if changes:
                connection.execute(_ADVANCE, changes)
            for place, some in firings.items():
                if not some:
                    continue
                producer, last = self._producers.get(place) or (_new_producer(), 0)
                frame = frame_of(some, producer=producer, previous=last, now=now)
                pending = PendingFrame(subject, place, producer, last + len(some), frame)
                _keep(connection, pending)
                # If the transaction fails, the broker finds a gap in the producer's sequences, and ``restart`` ends it.
                self._producers[place] = pending.producer, pending.last
                if len(self._producers) > PRODUCERS_MAX:
                    del self._producers[next(iter(self._producers))]
                yield pending

    def is_free(self, connection: sa.Connection, subject: str, place: PartitionId) -> bool:
        """Whether a partition may get a new frame. It stays in the route until the transaction ends."""
        row = self._core.mirror.partitions[place]
        if not row.told or "W" not in self._brokers.state(place.group):
            return False
        # A locked row is about to change; it is not waited for.
        kept = sa.select(_ASSIGNED.c.name).where(
            _ASSIGNED.c.broker_group == place.group,
            _ASSIGNED.c.name == place.name,
            _ASSIGNED.c.subject == subject,
            _ASSIGNED.c.state == "kept",
        )
        if connection.execute(kept.with_for_update(read=True, skip_locked=True)).first() is None:
            return False
        held = sa.select(_F.producer).where(_F.broker_group == place.group, _F.partition == place.name)
        return connection.execute(held).first() is None

    def table(self, subject: str) -> tuple[Numbers, Sequence[PartitionId]] | None:
        """The route of a subject: for each logical partition an index of the partitions; None: it is deleted."""
        mirror = self._core.mirror
        if mirror.subject(subject) is None:
            return None
        route = mirror.route(subject)
        return routes.current(route), route.partitions

    # --- frames that are not confirmed ----------------------------------------------------------

    def pending(self) -> list[PendingFrame]:
        """Frames that no broker has confirmed, page by page: the next call returns the next page."""
        self._core.refresh()
        wanted = sa.select(FIRING_FRAMES).where(_F.producer > self._seen).order_by(_F.producer).limit(PENDING_PAGE)
        with self._core.noted(), self._core.store.database.reading() as connection:
            found = [_frame(row) for row in connection.execute(wanted)]
        self._seen = found[-1].producer if len(found) == PENDING_PAGE else 0
        partitions = self._core.mirror.partitions
        frames = []
        for frame in found:
            row = partitions.get(frame.place)
            if row is not None and row.subject == frame.subject and row.state == "kept":
                frames.append(frame)
            else:
                # Its broker group was removed from the cluster.
                frames += self.reroute(frame)
        return frames

    def confirm(self, frames: Sequence[PendingFrame]) -> None:
        """Record that brokers have stored frames."""
        with self._core.noted(), self._core.store.database.writing() as connection:
            for each in sorted(frames):
                _take(connection, each)

    def restart(self, pending: PendingFrame) -> list[PendingFrame]:
        """Give a frame that its broker does not have a new producer: the broker does not know the old one any more.

        Returns nothing if another server has confirmed or replaced the frame meanwhile.
        """
        rows = np.arange(FrameView(pending.frame).count)
        return self._replace(pending, [(pending.place, rows)])

    def reroute(self, pending: PendingFrame) -> list[PendingFrame]:
        """Replace a frame, which its broker definitely does not have, by frames that follow the newest route.

        Returns nothing if the route still leads to the same partition, or if another server was faster.
        """
        self._core.refresh()
        found = self.table(pending.subject)
        if found is None:
            return self._replace(pending, [])
        table, places = found
        # Messages without a key stay, if the partition accepts messages at all.
        here = [index for index in set(table.tolist()) if places[index] == pending.place]
        targets = targets_of(pending.frame, table, here[0] if here else int(table[self.turn % len(table)]))
        parts = [(places[index], np.flatnonzero(targets == index)) for index in sorted(set(targets.tolist()))]
        if [place for place, _ in parts] == [pending.place]:
            return []
        return self._replace(pending, parts)

    def _replace(self, pending: PendingFrame, parts: Sequence[tuple[PartitionId, Numbers]]) -> list[PendingFrame]:
        frames = []
        with self._core.noted(), self._core.store.database.writing() as connection:
            if _take(connection, pending):
                for place, rows in parts:
                    producer = _new_producer()
                    frame = part_of(pending.frame, rows, producer)
                    frames.append(PendingFrame(pending.subject, place, producer, len(rows), frame))
                    _keep(connection, frames[-1])
        self._producers.pop(pending.place, None)
        return frames


class _Choice:
    """Chooses the partitions of one subject's firings in one transaction."""

    def __init__(self, firings: Firings, connection: sa.Connection, subject: str) -> None:
        self._firings = firings
        self._connection = connection
        self._subject = subject
        self._route = firings.table(subject)
        self._free: dict[PartitionId, bool] = {}
        #: The partitions that accept messages now.
        self._open: list[PartitionId] = []
        if self._route is not None:
            table, places = self._route
            self._open = [places[index] for index in sorted(set(table.tolist()))]
        firings.turn += 1

    def of(self, key: str | None) -> PartitionId | None:
        """The partition of a message; None if it cannot get one now."""
        if self._route is None:
            return None
        table, places = self._route
        if key is not None:
            place = places[int(table[xxh3_64_intdigest(key.encode()) % LOGICAL_PARTITIONS])]
            return place if self._is_free(place) else None
        begin = self._firings.turn % len(self._open)
        return next((place for place in self._open[begin:] + self._open[:begin] if self._is_free(place)), None)

    def _is_free(self, place: PartitionId) -> bool:
        if place not in self._free:
            self._free[place] = self._firings.is_free(self._connection, self._subject, place)
        return self._free[place]


_ADVANCE: Final = (
    sa.update(RECURRENCES)
    .where(_R.name == sa.bindparam("of"))
    .values({name: sa.bindparam(f"new_{name}") for name in ("next", "firings", "last", "behind")})
)


def _advance(row: Any, definition: Definition, now: int) -> tuple[list[Firing], dict[str, Any]]:
    """The firings of a due recurrence, and its next state."""
    rule, due, number, behind = definition.rule, row.next, row.firings, row.behind
    dues: list[int] = []
    if definition.catch_up == "all":
        while due <= now and len(dues) < CATCH_UP_STEP and behind + len(dues) < CATCH_UP_MAX:
            dues.append(due)
            due = rule.after(due)
        behind += len(dues)
        if due > now:
            behind = 0
        elif behind >= CATCH_UP_MAX:
            due, behind = rule.after(now), 0
    else:
        if definition.catch_up == "one" or now - due <= FIRING_LATE_SECONDS * 1_000_000:
            dues.append(due)
        due = rule.after(now)
    firings = [Firing(row.name, definition, number + index, each) for index, each in enumerate(dues, 1)]
    state = {"next": due, "firings": number + len(dues), "last": dues[-1] if dues else row.last, "behind": behind}
    return firings, {"of": row.name} | {f"new_{name}": value for name, value in state.items()}


def _new_producer() -> int:
    # A signed column holds it.
    return chance.bits(62) | 1


def _keep(connection: sa.Connection, pending: PendingFrame) -> None:
    """Store a frame until it is confirmed."""
    connection.execute(
        sa.insert(FIRING_FRAMES).values(
            producer=pending.producer,
            last=pending.last,
            broker_group=pending.place.group,
            partition=pending.place.name,
            subject=pending.subject,
            frame=pending.frame,
        )
    )


def _take(connection: sa.Connection, pending: PendingFrame) -> bool:
    """Delete the row of a frame. Returns False if another server has confirmed or replaced it."""
    mine = sa.delete(FIRING_FRAMES).where(_F.producer == pending.producer, _F.last == pending.last)
    return bool(connection.execute(mine).rowcount)


def _frame(row: Any) -> PendingFrame:
    return PendingFrame(row.subject, PartitionId(row.partition, row.broker_group), row.producer, row.last, row.frame)
