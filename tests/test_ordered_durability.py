"""A cluster of real processes under fire keeps every key in order; the long form is tests/deep/test_ordered.py."""

from __future__ import annotations

from pathlib import Path

from tests.support.ordered_chaos import Chaos


async def test_ordered_messages_keep_their_order_while_everything_fails(tmp_path: Path, seed: int):
    chaos = Chaos(tmp_path, seed, seconds=15.0)
    await chaos.run()
    print(len(chaos.sink.written), chaos.sink.handovers, chaos.sink.refused, chaos.sink.repeated)
