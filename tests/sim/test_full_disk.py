"""When the disk of a server is full, errors name the cause, and a deletion or a shorter retention frees space soon."""

from __future__ import annotations

import logging

import msgspec
import pytest

import plait
from plait.broker import BrokerConfig
from plait.limits import MIB
from plait.testing.sim import Simulation
from plait.testing.simulated_disk import SimulatedDisk
from tests.sim.cluster import ADDRESS, serve

CAPACITY = 24 * MIB
CONFIG = BrokerConfig(
    message_segment_size=4 * MIB,
    action_segment_size=1 * MIB,
    retained_segment_size=1 * MIB,
    disk_used_max=0.9,
    disk_free_min=2 * MIB,
)


async def fill(client: plait.Client, subject: str) -> plait.DiskFull:
    for _ in range(1000):
        try:
            await client.send(subject, bytes(100_000))
        except plait.DiskFull as error:
            return error
    raise AssertionError("the disk did not fill up")


class Full:
    """A simulated server on a disk of 24 MiB."""

    def __init__(self, simulation: Simulation, **settings: object) -> None:
        self.sim = simulation
        config = msgspec.structs.replace(CONFIG, **settings)
        self.process = simulation.process("server", lambda process: serve(process, config))
        self.process.disk = SimulatedDisk(capacity=CAPACITY)
        self.process.start()

    @property
    def used(self) -> int:
        free, total = self.process.disk.space()
        return total - free

    async def until_used(self, size: int) -> None:
        """Wait until this much is used at most, for a minute."""
        begun = self.sim.now
        while self.used > size:
            await self.sim.sleep(1.0)
            assert self.sim.now - begun < 60, f"{self.used >> 20} MiB are still used"


def test_deleting_the_subject_that_filled_the_disk_frees_it_within_a_minute(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "plait")
    with Simulation(1) as sim:
        full = Full(sim)

        async def main() -> None:
            async with plait.connect(ADDRESS, client_id="c") as client:
                error = await fill(client, "big")
                assert "% full (watermark 90%)" in str(error)
                assert "plait subject set" in str(error), "the error names the command that frees space"
                with pytest.raises(plait.DiskFull):
                    await client.send("another", b"x")
                await sim.sleep(20.0)
                assert full.used > 0.85 * CAPACITY
                await client.admin.delete_subject("big")
                await full.until_used(4 * MIB)
                await sim.sleep(2.0)
                await client.send("another", b"room again")

        sim.run(main())
    logged = [record.message for record in caplog.records if "full" in record.message or "space" in record.message]
    assert len(logged) == 2, "the disk is full, and there is space again: once each"


def test_a_shorter_retention_frees_the_disk_within_a_minute():
    with Simulation(2) as sim:
        full = Full(sim)

        async def main() -> None:
            async with plait.connect(ADDRESS, client_id="c") as client:
                await fill(client, "big")
                await sim.sleep(30.0)
                info = await client.admin.set_subject("big", retention=10)
                assert info.retention_seconds == 10
                await full.until_used(4 * MIB)

        sim.run(main())


def test_a_smaller_retention_size_frees_the_disk_within_a_minute_and_keeps_the_newest():
    with Simulation(3) as sim:
        full = Full(sim)

        async def main() -> None:
            async with plait.connect(ADDRESS, client_id="c") as client:
                await fill(client, "big")
                await client.admin.set_subject("big", retention_bytes=3 * MIB)
                await full.until_used(12 * MIB)
                async with client.reader("big", start="earliest") as reader:
                    found = 0
                    while batch := await reader.fetch(1000, wait=0):
                        found += len(batch)
                    assert found == 31

        sim.run(main())


def test_a_server_without_messages_uses_little_space_and_so_does_the_first_message():
    with Simulation(4) as sim:
        full = Full(sim, message_segment_size=16 * MIB)

        async def main() -> None:
            async with plait.connect(ADDRESS, client_id="c") as client:
                await client.send("s", b"the first")
                await sim.sleep(5.0)
                assert full.used < 4 * MIB, "segments of 16, 1 and 1 MiB"

        sim.run(main())
