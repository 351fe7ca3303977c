"""The cluster's age: seconds that its meta servers have counted together, which nothing but time can advance.

Wall clocks of meta servers differ: one may be a month ahead, another one start in 1970. What has to be kept for some
time is therefore not compared with any of them. The age is a number in the database. A meta server that has seen the
same number for so many seconds of its own monotonic clock may add them, by compare-and-set: of several only one does,
and what it adds has passed since the number was written. So the age is never ahead of the time that has passed; it is
behind where no meta server was asked for a while and restarted since, and then things are kept for longer.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from plait.clock import Clock
from plait.meta.database.schema import CLUSTER

_NAME: Final = "age"
#: Fewer seconds are not added yet: each addition writes a row.
STEP_SECONDS: Final = 10


class ClusterAge:
    """What one meta server has seen of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: The number, and since when on this server's monotonic clock.
        self._seen: tuple[int, float] | None = None

    def advance(self, connection: sa.Connection) -> int:
        """The cluster's age in seconds; part of the transaction."""
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
