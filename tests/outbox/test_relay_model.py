"""Random operations and crashes on a simulated outbox: nothing is lost, stored twice or out of order."""

from __future__ import annotations

import pytest

from tests.outbox.relay_world import RelayWorld

RUNS = 200
#: Runs of one test, so that several processes can share them.
SHARE = 25


@pytest.mark.parametrize("first", range(0, RUNS, SHARE))
def test_relays_keep_the_promises_in_simulated_runs(seed: int, first: int) -> None:
    for number in range(first, first + SHARE):
        RelayWorld(seed * 1_000 + number).run()


@pytest.mark.deep("outbox")
def test_relays_keep_the_promises_in_many_more_runs(seed: int) -> None:
    for number in range(2_000):
        RelayWorld(seed * 10_000 + number, steps=150).run()
