"""Recovery of a log after a stop: valid frames, damage, torn tails (R18)."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import QUARANTINE, SECTOR_SIZE, Damage, LogScan, settle
from plait.storage.logs.segment import segment_name
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.storage.frames import (
    DIRECTORY,
    SEGMENT_SIZE,
    append,
    body_of,
    frame,
    open_log,
    overwrite,
    scan,
    some_bodies,
    written,
)


def quarantined(disk: SimulatedDisk) -> dict[str, bytes]:
    return {name: disk.read(f"{QUARANTINE}/{name}") for name in disk.list(QUARANTINE)}


def kinds(found: LogScan) -> list[tuple[int, str]]:
    return [(damage.offset, damage.kind) for damage in found.damages]


def log_bytes(disk: SimulatedDisk, offset: int, size: int) -> bytes:
    base = offset - offset % SEGMENT_SIZE
    return disk.read(f"{DIRECTORY}/{segment_name(base)}")[offset - base :][:size]


# --- torn tails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8, 79, 80, 100, 180])
def test_a_partly_written_frame_is_cut_and_copied_to_quarantine(size: int):
    disk, log, offsets = written(some_bodies(3))
    torn = log_bytes(disk, offsets[2], size)
    overwrite(disk, offsets[2] + size, bytes(log.end - offsets[2] - size))
    again, found, read = scan(disk)
    assert read == some_bodies(3)[:2]
    assert kinds(found) == [(offsets[2], "torn")]
    assert again.end == offsets[2]
    assert not any(log_bytes(disk, offsets[2], SEGMENT_SIZE))
    ((name, kept),) = quarantined(disk).items()
    assert name == f"message-{offsets[2]:020d}-torn"
    assert kept.rstrip(b"\0") == torn.rstrip(b"\0")


def test_bytes_in_unused_space_are_a_torn_tail():
    disk, log, _ = written(some_bodies(3))
    overwrite(disk, log.end + 1000, b"\x01")
    _, found, read = scan(disk)
    assert read == some_bodies(3)
    assert kinds(found) == [(log.end, "torn")]
    assert not any(log_bytes(disk, log.end, SEGMENT_SIZE))


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 4, 30, 50, 70, 85, 120, 150])
def test_a_bad_frame_before_a_valid_one_is_damage_and_stays_in_place(position: int):
    disk, log, offsets = written(some_bodies(3))
    before = disk.read(f"{DIRECTORY}/{segment_name(0)}")
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[1] + position, 2)
    rotten = disk.read(f"{DIRECTORY}/{segment_name(0)}")
    assert rotten != before
    again, found, read = scan(disk)
    assert read == [some_bodies(3)[0], some_bodies(3)[2]]
    size = offsets[2] - offsets[1]
    assert [(d.offset, d.size, d.kind) for d in found.damages] == [(offsets[1], size, "damaged")]
    assert disk.read(f"{DIRECTORY}/{segment_name(0)}") == rotten
    assert quarantined(disk) == {f"message-{offsets[1]:020d}-damaged": rotten[offsets[1] : offsets[2]]}
    assert again.end == log.end


def test_a_bad_frame_at_the_end_of_a_segment_before_a_valid_one_in_the_next_is_damage():
    bodies = some_bodies(5, 1000)
    disk, _, offsets = written(bodies)
    assert offsets[3] == SEGMENT_SIZE
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[2] + 200, 0)
    _, found, read = scan(disk)
    assert read == [*bodies[:2], *bodies[3:]]
    assert kinds(found) == [(offsets[2], "damaged")]


def test_several_bad_frames_in_a_row_are_all_reported_and_the_rest_is_read():
    bodies = some_bodies(6)
    disk, _, offsets = written(bodies)
    for number, position in ((1, 90), (2, 0), (4, 100)):
        disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[number] + position, 1)
    _, found, read = scan(disk)
    assert read == [bodies[0], bodies[3], bodies[5]]
    assert kinds(found) == [(offsets[1], "damaged"), (offsets[2], "damaged"), (offsets[4], "damaged")]


def test_nothing_below_a_durable_offset_is_ever_cut():
    bodies = some_bodies(3)
    disk, log, offsets = written(bodies)
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[2] + 100, 0)
    rotten = disk.read(f"{DIRECTORY}/{segment_name(0)}")
    again, found, read = scan(disk, durable=log.end)
    assert read == bodies[:2]
    assert kinds(found) == [(offsets[2], "damaged")]
    assert disk.read(f"{DIRECTORY}/{segment_name(0)}") == rotten
    assert again.end == log.end


def test_a_later_header_proves_what_was_durable():
    disk = SimulatedDisk()
    log = open_log(disk)
    offsets = append(log, *some_bodies(2))
    log.sync()
    offsets += append(log, b"proof")
    log.sync()
    overwrite(disk, offsets[0], bytes(offsets[2] - offsets[0]))
    _, found, read = scan(disk)
    assert read == [b"proof"]
    assert kinds(found) == [(offsets[0], "damaged")]


def test_a_bad_region_across_the_durable_offset_is_cut_from_there_on():
    disk, log, offsets = written(some_bodies(4))
    overwrite(disk, offsets[1], b"\xff" * (log.end - offsets[1]))
    again, found, read = scan(disk, durable=offsets[2])
    assert read == some_bodies(4)[:1]
    assert [(d.offset, d.size, d.kind) for d in found.damages] == [
        (offsets[1], offsets[2] - offsets[1], "damaged"),
        (offsets[2], log.end - offsets[2], "torn"),
    ]
    assert again.end == offsets[2]


def test_durable_bytes_that_are_gone_are_reported_and_their_offsets_not_used_again():
    disk, log, offsets = written(some_bodies(3))
    overwrite(disk, offsets[1], bytes(log.end - offsets[1]))
    again, found, read = scan(disk, durable=log.end)
    assert read == some_bodies(3)[:1]
    assert found.damages == [
        Damage(DIRECTORY, offsets[1], log.end - offsets[1], "damaged", "durable bytes are missing")
    ]
    assert append(again, b"new") == [log.end]


# --- a power loss is not damage ------------------------------------------------------------------


def test_valid_frames_after_a_missing_sector_belong_to_the_torn_tail():
    bodies = some_bodies(5, 700)
    disk, _, offsets = written(bodies)
    lost = offsets[2] - offsets[2] % SECTOR_SIZE + SECTOR_SIZE
    overwrite(disk, lost, bytes(SECTOR_SIZE))
    again, found, read = scan(disk)
    assert read == bodies[:2]
    assert again.end == offsets[2]
    assert {kind for _, kind in kinds(found)} == {"torn"}
    assert any(bodies[4] in kept for kept in quarantined(disk).values())


def half_zeroed() -> tuple[SimulatedDisk, list[int], list[bytes]]:
    """A bad frame, then a frame with a missing sector: a cut at the bad frame was interrupted."""
    bodies = [b"stays", b"x" * 200, b"y" * 700]
    disk, _, offsets = written(bodies)
    overwrite(disk, offsets[1] + 150, bytes(40))
    overwrite(disk, offsets[2] - offsets[2] % SECTOR_SIZE + SECTOR_SIZE, bytes(SEGMENT_SIZE - 2 * SECTOR_SIZE))
    return disk, offsets, bodies


def test_a_bad_frame_right_before_a_torn_tail_is_part_of_it():
    disk, offsets, bodies = half_zeroed()
    again, found, read = scan(disk)
    assert read == bodies[:1]
    assert kinds(found) == [(offsets[1], "torn")]
    assert again.end == offsets[1]
    _, found, read = scan(disk)
    assert found.damages == []


def test_a_durable_bad_frame_right_before_a_torn_tail_is_damage():
    disk, offsets, bodies = half_zeroed()
    again, found, read = scan(disk, durable=offsets[2])
    assert read == bodies[:1]
    assert kinds(found) == [(offsets[1], "damaged"), (offsets[2], "torn")]
    assert again.end == offsets[2]


def test_a_missing_sector_below_a_durable_offset_is_damage():
    disk = SimulatedDisk()
    log = open_log(disk)
    bodies = some_bodies(4, 700)
    offsets = append(log, *bodies[:2])
    log.sync()
    offsets += append(log, *bodies[2:])
    log.sync()
    overwrite(disk, SECTOR_SIZE, bytes(SECTOR_SIZE))
    _, found, read = scan(disk)
    assert read == bodies[2:]
    assert {kind for _, kind in kinds(found)} == {"damaged"}


def two_segments() -> tuple[SimulatedDisk, Log, list[int], list[bytes]]:
    """Frames in two segments, written in one turn; the header of the second names the end of the first."""
    disk = SimulatedDisk()
    log = open_log(disk)
    log.on_segment = lambda previous_end: [frame(b"head", previous_end=previous_end)]
    bodies = some_bodies(5, 1000)
    offsets = append(log, *bodies, durable=0)
    log.sync()
    return disk, log, offsets, bodies


def test_a_segment_whose_predecessor_lost_its_end_is_part_of_the_torn_tail():
    disk, _, offsets, bodies = two_segments()
    overwrite(disk, offsets[2], bytes(SEGMENT_SIZE - offsets[2]))
    again, found, read = scan(disk)
    assert read == [b"head", *bodies[:2]]
    assert kinds(found) == [(SEGMENT_SIZE, "torn")]
    assert disk.list(DIRECTORY) == [segment_name(0)]
    assert again.end == offsets[2]
    append(again, b"new")
    again.sync()
    _, found, read = scan(disk)
    assert read == [b"head", *bodies[:2], b"new"]
    assert found.damages == []


def test_a_predecessor_that_lost_durable_bytes_is_damaged():
    disk, log, offsets, bodies = two_segments()
    overwrite(disk, offsets[2], bytes(SEGMENT_SIZE - offsets[2]))
    _, found, read = scan(disk, durable=log.end)
    assert read == [b"head", *bodies[:2], b"head", *bodies[3:]]
    assert [(d.offset, d.kind, d.reason) for d in found.damages] == [
        (offsets[2], "damaged", "durable bytes are missing")
    ]


def test_a_bad_frame_at_the_end_of_a_segment_is_damage_whatever_the_next_header_names():
    disk, _, offsets, bodies = two_segments()
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[2] + 500, 1)
    _, found, read = scan(disk)
    assert read == [b"head", *bodies[:2], b"head", *bodies[3:]]
    assert kinds(found) == [(offsets[2], "damaged")]


@given(
    st.lists(st.tuples(st.integers(1, 1500), st.sampled_from(["append", "write", "sync"])), min_size=1, max_size=25),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_a_power_loss_leaves_a_prefix_with_everything_durable(steps: list[tuple[int, str]], seed: int):
    disk = SimulatedDisk()
    log = open_log(disk)
    log.on_segment = lambda previous_end: [frame(b"head", durable=log.durable, previous_end=previous_end)]
    bodies: list[bytes] = []
    ends: list[int] = []
    for number, (size, then) in enumerate(steps):
        bodies.append(f"{number}:".encode() + random.Random(number).randbytes(size))
        append(log, bodies[-1])
        ends.append(log.end)
        if then == "write":
            log.write()
        elif then == "sync":
            log.sync()
    certain = sum(end <= log.durable for end in ends)
    after = disk.after_crash(random.Random(seed))
    again, found, read = scan(after)
    read = [body for body in read if body != b"head"]
    assert read == bodies[: len(read)]
    assert len(read) >= certain
    assert all(damage.kind == "torn" for damage in found.damages)
    append(again, b"new")
    again.sync()
    assert [body for body in scan(after)[2] if body != b"head"] == [*read, b"new"]


@given(st.integers(0, 2**32), st.integers(0, 25), st.integers(0, 4000))
@settings(max_examples=100, deadline=None)
def test_an_interrupted_recovery_is_repeated(seed: int, operation: int, byte: int):
    rng = random.Random(seed)
    disk, log, _offsets = written(some_bodies(2, 700))
    expected = some_bodies(2, 700)
    append(log, *some_bodies(8, 900, seed=2), durable=0)
    log.write()
    left = disk.after_crash(rng)
    whole = scan(left.copy())[2]
    left.crash_at(operation, byte)
    try:
        scan(left)
    except SimulatedCrash:
        pass
    left = left.after_crash(rng)
    read = scan(left)[2]
    assert read[:2] == expected
    assert read == whole


@pytest.mark.parametrize("byte", range(0, 1000, 72))
def test_an_interrupted_cut_zeroes_the_bad_frame_last(byte: int):
    """The bad frame is the first frame of a segment, which names missing bytes before it."""
    bodies = [b"x" * 700, b"y" * 100, b"z" * 100]
    for operation in range(10):
        disk, log, offsets = written(bodies)
        disk.crash_at(disk.operations + operation, byte)
        with suppress(SimulatedCrash):
            log.zero_from(0)
        left = disk.copy().read(f"{DIRECTORY}/{segment_name(0)}")
        assert intact(left, offsets[0]) or not any(intact(left, offset) for offset in offsets[1:])


def intact(data: bytes, offset: int) -> bool:
    try:
        return FrameView(data, offset).verify().count > 0
    except FrameError:
        return False


# --- frames inside frames ------------------------------------------------------------------------


def test_a_frame_in_the_body_of_a_damaged_frame_is_not_read_as_a_frame_of_the_log():
    inner = frame(b"inner", epoch=9).tobytes()
    disk, _, offsets = written([b"first", inner + b"end", b"last"])
    start = log_bytes(disk, 0, SEGMENT_SIZE).find(inner)
    assert start % 8 == 0
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", start + len(inner) + 1, 0)
    _, found, read = scan(disk)
    assert read == [b"first", b"last"]
    assert kinds(found) == [(offsets[1], "damaged")]


def test_a_frame_found_by_search_has_to_be_plausible():
    inner = frame(b"inner", epoch=9).tobytes()
    disk, _, offsets = written([b"first", inner + b"end", b"last"])
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[1], 0)
    log = open_log(disk)
    asked: list[int] = []

    def plausible(offset: int, view: FrameView) -> bool:
        asked.append(offset)
        return view.epoch == 1

    found = LogScan(log, 0, plausible=plausible)
    assert [body_of(view) for _, view in found] == [b"first", b"last"]
    assert len(asked) == 2


# --- quarantine ----------------------------------------------------------------------------------


def test_an_unfinished_copy_is_made_again():
    disk, _log, offsets = written(some_bodies(3))
    disk.flip_bit(f"{DIRECTORY}/{segment_name(0)}", offsets[1] + 100, 0)
    disk.make_directory(QUARANTINE)
    disk.open(f"{QUARANTINE}/new", create=True).write([b"half of anoth"], 0)
    scan(disk)
    rotten = log_bytes(disk, offsets[1], offsets[2] - offsets[1])
    assert quarantined(disk) == {f"message-{offsets[1]:020d}-damaged": rotten}
    before = disk.operations
    scan(disk)
    assert quarantined(disk) == {f"message-{offsets[1]:020d}-damaged": rotten}
    # The frames are written again, because nothing proves them durable; then the segment and its directory are synced.
    assert disk.operations == before + 3


def test_two_tails_cut_at_the_same_offset_are_both_in_quarantine():
    disk, _log, offsets = written(some_bodies(3))
    overwrite(disk, offsets[2] + 90, bytes(100))
    again, _, _ = scan(disk)
    append(again, b"z" * 100)
    again.sync()
    overwrite(disk, offsets[2] + 88, bytes(100))
    scan(disk)
    name = f"message-{offsets[2]:020d}-torn"
    assert sorted(quarantined(disk)) == [name, f"{name}.1"]


def test_a_tail_over_several_segments_is_copied_to_quarantine_in_full():
    bodies = some_bodies(12, 1000)
    disk, _, offsets = written(bodies)
    overwrite(disk, offsets[1], bytes(SECTOR_SIZE))
    _, _found, read = scan(disk)
    assert read == bodies[:1]
    kept = b"".join(data for _, data in sorted(quarantined(disk).items()))
    assert all(body in kept for body in bodies[2:])
    assert disk.list(DIRECTORY) == [segment_name(0)]


# --- reading a log that depends on another --------------------------------------------------------


def test_the_reader_may_refuse_a_frame_and_all_later_ones():
    bodies = some_bodies(9, 1000)
    disk, _, offsets = written(bodies)
    log = open_log(disk)
    found = LogScan(log, 0, stamps_durable=False)
    read = []
    for offset, view in found:
        if offset == offsets[4]:
            found.stop_before(offset, "depends on lost messages")
            break
        read.append(body_of(view))
    settle(disk, log, found)
    assert read == bodies[:4]
    assert log.end == offsets[4]
    assert {(d.kind, d.reason) for d in found.damages} == {("torn", "depends on lost messages")}
    assert scan(disk)[2] == bodies[:4]
