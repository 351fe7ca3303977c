"""The archive mark of a data directory."""

from __future__ import annotations

import pytest

from plait.storage.archive_mark import PATH, ArchiveMark, read_archived, write_archived
from plait.testing.simulated_disk import SimulatedDisk


def test_a_mark_reads_back_and_survives_a_power_loss():
    disk = SimulatedDisk()
    assert read_archived(disk) == ArchiveMark()
    write_archived(disk, ArchiveMark(100, 50, "/archive", 3))
    assert read_archived(disk.after_crash(None, "none")) == ArchiveMark(100, 50, "/archive", 3)


def test_offsets_never_decrease():
    disk = SimulatedDisk()
    write_archived(disk, ArchiveMark(100, 50, "/a", 3, 20))
    assert write_archived(disk, ArchiveMark(40, 60, "/b", 1, 10)) == ArchiveMark(100, 60, "/b", 1, 20)
    assert read_archived(disk) == ArchiveMark(100, 60, "/b", 1, 20)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"crc": 1, "archived": {"message_offset": 999}}'])
def test_a_damaged_mark_means_that_nothing_is_archived(damage: bytes):
    disk = SimulatedDisk()
    file = disk.open(PATH, create=True)
    file.write([damage], 0)
    file.close()
    assert read_archived(disk) == ArchiveMark()
