"""Random operations and crashes on a simulated outbox: nothing is lost, stored twice or out of order."""

from __future__ import annotations

import pytest

from tests.outbox.relay_world import LEASE_SECONDS, RELAYS, RelayWorld

RUNS = 200
#: Runs of one test, so that several processes can share them.
SHARE = 25


@pytest.mark.parametrize("first", range(0, RUNS, SHARE))
def test_relays_keep_the_promises_in_simulated_runs(seed: int, first: int) -> None:
    for number in range(first, first + SHARE):
        RelayWorld(seed * 1_000 + number).run()


class SlowDatabase(RelayWorld):
    """One relay, whose transactions take longer than its lease."""

    async def _drive(self) -> None:
        for name in RELAYS[1:]:
            self.simulation.process(name).kill()
        self.database_seconds = 5 * LEASE_SECONDS
        for _ in range(self._steps):
            self._begin()
            self._commit()
            await self.simulation.sleep(0.1)
        while self._left():
            await self.simulation.sleep(0.5)
        with self._engine.connect() as connection:
            lease = self._outbox._store.lease(connection)
        assert lease is not None
        assert lease.epoch == 1


@pytest.mark.timeout(60)
def test_transactions_that_take_longer_than_the_lease_end_no_term() -> None:
    SlowDatabase(1).run()


@pytest.mark.deep("outbox")
def test_relays_keep_the_promises_in_many_more_runs(seed: int) -> None:
    for number in range(2_000):
        RelayWorld(seed * 10_000 + number, steps=150).run()
