"""Fifty kills of a real server under load, and fifty of one with frequent checkpoints and small segments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.deep import Cycles
from tests.support.durability import Load
from tests.support.process import ServerProcess
from tests.test_durability import FLUSHES, TIGHT


@pytest.mark.deep("crash")
@pytest.mark.parametrize("settings", [None, TIGHT], ids=["serve", "tight"])
async def test_a_server_killed_fifty_times_keeps_its_promises(
    tmp_path: Path, seed: int, cycles: Cycles, settings: dict[str, Any] | None
):
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        server.start()
        async with Load(server, random.Random(seed)) as load:
            for number in cycles(50):
                await load.cycle(FLUSHES[(number + 1) % 2])
