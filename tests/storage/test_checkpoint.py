"""A checkpoint is written in full or not at all, and recovery skips a damaged one."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from plait.errors import DataDirError
from plait.storage.checkpoint import DIRECTORY, FORMAT_VERSION, KEEP, CheckpointManifest, Checkpoints, LoadedCheckpoint
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk


def manifest(number: int, **facts: Any) -> CheckpointManifest:
    values: dict[str, Any] = {
        "message_offset": number * 100,
        "action_offset": number * 10,
        "message_end": number * 100,
        "action_end": number * 10,
        "epoch": 1,
        "action_index": number,
        "clean": False,
        "time": number,
        "next_partition": 1,
        "next_group": 1,
        "next_consumer": 1,
        "shards": {},
    }
    return CheckpointManifest(number=number, **{**values, **facts})


def shard(name: str, number: int) -> bytes:
    return f"{name} of checkpoint {number} ".encode() * 60


def write(checkpoints: Checkpoints, number: int, *names: str) -> None:
    checkpoints.write(manifest(number), {name: shard(name, number) for name in names})


def loaded(disk: SimulatedDisk) -> tuple[Checkpoints, LoadedCheckpoint | None]:
    checkpoints = Checkpoints(disk)
    return checkpoints, checkpoints.load()


def contents(disk: SimulatedDisk) -> dict[str, bytes]:
    return {name: disk.read(f"{DIRECTORY}/{name}") for name in disk.list(DIRECTORY)}


def test_a_checkpoint_has_the_unchanged_shards_of_the_one_before():
    disk = SimulatedDisk()
    checkpoints = Checkpoints(disk)
    write(checkpoints, 1, "a", "b")
    write(checkpoints, 2, "b", "c")
    checkpoints.write(manifest(3), {}, dropped=["a"])
    again, found = loaded(disk.after_crash(keep="none"))
    assert found is not None
    assert found.shards == {"b": shard("b", 2), "c": shard("c", 2)}
    assert found.manifest == again.last
    assert found.manifest.message_offset == 300
    assert again.rejected == []


def test_r1_only_changed_shards_are_written():
    disk = SimulatedDisk()
    checkpoints = Checkpoints(disk)
    write(checkpoints, 1, *(f"shard{n}" for n in range(50)))
    writes: list[str] = []
    disk.on_operation = lambda operation, path, size: writes.append(path) if operation == "write" else None
    write(checkpoints, 2, "shard7")
    assert writes == [f"{DIRECTORY}/shard-shard7-000000000002", f"{DIRECTORY}/manifest-000000000002.new"]
    _, found = loaded(disk)
    assert found is not None
    assert found.shards["shard7"] == shard("shard7", 2)
    assert found.shards["shard8"] == shard("shard8", 1)


def trace(disk: SimulatedDisk, made: list[int]) -> None:
    checkpoints = Checkpoints(disk)
    checkpoints.load()
    for number in range(1, 9):
        write(checkpoints, number, "a", f"own{number % 3}")
        made.append(number)


def all_crash_points() -> list[tuple[int, int]]:
    sizes: list[int] = []
    disk = SimulatedDisk(on_operation=lambda operation, path, size: sizes.append(size))
    trace(disk, [])
    points = []
    for operation, size in enumerate(sizes):
        points += [(operation, byte) for byte in {0, 1, 512, size // 2, max(size - 1, 0)} if byte <= size]
    return points


def test_a_crash_at_any_point_leaves_the_last_checkpoint_or_the_one_being_made():
    rng = random.Random(5)
    points = all_crash_points()
    assert len(points) > 150
    for operation, byte in points:
        disk = SimulatedDisk(seed=operation)
        disk.crash_at(operation, byte)
        made: list[int] = []
        with pytest.raises(SimulatedCrash):
            trace(disk, made)
        last = made[-1] if made else 0
        for left in (disk.copy(), disk.after_crash(rng), disk.after_crash(rng)):
            again, found = loaded(left)
            number = found.manifest.number if found else 0
            assert number in (last, last + 1)
            if found:
                assert found.shards["a"] == shard("a", number)
                assert all(data.endswith(b" ") for data in found.shards.values())
            # Later checkpoints can be written.
            write(again, number + 1, "a")
            _, after = loaded(left.after_crash(keep="none"))
            assert after is not None
            assert after.manifest.number == number + 1


def five_and_more() -> SimulatedDisk:
    disk = SimulatedDisk()
    checkpoints = Checkpoints(disk)
    for number in range(1, 8):
        write(checkpoints, number, "a", f"own{number}")
    return disk


def test_the_last_five_are_kept_with_all_their_shards():
    disk = five_and_more()
    assert KEEP == 5
    names = disk.list(DIRECTORY)
    assert [name for name in names if name.startswith("manifest")] == [f"manifest-{n:012d}" for n in range(3, 8)]
    for number in range(7, 2, -1):
        checkpoints, found = loaded(disk)
        assert found is not None
        assert found.manifest.number == number
        assert found.shards == {
            "a": shard("a", number),
            **{f"own{n}": shard(f"own{n}", n) for n in range(1, number + 1)},
        }
        assert checkpoints.oldest is not None
        assert checkpoints.oldest.number == 3
        disk.flip_bit(f"{DIRECTORY}/manifest-{number:012d}", 20, 3)
    assert loaded(disk)[1] is None


@pytest.mark.parametrize("name", ["manifest-000000000007", "shard-a-000000000007", "shard-own7-000000000007"])
def test_after_any_flipped_bit_the_checkpoint_before_is_used(name: str):
    disk = five_and_more()
    size = len(disk.read(f"{DIRECTORY}/{name}"))
    for offset in range(0, size, max(1, size // 60)):
        disk.flip_bit(f"{DIRECTORY}/{name}", offset, offset % 8)
        checkpoints, found = loaded(disk)
        assert found is not None
        assert found.manifest.number == 6
        assert len(checkpoints.rejected) == 1
        assert "manifest-000000000007" in checkpoints.rejected[0]
        disk.flip_bit(f"{DIRECTORY}/{name}", offset, offset % 8)


@pytest.mark.parametrize("name", ["shard-a-000000000007", "shard-own7-000000000007"])
def test_with_a_missing_or_cut_shard_the_checkpoint_before_is_used(name: str):
    disk = five_and_more()
    disk.open(f"{DIRECTORY}/{name}").truncate(10)
    _checkpoints, found = loaded(disk)
    assert found is not None
    assert found.manifest.number == 6
    disk.remove(f"{DIRECTORY}/{name}")
    assert loaded(disk)[1] == found


def test_a_newer_format_is_refused_and_nothing_is_changed():
    disk = five_and_more()
    body = msgspec.msgpack.encode({"version": FORMAT_VERSION + 1, "number": 8, "surprise": True})
    file = disk.open(f"{DIRECTORY}/manifest-000000000008", create=True)
    file.write([b"PLCK" + crc32c(body).to_bytes(4, "little") + body], 0)
    before, operations = contents(disk), disk.operations
    with pytest.raises(
        DataDirError,
        match=f"format version {FORMAT_VERSION + 1}, this Plait reads only version {FORMAT_VERSION}; use",
    ):
        loaded(disk)
    assert contents(disk) == before
    assert disk.operations == operations


def test_a_failed_checkpoint_leaves_the_one_before():
    disk = five_and_more()
    for operation in ("create", "write", "sync", "rename", "sync_directory"):
        checkpoints, _found = loaded(disk)
        disk.fail(operation)  # type: ignore[arg-type]
        with pytest.raises(OSError, match=r"\[Errno 5\]"):
            write(checkpoints, 8, "a")
        assert checkpoints.last is not None
        assert checkpoints.last.number == 7
        _, again = loaded(disk.after_crash(keep="none"))
        assert again is not None
        assert again.manifest.number == 7
        write(checkpoints, 8, "a")
        assert checkpoints.last.number == 8
        disk = five_and_more()
