"""Appending, segments, durability and space of one log."""

from __future__ import annotations

import errno
import threading

import pytest

from plait.errors import DamageError
from plait.frame.builder import FrameParts
from plait.storage.logs.log import Log, SyncJob
from plait.storage.logs.segment import segment_name
from plait.testing.simulated_disk import SimulatedDisk
from tests.storage.frames import DIRECTORY, SEGMENT_SIZE, append, frame, open_log, scan, some_bodies

# --- appending ----------------------------------------------------------------------------------


def test_nothing_reaches_the_disk_before_write():
    disk = SimulatedDisk()
    log = open_log(disk)
    (offset,) = append(log, b"hello")
    assert log.end > offset == log.written
    assert not any(disk.read(f"{DIRECTORY}/{segment_name(0)}"))
    log.write()
    assert log.written == log.end
    assert b"hello" in disk.read(f"{DIRECTORY}/{segment_name(0)}")


def test_the_appends_of_a_turn_are_one_write():
    disk = SimulatedDisk()
    log = open_log(disk)
    log.place_for(3000)
    before = disk.operations
    append(log, *some_bodies(10))
    log.write()
    assert disk.operations == before + 1
    log.write()
    assert disk.operations == before + 1


def test_blocks_are_zeroed_ahead_of_small_writes_and_only_there():
    disk = SimulatedDisk()
    log = Log(disk, DIRECTORY, 1 << 20, zero_ahead=64 * 1024)
    sizes: list[int] = []
    disk.on_operation = lambda operation, path, size: sizes.append(size) if operation == "write" else None
    for body in some_bodies(3, 1000):
        append(log, body)
        log.write()
    assert sizes[0] > 64 * 1024 > sizes[1] + sizes[2], "the first write zeroes blocks for later ones"
    append(log, b"x" * 100_000)
    log.write()
    assert sizes[3] < 64 * 1024 * 2, "a large write does not zero ahead"
    log.sync()
    assert scan(disk)[2] == [*some_bodies(3, 1000), b"x" * 100_000]


def test_a_frame_that_does_not_fit_starts_the_next_segment():
    disk = SimulatedDisk()
    log = open_log(disk)
    offsets = append(log, *some_bodies(5, 1000))
    assert offsets[3:] == [SEGMENT_SIZE, SEGMENT_SIZE + (offsets[1] - offsets[0])]
    assert disk.list(DIRECTORY) == ["00000000000000000000.log", "00000000000000004096.log"]
    log.sync()
    assert scan(disk)[2] == some_bodies(5, 1000)


def test_a_frame_larger_than_a_segment_gets_one_of_its_size():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, b"small", b"x" * 10_000, b"small")
    log.sync()
    assert scan(disk)[2] == [b"small", b"x" * 10_000, b"small"]
    assert len(disk.list(DIRECTORY)) == 3


def test_a_new_segment_has_room_for_its_header_and_the_next_frame():
    disk = SimulatedDisk()
    log = open_log(disk)
    log.on_segment = lambda previous_end: [frame(b"h" * 2000, previous_end=previous_end)]
    bodies = some_bodies(4, 3000)
    append(log, *bodies)
    log.sync()
    found = scan(disk)[2]
    assert [body for body in found if body != b"h" * 2000] == bodies
    for segment in log.segments:
        assert segment.file.size == segment.size


def test_a_segment_header_gets_the_end_of_the_segment_before():
    disk = SimulatedDisk()
    log = open_log(disk)
    ends: list[int] = []

    def head(previous_end: int) -> list[FrameParts]:
        ends.append(previous_end)
        return []

    log.on_segment = head
    offsets = append(log, *some_bodies(5, 1000))
    assert ends == [0, offsets[2] + (offsets[1] - offsets[0])]


# --- reading ------------------------------------------------------------------------------------


def test_an_offset_outside_all_segments_cannot_be_viewed():
    log = open_log(SimulatedDisk())
    append(log, *some_bodies(5, 1000))
    log.write()
    for offset in (-1, 2 * SEGMENT_SIZE):
        with pytest.raises(DamageError, match=f"no segment contains offset {offset}"):
            log.view(offset, 8)
    with pytest.raises(DamageError, match="exceed the end of their segment"):
        log.view(SEGMENT_SIZE - 8, 16)


