"""The cluster's age: a clock in seconds that all meta servers share and that only elapsed time can advance.

Wall clocks of meta servers differ: one may be a month ahead, another may start in 1970. Retention times in the meta
database are therefore never compared with a wall clock. The age is a number in the database. A meta server that has
seen the same number for some seconds of its own monotonic clock adds these seconds by compare-and-set. Of several meta
servers only one succeeds, and the seconds that it adds have passed since the number was written. So the age never runs
faster than real time. It runs slower if meta servers restart before one of them advances it. Records are then kept
longer.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from plait.clock import Clock
from plait.meta.database.schema import CLUSTER

_NAME: Final = "age"
#: The age advances by at least this much at a time, because each addition writes a row.
STEP_SECONDS: Final = 10


class ClusterAge:
    """One meta server's observation of the age."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: The last age, and the monotonic time at which this server first saw it.
        self._seen: tuple[int, float] | None = None

    def advance(self, connection: sa.Connection) -> int:
        """Advance the age within the transaction of ``connection``; return it in seconds."""
        asked = self._clock.monotonic()
        age = connection.execute(sa.select(CLUSTER.c.number).where(CLUSTER.c.name == _NAME)).scalar()
        if age is None:
            connection.execute(sa.insert(CLUSTER).values(name=_NAME, number=0, text=""))
            age = 0
        if self._seen is None or self._seen[0] != age:
            self._seen = (age, self._clock.monotonic())
            return age
        passed = int(asked - self._seen[1])
        if passed < STEP_SECONDS:
            return age
        row = sa.update(CLUSTER).where(CLUSTER.c.name == _NAME, CLUSTER.c.number == age)
        if connection.execute(row.values(number=age + passed)).rowcount:
            age += passed
            self._seen = (age, asked)
        return age
