"""Long runs of the crash explorer: every byte of every write, and many traces."""

from __future__ import annotations

import pytest

from tests.support.broker_explorer import Explorer, Survive, either, every_byte, kill, power_loss
from tests.support.deep import Cycles

#: The flush mode, the kind of crash, and whether everything acknowledged must survive it.
MODES: list[tuple[str, Survive, bool]] = [
    ("sync", power_loss, True),
    ("async", power_loss, False),
    ("sync", kill, True),
    ("async", kill, True),
]
#: The test is split into this many parts, which together crash at every byte.
PARTS = 10


@pytest.mark.deep("crash")
def test_every_byte_of_every_write_is_a_crash_point(seed: int, cycles: Cycles):
    for number in cycles(PARTS * len(MODES)):
        part, mode = divmod(number, len(MODES))
        flush, survive, all_written = MODES[mode]
        explorer = Explorer(seed, flush, survive, bytes_of=every_byte, all_written=all_written, every=PARTS, first=part)
        explorer.run()
        assert explorer.crashes > 1_000
        assert explorer.failed_syncs > 80


@pytest.mark.deep("crash")
def test_many_lives_are_survived(seed: int, cycles: Cycles):
    for number in cycles(200):
        flush, survive, all_written = MODES[number % len(MODES)]
        if flush == "sync":
            survive = either
        explorer = Explorer(seed + number, flush, survive, all_written=all_written, operations=300)
        explorer.run()
        assert explorer.crashes > 1_000
        assert explorer.failed_syncs > 80