# --- durability ---------------------------------------------------------------------------------


def test_overlapping_syncs_each_cover_what_was_written_before_them():
    log = open_log(SimulatedDisk())
    append(log, b"one")
    log.write()
    early = log.begin_sync()
    append(log, b"two")
    log.write()
    late = log.begin_sync()
    late.run()
    log.end_sync(late)
    early.run()
    log.end_sync(early)
    assert log.durable == log.end
    assert log.begin_sync().segments == []


def test_after_a_failed_sync_every_sync_fails():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, b"one")
    log.write()
    disk.fail("sync", path=f"{DIRECTORY}/*")
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        log.sync()
    assert log.durable == 0
    # The system would report success now, although it dropped the dirty pages.
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        log.sync()
    assert log.durable == 0


def test_a_sync_that_waited_for_a_failing_one_fails_too():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, b"one")
    log.write()
    first, second = log.begin_sync(), log.begin_sync()
    begun, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def slow_and_failing(operation: str, path: str, size: int) -> None:
        if operation == "sync":
            calls.append(path)
            begun.set()
            assert go_on.wait(10)
            raise OSError(errno.EIO, "gone")

    disk.on_operation = slow_and_failing
    errors: list[OSError] = []

    def run(job: SyncJob) -> None:
        try:
            job.run()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in (first, second)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [error.errno for error in errors] == [errno.EIO, errno.EIO]
    assert len(calls) == 1


def test_bytes_that_a_killed_process_left_in_the_page_cache_are_durable_once_the_log_resumes():
    disk = SimulatedDisk()
    log = open_log(disk)
    bodies = some_bodies(6, 1000)
    append(log, *bodies)
    log.write()
    killed = disk.copy()
    assert scan(killed)[2] == bodies
    assert scan(killed.after_crash(keep="none"))[2] == bodies


# --- space --------------------------------------------------------------------------------------


def test_space_is_reserved_as_it_is_needed():
    disk = SimulatedDisk()
    log = open_log(disk)
    used: list[int] = []
    for body in some_bodies(3, 1000):
        append(log, body)
        log.write()
        used.append(disk.capacity - disk.space()[0])
        assert log.end <= used[-1] <= min(2 * log.end + SEGMENT_SIZE // 8, SEGMENT_SIZE)
    assert used[0] < used[-1] == SEGMENT_SIZE
    assert len(disk.read(f"{DIRECTORY}/{segment_name(0)}")) == SEGMENT_SIZE, "the file has its full length"


def test_only_own_frames_may_use_the_space_that_is_to_stay_free():
    disk = SimulatedDisk(capacity=3 * SEGMENT_SIZE)
    log = open_log(disk)
    append(log, b"first")
    log.leave_free = disk.space()[0] - 100
    with pytest.raises(OSError, match="No space left for messages"):
        log.place_for(1000)
    assert log.files.lacking > disk.space()[0]
    log.place_for(1000, own=True)
    log.leave_free = 0
    log.place_for(3000)
    assert log.files.lacking == 0


def test_a_segment_without_space_on_the_disk_leaves_the_log_unchanged():
    disk = SimulatedDisk(capacity=4900)
    log = open_log(disk)
    bodies = some_bodies(4, 1000)
    append(log, *bodies[:3])
    end = log.end
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as raised:
            append(log, bodies[3])
        assert raised.value.errno == errno.ENOSPC
        assert (log.end, log.written) == (end, end)
        assert disk.list(DIRECTORY) == [segment_name(0)]
    append(log, b"fits")
    disk.capacity = 10_000
    append(log, bodies[3])
    log.sync()
    assert scan(disk)[2] == [*bodies[:3], b"fits", bodies[3]]


def test_segments_before_an_offset_are_removed_except_the_active_one():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, *some_bodies(9, 1000))
    log.sync()
    assert log.remove_before(SEGMENT_SIZE - 1) == []
    assert log.remove_before(SEGMENT_SIZE) == [0]
    assert log.start == SEGMENT_SIZE
    assert log.remove_before(1 << 40) == [SEGMENT_SIZE]
    assert disk.after_crash(keep="none").list(DIRECTORY) == [segment_name(2 * SEGMENT_SIZE)]
    with pytest.raises(DamageError):
        log.view(0, 8)


