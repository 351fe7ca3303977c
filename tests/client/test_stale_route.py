"""A partition's number is believed only in the epoch that gave it."""

from __future__ import annotations

from pathlib import Path

import plait
from plait.server import Server
from plait.storage.disk import RealDisk


async def test_a_number_that_went_to_another_subject_is_not_used_again(tmp_path: Path) -> None:
    first = Server(RealDisk(tmp_path / "first"), port=0)
    await first.start()
    async with plait.connect(first.address) as client:
        await client.send("mine", b"before")
        await first.stop()
        # A broker that lost the moments in which "mine" was made: its number is another subject's.
        second = Server(RealDisk(tmp_path / "second"), port=first.port)
        await second.start()
        second.broker.epoch += 1
        second.broker.partition_of("another")
        receipt = await client.send("mine", b"after")
        assert receipt.partition.name == "mine"
        assert second.broker.subjects["another"].next == 0
        assert second.broker.subjects["mine"].next == 1
    await second.stop()
