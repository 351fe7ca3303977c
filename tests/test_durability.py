"""A server process is killed under load: acknowledged messages are stored exactly once and unchanged.

tests/deep/test_durability.py runs longer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from plait.limits import FRAME_SIZE_MAX, KIB
from tests.support.durability import Load
from tests.support.process import ServerProcess

FLUSHES = ("async", "sync")
#: Frequent checkpoints and new segments, so that kills hit partly written ones.
TIGHT: dict[str, Any] = {
    "message_segment_size": FRAME_SIZE_MAX,
    "action_segment_size": 64 * KIB,
    "checkpoint_seconds": 0.0,
    "checkpoint_bytes": 64 * KIB,
}


@pytest.mark.parametrize(("settings", "count"), [(None, 3), (TIGHT, 2)], ids=["serve", "tight"])
async def test_a_killed_server_keeps_its_promises(
    tmp_path: Path, seed: int, settings: dict[str, Any] | None, count: int
):
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        server.start()
        async with Load(server, random.Random(seed)) as load:
            for number in range(count):
                await load.cycle(FLUSHES[(number + 1) % 2])
        assert load.restarts == count
        assert all(load.acknowledged.values())
