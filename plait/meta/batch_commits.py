"""Which batches of Spark's sinks are committed: decided here, once, before any broker publishes a row of them (R23).

A query writes batch after batch, and a batch that was not finished is written again, perhaps with other rows. Of each
query the last batch that was decided is kept, with the stages that hold its rows. Whoever asks for the same batch again
is told what was decided the first time; its own rows do not count. The next batch is decided when the last one is done:
published by all brokers that have stages of it. Where rows have to go elsewhere, the stages are exchanged for others,
under a new version; who goes by an old version cannot say that the batch is done.

A query is forgotten some time after the last word on it, by the cluster's age (``age.py``), never by a wall clock: meta
servers' clocks differ, and a decision that one of them forgets too soon is made a second time with other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import sqlalchemy as sa

from plait.errors import InvalidArgument, MetaBusy, StaleSession, TooLarge
from plait.limits import COMMIT_STAGES_MAX
from plait.meta.cluster_age import ClusterAge
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.schema import COMMITS

_T = TypeVar("_T")

#: (broker group, partition, [(producer of the stage, rows)]).
Stages = list[tuple[str, str, list[tuple[int, int]]]]
#: Attempts that were called off and are remembered, the newest: their own decision may still be under way.
VETOES_MAX: Final = 16
#: Before the first batch of a query.
NO_BATCH: Final = -1


class BatchDecision(msgspec.Struct, frozen=True):
    """The last batch of a query that was decided."""

    query: str
    batch: int
    version: int
    stages: Stages
    #: It is published.
    done: bool


class _Body(msgspec.Struct):
    stages: Stages = []
    #: One producer of each attempt that was called off.
    vetoed: list[int] = []
    #: Where stages were exchanged: the producers that the batch was decided with. Its driver knows those alone.
    decided: list[int] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


class Commits:
    """See the module. Every call is one transaction."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._age = ClusterAge(core.clock)

    def decide(self, query: str, batch: int, stages: Stages) -> BatchDecision:
        """The batch is committed with these stages, unless one is already, or an earlier one is not done yet.

        What stands afterwards: the same batch, a later one, or the earlier one that has to be done first.
        ``StaleSession``: this attempt was called off.
        """
        _check(stages)
        if batch < 0:
            raise InvalidArgument(f"batch {batch} is not possible; batches count from 0")

        def decide(connection: sa.Connection, age: int) -> BatchDecision:
            known, body = _find(connection, query)
            if known is not None and (known.batch >= batch or not known.done):
                return known
            if any(producer in body.vetoed for producer in _producers(stages)):
                raise StaleSession(f"batch {batch} of query {query} was called off by its driver; it writes it again")
            decision = BatchDecision(query, batch, 1 if known is None else known.version + 1, stages, not stages)
            self._put(connection, age, decision, _Body(stages, body.vetoed), new=known is None)
            return decision

        return self._carry_out(decide)

    def veto(self, query: str, batch: int, producer: int) -> BatchDecision | None:
        """The attempt that this producer belongs to was called off: it will not be decided.

        The decision, if there is one for it already: then it counts.
        """

        def veto(connection: sa.Connection, age: int) -> BatchDecision | None:
            known, body = _find(connection, query)
            if known is not None and (producer in body.decided or producer in _producers(known.stages)):
                return known
            body.vetoed = [*body.vetoed, producer][-VETOES_MAX:]
            if known is not None and not known.done:
                row = sa.update(COMMITS).where(COMMITS.c.query == query)
                connection.execute(row.values(body=_encoder.encode(body)))
            else:
                none_yet = BatchDecision(query, NO_BATCH, 0, [], True)
                self._put(connection, age, known or none_yet, body, new=known is None)
            return None

        return self._carry_out(veto)

    def exchange(self, query: str, batch: int, version: int, stages: Stages) -> BatchDecision | None:
        """The batch's rows that are not published are in these stages now.

        None: it is not decided in that version, or it is done. Who asks again, as an answer was lost, is told the same.
        """
        _check(stages)

        def exchange(connection: sa.Connection, age: int) -> BatchDecision | None:
            known, body = _find(connection, query)
            if known is not None and (known.batch, known.version, known.stages) == (batch, version + 1, stages):
                return known
            if known is None or (known.batch, known.version, known.done) != (batch, version, False):
                return None
            decision = BatchDecision(query, batch, version + 1, stages, False)
            decided = body.decided or _producers(known.stages)
            self._put(connection, age, decision, _Body(stages, body.vetoed, decided), new=False)
            return decision

        return self._carry_out(exchange)

    def done(self, query: str, batch: int, version: int) -> bool:
        """The batch is published; False: other stages have to be."""

        def done(connection: sa.Connection, age: int) -> bool:
            known, body = _find(connection, query)
            if known is None or known.batch > batch:
                return True
            if (known.batch, known.version) != (batch, version):
                return False
            self._put(connection, age, msgspec.structs.replace(known, done=True), body, new=False)
            return True

        return self._carry_out(done)

    def undone(self, limit: int, after: str = "") -> list[BatchDecision]:
        """Batches that were decided a while ago and are not done: their drivers are gone, or in trouble.

        Of the queries behind ``after``, by name: who has seen the last one of a page asks for what is behind it.
        """

        def undone(connection: sa.Connection, age: int) -> list[BatchDecision]:
            late = age - int(self._core.limits.commit_late_seconds)
            statement = sa.select(COMMITS.c.query).where(
                ~COMMITS.c.done, COMMITS.c.time < late, COMMITS.c.query > after
            )
            queries = connection.execute(statement.order_by(COMMITS.c.query).limit(limit)).scalars().all()
            found = [_find(connection, query)[0] for query in queries]
            return [decision for decision in found if decision is not None]

        return self._carry_out(undone)

    def _put(self, connection: sa.Connection, age: int, decision: BatchDecision, body: _Body, *, new: bool) -> None:
        values = {
            "batch": decision.batch,
            "version": decision.version,
            "done": decision.done,
            "time": age,
            "body": _encoder.encode(body),
        }
        if new:
            connection.execute(sa.insert(COMMITS).values(query=decision.query, **values))
        else:
            connection.execute(sa.update(COMMITS).where(COMMITS.c.query == decision.query).values(**values))

    def _carry_out(self, call: Callable[[sa.Connection, int], _T]) -> _T:
        for _ in range(self._core.limits.attempts):
            try:
                with self._core.noted(), self._core.store.database.writing() as connection:
                    age = self._age.advance(connection)
                    # First: a decision that is too old is not returned.
                    old = age - int(self._core.limits.commit_seconds)
                    connection.execute(sa.delete(COMMITS).where(COMMITS.c.time < old))
                    return call(connection, age)
            except ConcurrentChange:
                # Somebody else made the row.
                continue
        raise MetaBusy(f"others committed the same batch {self._core.limits.attempts} times; ask again")


def _find(connection: sa.Connection, query: str) -> tuple[BatchDecision | None, _Body]:
    """What is known of a query; nobody else changes it before this transaction ends."""
    columns = (COMMITS.c.batch, COMMITS.c.version, COMMITS.c.done, COMMITS.c.body)
    row = connection.execute(sa.select(*columns).where(COMMITS.c.query == query).with_for_update()).first()
    if row is None:
        return None, _Body()
    body = _decoder.decode(row.body)
    return BatchDecision(query, row.batch, row.version, body.stages, row.done), body


def _producers(stages: Stages) -> list[int]:
    return [producer for _, _, each in stages for producer, _ in each]


def _check(stages: Stages) -> None:
    count = len(_producers(stages))
    if count > COMMIT_STAGES_MAX:
        raise TooLarge(
            f"a batch of {count} stages is over the limit of {COMMIT_STAGES_MAX}: a task has one for each partition "
            "that its rows are for; write with fewer tasks, as with coalesce()"
        )
