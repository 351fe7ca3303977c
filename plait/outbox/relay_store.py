"""The statements of a relay: each function is one transaction, or a part of one, on the tables of an outbox.

``turn`` is the only transaction that changes rows of the outbox. It begins with an increment of ``renewals`` where
``epoch`` is the caller's, which locks the row: a former leader waits for it, then changes nothing (``LeaseLost``). In
the same transaction it deletes rows that are stored, removes the assignment of withdrawn rows, and writes partition,
producer and sequence into the rows that are sent next. Sequences grow by one from row to row and are never used twice,
also after a change of the producer id.

A search for rows has no lower bound for the id. A transaction gets its ids before it commits, so rows with lower ids
may become visible later, and must still be found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from plait import chance
from plait.client.send.open_rows import hash_keys
from plait.client.types import PartitionName
from plait.frame.builder import build_frame
from plait.limits import LOGICAL_PARTITIONS
from plait.outbox.frame_queues import Exclusion, OutboxFrame, PlannedFrame, WaitingRow
from plait.outbox.lease_watch import RelayLease
from plait.outbox.outbox_limits import OUTBOX_TURN_ROWS
from plait.outbox.tables import RELAY_ROW

#: Ids of one statement.
IDS_MAX: Final = 500


class LeaseLost(Exception):
    """Another relay has the lease; nothing was changed."""


class RowsChanged(Exception):
    """Rows that were planned do not exist any more, or another program changed them; nothing was changed."""


def new_producer() -> int:
    """A unique producer id that fits a signed 64-bit column."""
    return chance.bits(63) | 1


class RelayStore:
    """The statements for one pair of tables."""

    def __init__(self, outbox: sa.Table, relay: sa.Table) -> None:
        self._outbox = outbox
        self._relay = relay
        self._light = sa.select(
            outbox.c.id, outbox.c.subject, outbox.c.lp, outbox.c.size, outbox.c.due.is_not(None).label("delayed")
        )
        self._full = sa.select(outbox)
        # Built once: building a statement takes longer than running it.
        c = relay.c
        mine = relay.update().where(c.id == RELAY_ROW, c.epoch == sa.bindparam("mine"))
        self._lease = sa.select(c.owner, c.epoch, c.renewals, c.producer, c.next).where(c.id == RELAY_ROW)
        self._renewal = mine.values(renewals=c.renewals + 1, next=c.next + sa.bindparam("count"))
        self._new_producer = mine.values(producer=sa.bindparam("new_producer"))
        self._release = mine.values(owner=None)
        self._take = (
            relay.update()
            .where(c.id == RELAY_ROW, c.epoch == sa.bindparam("seen"), c.renewals == sa.bindparam("seen_renewals"))
            .values(owner=sa.bindparam("new_owner"), epoch=c.epoch + 1, renewals=c.renewals + 1)
        )
        ids: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
        self._deletion = outbox.delete().where(outbox.c.id.in_(ids))
        self._withdrawal = (
            outbox.update().where(outbox.c.id.in_(ids)).values(sequence=None, place=None, producer=None, first=None)
        )
        self._by_ids = self._full.where(outbox.c.id.in_(ids))
        self._assignment = (
            outbox.update()
            .where(outbox.c.id.between(sa.bindparam("low"), sa.bindparam("high")))
            .values(
                sequence=outbox.c.id + sa.bindparam("shift"),
                place=sa.bindparam("new_place"),
                producer=sa.bindparam("new_producer"),
                first=sa.bindparam("new_first"),
            )
        )

    # --- the lease ------------------------------------------------------------------------------

    def lease(self, connection: sa.Connection) -> RelayLease | None:
        """The lease; None if no relay has run yet."""
        found = connection.execute(self._lease).one_or_none()
        return None if found is None else RelayLease(*found)

    def create(self, connection: sa.Connection) -> None:
        """Add the lease, free; fails with ``IntegrityError`` if another relay was faster."""
        connection.execute(
            self._relay.insert().values(id=RELAY_ROW, owner=None, epoch=0, renewals=0, producer=new_producer(), next=1)
        )

    def take(self, connection: sa.Connection, seen: RelayLease, owner: str) -> bool:
        """Take the lease under the next epoch, if it is still as it was seen."""
        values = {"seen": seen.epoch, "seen_renewals": seen.renewals, "new_owner": owner}
        return connection.execute(self._take, values).rowcount == 1

    def release(self, connection: sa.Connection, epoch: int) -> None:
        """Give the lease back, so that another relay need not wait for its end."""
        connection.execute(self._release, {"mine": epoch})

    def _renew(self, connection: sa.Connection, epoch: int, count: int, producer: int | None) -> RelayLease:
        """Renew the lease and reserve sequences; returns the lease as it is now."""
        if connection.execute(self._renewal, {"mine": epoch, "count": count}).rowcount != 1:
            raise LeaseLost(f"epoch {epoch}")
        if producer is not None:
            connection.execute(self._new_producer, {"mine": epoch, "new_producer": producer})
        lease = self.lease(connection)
        assert lease is not None
        return lease

    # --- rows -----------------------------------------------------------------------------------

    def assigned(self, connection: sa.Connection, epoch: int) -> list[OutboxFrame]:
        """All frames that a leader has assigned and that are not known to be stored, in order."""
        self._renew(connection, epoch, 0, None)
        c = self._outbox.c
        rows = connection.execute(self._full.where(c.sequence.is_not(None)).order_by(c.sequence)).all()
        groups = itertools.groupby(rows, lambda row: (row.producer, row.first, row.place, row.due is not None))
        return [_frame(list(each), doubt=True) for _, each in groups]

    def waiting(
        self, connection: sa.Connection, excluded: Sequence[Exclusion], subjects: Iterable[str]
    ) -> list[WaitingRow]:
        """The first rows that are not assigned, without excluded ones and without the given subjects."""
        c = self._outbox.c
        whole = {*subjects, *(each.subject for each in excluded if each.keyless and each.runs == _ALL)}
        query = self._light.where(c.sequence.is_(None)).order_by(c.id).limit(OUTBOX_TURN_ROWS)
        if whole:
            query = query.where(c.subject.not_in(sorted(whole)))
        for each in excluded:
            if each.subject not in whole:
                ranges = [sa.and_(c.lp >= first, c.lp < end) for first, end in each.runs]
                keyless = c.lp.is_(None)
                allowed = sa.and_(c.lp.is_not(None), sa.not_(sa.or_(*ranges)))
                query = query.where(
                    sa.or_(c.subject != each.subject, allowed if each.keyless else sa.or_(keyless, allowed))
                )
        return [
            WaitingRow(row.id, row.subject, row.lp, row.size, bool(row.delayed)) for row in connection.execute(query)
        ]

    def turn(
        self,
        connection: sa.Connection,
        epoch: int,
        stored: Sequence[int],
        withdrawn: Sequence[int],
        planned: Sequence[PlannedFrame],
        producer: int | None = None,
    ) -> list[OutboxFrame]:
        """Renew the lease, delete ``stored`` rows, then assign the planned ones; returns their frames.

        ``withdrawn`` rows are not assigned any more: no broker has them, or it is unknown.
        ``producer`` is a new producer id: brokers do not know the present one any more, or another database uses it.
        """
        count = sum(len(frame.rows) for frame in planned)
        lease = self._renew(connection, epoch, count, producer)
        for ids in _chunks(stored):
            connection.execute(self._deletion, {"ids": ids})
        for ids in _chunks(withdrawn):
            connection.execute(self._withdrawal, {"ids": ids})
        if not planned:
            return []
        self._assign(connection, planned, lease.producer, lease.next - count)
        rows: dict[int, Any] = {}
        for ids in _chunks([row.id for frame in planned for row in frame.rows]):
            rows.update((row.id, row) for row in connection.execute(self._by_ids, {"ids": ids}))
        if len(rows) != count:
            raise RowsChanged(f"{count - len(rows)} of {count} rows of {self._outbox.name} are gone")
        return [_frame([rows[row.id] for row in frame.rows], doubt=False) for frame in planned]

    def _assign(self, connection: sa.Connection, planned: Sequence[PlannedFrame], producer: int, first: int) -> None:
        """Write the sequences: one statement for each run of consecutive ids."""
        values = []
        for frame in planned:
            for run, shift in _runs([row.id for row in frame.rows]):
                values.append(
                    {
                        "low": run[0],
                        "high": run[1],
                        "shift": first + shift - run[0],
                        "new_place": str(frame.target[0]),
                        "new_producer": producer,
                        "new_first": first,
                    }
                )
            first += len(frame.rows)
        connection.execute(self._assignment, values)


_ALL: Final = [(0, LOGICAL_PARTITIONS)]


def _runs(ids: Sequence[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Runs of consecutive ids, each with the index of its first id."""
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            yield (ids[start], ids[index - 1]), start
            start = index


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), IDS_MAX):
        yield ids[start : start + IDS_MAX]


def _frame(rows: Sequence[Any], *, doubt: bool) -> OutboxFrame:
    """The frame of rows with consecutive sequences. The same rows always give the same bytes."""
    first = rows[0]
    name, _, group = first.place.rpartition("@")
    delayed = first.due is not None
    waiting = [WaitingRow(row.id, row.subject, row.lp, row.size, delayed) for row in rows]
    keys = [bytes(row.key).decode() if row.key is not None else "" for row in rows]
    hashes, keyed = hash_keys(keys, len(keys)), any(keys)
    parts = build_frame(
        [bytes(row.body) for row in rows],
        producer=first.producer,
        first=first.first,
        send_time=np.array([row.created for row in rows], np.int64),
        deliver_at=np.array([row.due for row in rows], np.int64) if delayed else None,
        keys=keys if keyed else None,
        key_hashes=hashes if keyed else None,
        tags=_optional([row.tags for row in rows]),
        headers=_optional([row.headers for row in rows]),
    )
    return OutboxFrame((PartitionName(name, group), delayed), waiting, parts, doubt)


def _optional(values: Sequence[bytes | None]) -> list[bytes] | None:
    """A column, which is left out if no row has a value."""
    return None if not any(values) else [b"" if value is None else bytes(value) for value in values]