def test_the_start_follows_a_removal_that_failed(monkeypatch: pytest.MonkeyPatch):
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, *some_bodies(9, 1000))
    log.sync()

    def refuse(path: str) -> None:
        raise OSError(errno.EIO, "refused")

    monkeypatch.setattr(disk, "remove", refuse)
    with pytest.raises(OSError, match="refused"):
        log.remove_before(1 << 40)
    assert log.start == log.segments[0].base == SEGMENT_SIZE


def test_the_next_segment_is_made_in_advance_once_the_active_one_is_half_full():
    disk = SimulatedDisk()
    log = open_log(disk)
    log.prepare_next()
    append(log, b"small")
    log.prepare_next()
    assert disk.list(DIRECTORY) == [segment_name(0)]
    append(log, *some_bodies(3, 1000)[:2])
    log.prepare_next()
    log.prepare_next()
    assert disk.list(DIRECTORY) == [segment_name(0), segment_name(SEGMENT_SIZE)]
    log.write()
    done: list[str] = []
    disk.on_operation = lambda operation, path, size: done.append(operation)
    append(log, *some_bodies(2, 1000))
    assert set(done) <= {"write", "allocate"}, "the segment already exists"
    log.sync()
    assert len(scan(disk)[2]) == 5


def test_a_segment_made_in_advance_that_is_too_small_is_replaced_by_a_larger_one():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, *some_bodies(2, 1500))
    log.prepare_next()
    append(log, b"x" * 9000)
    log.sync()
    assert scan(disk)[2][-1] == b"x" * 9000
    assert disk.list(DIRECTORY) == [segment_name(0), segment_name(SEGMENT_SIZE)]


def test_an_unused_segment_made_in_advance_does_not_prevent_the_next_start():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, *some_bodies(2, 1500))
    log.prepare_next()
    log.sync()
    log.close()
    again, _, bodies = scan(disk)
    assert bodies == some_bodies(2, 1500)
    append(again, *some_bodies(2, 1500))
    again.sync()
    assert len(scan(disk)[2]) == 4


def test_an_empty_segment_at_the_end_of_the_log_gets_its_header_after_a_restart():
    disk = SimulatedDisk()
    log = open_log(disk)
    fill = frame(b"x" * (SEGMENT_SIZE - frame(b"").size))
    assert fill.size == SEGMENT_SIZE
    log.append(fill.parts, fill.size)
    log.prepare_next()
    log.sync()
    again, _, _ = scan(disk)
    assert again.end == SEGMENT_SIZE
    again.on_segment = lambda previous_end: [frame(b"head", previous_end=previous_end)]
    append(again, b"first")
    again.sync()
    assert scan(disk)[2][1:] == [b"head", b"first"]


# --- starting again -----------------------------------------------------------------------------


def test_a_file_that_was_never_allocated_is_ignored_and_removed_only_when_the_log_resumes():
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    disk.open(f"{DIRECTORY}/{segment_name(0)}", create=True)
    disk.open(f"{DIRECTORY}/notes.txt", create=True)
    log = open_log(disk)
    assert log.segments == []
    assert disk.list(DIRECTORY) == [segment_name(0), "notes.txt"]
    log.resume_at(0)
    assert disk.list(DIRECTORY) == ["notes.txt"]


def test_a_log_whose_end_was_lost_continues_after_it():
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, *some_bodies(9, 1000))
    log.sync()
    durable = log.durable
    disk.remove(f"{DIRECTORY}/{segment_name(2 * SEGMENT_SIZE)}")
    again, _found, bodies = scan(disk, durable)
    assert len(bodies) == 6
    assert again.end == durable
    (offset,) = append(again, b"new")
    assert offset >= durable
    again.sync()
    assert scan(disk, durable)[2] == [*some_bodies(9, 1000)[:6], b"new"]


def test_a_closed_log_refuses_appends_and_makes_no_segment():
    """A closed log has no list of segments: a new segment would overlap an existing one."""
    disk = SimulatedDisk()
    log = open_log(disk)
    append(log, b"kept")
    log.sync()
    log.close()
    with pytest.raises(ValueError, match=f"{DIRECTORY}: the log is closed"):
        append(log, b"late")
    assert disk.list(DIRECTORY) == [segment_name(0)]
    assert scan(disk)[2] == [b"kept"]
