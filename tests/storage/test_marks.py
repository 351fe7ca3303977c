"""The identity and the archive mark of a data directory."""

from __future__ import annotations

import random
import re

import pytest

from plait.errors import DataDirError
from plait.storage.marks import ARCHIVED, IDENTITY, ArchiveMark, identity, read_archived, write_archived
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk


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
    file = disk.open(ARCHIVED, create=True)
    file.write([damage], 0)
    file.close()
    assert read_archived(disk) == ArchiveMark()


def test_the_identity_is_generated_once():
    disk = SimulatedDisk()
    name = identity(disk)
    assert re.fullmatch("[0-9a-f]{16}", name)
    assert identity(disk) == name
    assert identity(disk.after_crash(random.Random(1))) == name
    assert identity(SimulatedDisk()) != name


def test_a_crash_while_it_is_generated_leaves_one_identity_or_none():
    operation = 0
    while True:
        disk = SimulatedDisk()
        disk.crash_at(operation)
        try:
            identity(disk)
            break
        except SimulatedCrash:
            pass
        for seed in range(4):
            after = disk.after_crash(random.Random(seed))
            assert identity(after) == identity(after.after_crash(random.Random(seed)))
        operation += 1
    assert operation > 3


def test_a_damaged_identity_is_refused():
    disk = SimulatedDisk()
    identity(disk)
    disk.flip_bit(IDENTITY, 3, 7)
    with pytest.raises(DataDirError, match=r"identity in the data directory is damaged.*archive's manifest"):
        identity(disk)
