"""The identity of a data directory."""

from __future__ import annotations

import random
import re

import pytest

from plait.errors import DataDirError
from plait.storage.directory_id import PATH, identity
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk


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
    disk.flip_bit(PATH, 3, 7)
    with pytest.raises(DataDirError, match=r"identity in the data directory is damaged.*archive's manifest"):
        identity(disk)
