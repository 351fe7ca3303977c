"""Commits of batches of Spark's sink: each batch is decided once, before any broker publishes its rows (R23).

A query writes batch after batch. A batch that was not finished is written again, perhaps with other rows. For each
query the database has the last decided batch with the stages that hold its rows. A second request for the same batch
gets the first decision, and the rows of the second attempt are discarded. The next batch is decided when the last one
is done, which means published by all brokers that have stages of it. If rows must move to other partitions, the stages
are exchanged under a new version; a request with an older version cannot mark the batch as done.

A query is forgotten ``commit_seconds`` after its last request. This time is measured by the cluster's age
(``ClusterAge``), because the wall clocks of meta servers differ. If a decision were forgotten too soon, the batch
could be decided again with other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import sqlalchemy as sa

from plait.clock import Clock
from plait.errors import InvalidArgument, MetaBusy, StaleSession, TooLarge
from plait.limits import COMMIT_STAGES_MAX
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.schema import CLUSTER, COMMITS
from plait.model import names
from plait.wire.admin.cluster import BatchDecision, Stages

_T = TypeVar("_T")

#: The number of cancelled attempts that are remembered, because their own requests may still arrive.
VETOES_MAX: Final = 16
#: The age advances by at least this much at a time, because each addition writes a row.
STEP_SECONDS: Final = 10
_AGE: Final = "age"
#: The batch number of a query without a decided batch.
NO_BATCH: Final = -1


class _Body(msgspec.Struct):
    stages: Stages = []
    #: One producer of each cancelled attempt.
    vetoed: list[int] = []
    #: After an exchange of stages: the producers of the original decision, because the driver knows only those.
    decided: list[int] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


class ClusterAge:
    """The cluster's age: a clock in seconds that all meta servers share and that only elapsed time can advance.

    Wall clocks of meta servers differ: one may be a month ahead, another may start in 1970. Retention times in the meta
    database are therefore never compared with a wall clock. The age is a number in the database. A meta server that has
    seen the same number for some seconds of its own monotonic clock adds these seconds by compare-and-set. Of several
    meta servers only one succeeds, and the seconds that it adds have passed since the number was written. So the age
    never runs faster than real time. It runs slower if meta servers restart before one of them advances it. Records are
    then kept longer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: The last age, and the monotonic time at which this server first saw it.
        self._seen: tuple[int, float] | None = None

    def advance(self, connection: sa.Connection) -> int:
        """Advance the age within the transaction of ``connection``; return it in seconds."""
        asked = self._clock.monotonic()
        age = connection.execute(sa.select(CLUSTER.c.number).where(CLUSTER.c.name == _AGE)).scalar()
        if age is None:
            connection.execute(sa.insert(CLUSTER).values(name=_AGE, number=0, text=""))
            age = 0
        if self._seen is None or self._seen[0] != age:
            self._seen = (age, self._clock.monotonic())
            return age
        passed = int(asked - self._seen[1])
        if passed < STEP_SECONDS:
            return age
        row = sa.update(CLUSTER).where(CLUSTER.c.name == _AGE, CLUSTER.c.number == age)
        if connection.execute(row.values(number=age + passed)).rowcount:
            age += passed
            self._seen = (age, asked)
        return age


class Commits:
    """Decides batches. Every call is one transaction."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._age = ClusterAge(core.clock)

    def decide(self, query: str, batch: int, stages: Stages) -> BatchDecision:
        """Commit the batch with these stages, unless it is decided already or an earlier batch is not done.

        Returns the decision in force: this batch, a later one, or the earlier one that must be done first. Raises
        ``StaleSession`` if the driver cancelled this attempt.
        """
        names.check("query", query)
        _check(stages)
        if batch < 0:
            raise InvalidArgument(f"batch {batch} of query {query} is invalid; batch numbers start at 0")

        def decide(connection: sa.Connection, age: int) -> BatchDecision:
            known, body = _find(connection, query)
            if known is not None and (known.batch >= batch or not known.done):
                return known
            if any(producer in body.vetoed for producer in _producers(stages)):
                raise StaleSession(
                    f"this attempt at batch {batch} of query {query} was cancelled by its driver, which writes it again"
                )
            decision = BatchDecision(query, batch, 1 if known is None else known.version + 1, stages, not stages)
            self._put(connection, age, decision, _Body(stages, body.vetoed), new=known is None)
            return decision

        return self._carry_out(decide)

    def veto(self, query: str, batch: int, producer: int) -> BatchDecision | None:
        """Cancel the attempt of this producer, so that it cannot be decided any more.

        Returns the decision if the attempt is decided already, in which case it stays in force; otherwise None.
        """
        names.check("query", query)

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
        """Replace the stages of a decided batch: its unpublished rows are in these stages now.

        Returns None if the batch is not decided under that version, or is done. Idempotent, for a reply that was lost.
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
        """Mark the batch as published. Returns False if the version is outdated and other stages must be published."""

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
        """Batches decided more than ``commit_late_seconds`` ago and not done: their drivers failed or are stuck.

        Pages by query name: pass the last query of a page as ``after`` to get the next page.
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
                    # Before the call, so that an expired decision is not returned.
                    old = age - int(self._core.limits.commit_seconds)
                    connection.execute(sa.delete(COMMITS).where(COMMITS.c.time < old))
                    return call(connection, age)
            except ConcurrentChange:
                # Another meta server inserted the row.
                continue
        raise MetaBusy(
            f"{self._core.limits.attempts} attempts conflicted with commits of other meta servers; try again"
        )


def _find(connection: sa.Connection, query: str) -> tuple[BatchDecision | None, _Body]:
    """Read and lock the row of a query until the transaction ends."""
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
            f"a batch has {count} stages, one per task and partition (limit {COMMIT_STAGES_MAX}); "
            "write with fewer tasks, for example with coalesce()"
        )
