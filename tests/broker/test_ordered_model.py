"""The model of ordered groups with all faults at once (``ordered_world``)."""

from __future__ import annotations

import pytest

from tests.broker.ordered_world import World


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("seed", range(6))
def test_keys_are_handled_in_order_once_and_completely(seed: int, flush: str):
    World(seed, flush).run(250)
