"""The faults of the simulated disk: crashes, kills, no space, errors, slow operations and bit rot."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.clock import ManualClock
from plait.testing.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.testing.crashes import durable, outcomes, sectors

# --- crashes ------------------------------------------------------------------------------------


def trace(disk: SimulatedDisk) -> None:
    """Perform ten operations: one of each kind, and one more write."""
    disk.make_directory("d")
    file = disk.open("d/a", create=True)
    file.allocate(2000)
    file.write([b"x" * 1000, b"y" * 1000], 0)
    file.sync()
    file.write([b"z"], 0)
    file.truncate(1500)
    disk.rename("d/a", "d/b")
    disk.sync_directory("d")
    disk.remove("d/b")


def test_every_change_counts_as_an_operation_and_reading_does_not():
    disk = SimulatedDisk()
    trace(disk)
    assert disk.operations == 10
    disk.make_directory("d")
    disk.remove("d/missing")
    disk.open("d/c", create=True)
    file = disk.open("d/c")
    file.write([], 0)
    file.view()
    disk.read("d/c")
    disk.list("d")
    disk.exists("d")
    disk.space()
    assert disk.operations == 11


@pytest.mark.parametrize("number", range(10))
def test_a_crash_prevents_its_operation_and_all_later_ones(number: int):
    whole, disk = SimulatedDisk(), SimulatedDisk()
    seen: list[bytes | None] = []

    def look(*_: object) -> None:
        paths = [path for path in ("d/a", "d/b") if whole.exists(path)]
        seen.append(whole.read(paths[0]) if paths else None)

    whole.on_operation = look
    trace(whole)
    disk.crash_at(number)
    with pytest.raises(SimulatedCrash, match=f"operation {number}"):
        trace(disk)
    assert disk.crashed
    for call in (
        lambda: disk.open("x", create=True),
        lambda: disk.read("d/a"),
        lambda: disk.list(""),
        lambda: disk.exists("d"),
        lambda: disk.make_directory("e"),
        lambda: disk.rename("d/a", "d/b"),
        lambda: disk.remove("d/a"),
        lambda: disk.sync_directory(""),
        lambda: disk.space(),
    ):
        with pytest.raises(SimulatedCrash):
            call()
    killed = disk.copy()
    paths = [path for path in ("d/a", "d/b") if killed.exists(path)]
    assert (killed.read(paths[0]) if paths else None) == seen[number]


def test_an_open_file_of_a_crashed_disk_raises_but_closes():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"abc")
    disk.crash_at(disk.operations)
    with pytest.raises(SimulatedCrash):
        file.sync()
    for call in (
        lambda: file.write([b"x"], 0),
        lambda: file.truncate(0),
        lambda: file.allocate(9),
        file.sync,
        file.view,
    ):
        with pytest.raises(SimulatedCrash):
            call()
    file.close()
    assert disk.after_crash().read("a") == b"abc"


@pytest.mark.parametrize("byte", [0, 1, 3, 6, 100])
def test_a_crash_inside_a_write_leaves_that_many_bytes_in_the_cache(byte: int):
    disk = SimulatedDisk()
    file = durable(disk, "a", b"......")
    disk.crash_at(disk.operations, byte)
    with pytest.raises(SimulatedCrash):
        file.write([b"abc", b"def"], 0)
    assert disk.copy().read("a") == b"abcdef"[:byte] + b"......"[byte:]
    assert disk.after_crash(keep="none").read("a") == b"......"


def test_a_copy_has_the_unsynced_changes_and_is_independent():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"o" * 10)
    file.write([b"n" * 10], 0)
    disk.open("b", create=True)
    copy = disk.copy()
    assert outcomes(copy, lambda after: after.read("a")) == {b"o" * 10, b"n" * 10}
    assert outcomes(copy, lambda after: after.exists("b")) == {False, True}
    copy.open("a").write([b"c" * 20], 0)
    copy.sync_directory("")
    assert disk.read("a") == b"n" * 10
    assert outcomes(disk, lambda after: after.read("a")) == {b"o" * 10, b"n" * 10}
    assert disk.after_crash(keep="none").list("") == ["a"]
    assert copy.after_crash(keep="none").list("") == ["a", "b"]
    copy.open("a").sync()
    assert copy.after_crash(keep="none").read("a") == b"c" * 20
    assert disk.after_crash(keep="none").read("a") == b"o" * 10


# --- errors -------------------------------------------------------------------------------------


def test_a_write_without_space_stores_what_fits():
    disk = SimulatedDisk(capacity=1000)
    file = disk.open("a", create=True)
    file.write([b"x" * 900], 0)
    assert disk.space() == (100, 1000)
    with pytest.raises(OSError, match="No space") as raised:
        file.write([b"y" * 200], 850)
    assert raised.value.errno == errno.ENOSPC
    assert disk.read("a") == b"x" * 850 + b"y" * 150
    assert file.size == 1000
    assert file.write([b"z"], 0) == 1


def test_allocate_and_create_need_space_and_truncate_leaves_a_hole():
    disk = SimulatedDisk(capacity=1000)
    file = disk.open("a", create=True)
    with pytest.raises(OSError, match="No space"):
        file.allocate(1001)
    assert file.size == 0
    file.truncate(5000)
    assert (file.size, disk.space()) == (5000, (1000, 1000))
    file.allocate(400)
    file.write([b"x"], 500)
    assert (file.size, disk.space()) == (5000, (499, 1000))
    assert disk.copy().space() == (499, 1000)
    with pytest.raises(OSError, match="No space"):
        file.write([b"x"], 1000)
    file.truncate(100)
    assert disk.space() == (900, 1000)
    file.allocate(1000)
    with pytest.raises(OSError, match="No space"):
        disk.open("b", create=True)
    assert not disk.exists("b")
    disk.remove("a")
    assert disk.space() == (1000, 1000)
    disk.open("b", create=True).allocate(1000)


def test_the_chosen_write_fails_and_may_store_a_part():
    stored = set()
    for seed in range(60):
        disk = SimulatedDisk(seed=seed)
        disk.fail("write", after=1)
        file = disk.open("a", create=True)
        file.write([b"ab"], 0)
        with pytest.raises(OSError, match="a") as raised:
            file.write([b"cdef"], 2)
        assert raised.value.errno == errno.EIO
        assert disk.read("a") == b"abcdef"[: file.size]
        stored.add(file.size)
        assert file.write([b"cdef"], 2) == 4
    assert stored == {2, 3, 4, 5}


def test_faults_hit_the_given_paths_the_given_number_of_times():
    disk = SimulatedDisk()
    disk.make_directory("log")
    disk.fail("sync", path="log/*", times=None)
    disk.fail("write", path="b", times=2, error=errno.EDQUOT)
    a, b = disk.open("log/a", create=True), disk.open("b", create=True)
    b.sync()
    for _ in range(3):
        with pytest.raises(OSError, match="log/a"):
            a.sync()
    for _ in range(2):
        with pytest.raises(OSError, match="b") as raised:
            b.write([b"x"], 0)
        assert raised.value.errno == errno.EDQUOT
    assert b.write([b"x"], 0) == 1


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("create", lambda disk: disk.open("new", create=True)),
        ("truncate", lambda disk: disk.open("a").truncate(1)),
        ("allocate", lambda disk: disk.open("a").allocate(100)),
        ("rename", lambda disk: disk.rename("a", "b")),
        ("remove", lambda disk: disk.remove("a")),
        ("make_directory", lambda disk: disk.make_directory("d")),
        ("sync_directory", lambda disk: disk.sync_directory("")),
        ("read", lambda disk: disk.read("a")),
    ],
)
def test_any_other_operation_that_fails_changes_nothing(operation: Any, call: Callable[[SimulatedDisk], object]):
    disk = SimulatedDisk()
    durable(disk, "a", b"abc")
    disk.fail(operation)
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        call(disk)
    assert disk.list("") == ["a"]
    assert disk.read("a") == b"abc"
    call(disk)


def test_data_of_a_failed_sync_is_kept_or_lost_and_no_later_sync_saves_it():
    kept = set()
    for seed in range(60):
        disk = SimulatedDisk(seed=seed)
        file = durable(disk, "a", b"o" * 1024)
        file.write([b"n" * 1024], 0)
        disk.fail("sync")
        with pytest.raises(OSError, match=r"\[Errno 5\]"):
            file.sync()
        assert disk.read("a") == b"n" * 1024
        file.sync()
        results = outcomes(disk, lambda after: after.read("a"), tries=5)
        assert results == {disk.after_crash(keep="none").read("a")}
        kept.add(bytes(part[0] for part in sectors(results.pop())))
    assert kept == {b"oo", b"on", b"no", b"nn"}


def test_after_a_failed_sync_new_writes_are_synced_again_in_whole_sectors():
    for seed in range(20):
        disk = SimulatedDisk(seed=seed)
        file = durable(disk, "a", b"o" * 1024)
        file.write([b"n" * 1024], 0)
        disk.fail("sync")
        with pytest.raises(OSError, match=r"\[Errno 5\]"):
            file.sync()
        file.write([b"z"], 0)
        file.sync()
        assert disk.after_crash(keep="none").read("a")[:512] == b"z" + b"n" * 511


# --- slow input and output ----------------------------------------------------------------------


def test_the_hook_sees_every_operation_before_it_takes_effect():
    calls: list[tuple[str, str, int]] = []
    clock = ManualClock()

    def slow(operation: str, path: str, size: int) -> None:
        calls.append((operation, path, size))
        clock.advance(0.5)

    disk = SimulatedDisk(on_operation=slow)
    trace(disk)
    assert calls == [
        ("make_directory", "d", 0),
        ("create", "d/a", 0),
        ("allocate", "d/a", 2000),
        ("write", "d/a", 2000),
        ("sync", "d/a", 0),
        ("write", "d/a", 1),
        ("truncate", "d/a", 1500),
        ("rename", "d/b", 0),
        ("sync_directory", "d", 0),
        ("remove", "d/b", 0),
    ]
    assert clock.monotonic() == 1005.0


def test_a_slow_sync_covers_only_what_was_written_before_it():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"oo")
    begun, go_on = threading.Event(), threading.Event()

    def slow(operation: str, path: str, size: int) -> None:
        if operation == "sync":
            begun.set()
            assert go_on.wait(10)

    disk.on_operation = slow
    file.write([b"1"], 0)
    thread = threading.Thread(target=file.sync)
    thread.start()
    assert begun.wait(10)
    file.write([b"2"], 1)
    go_on.set()
    thread.join()
    assert outcomes(disk, lambda after: after.read("a")) == {b"1o", b"12"}


def test_a_crash_during_a_sync_prevents_it():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"o")
    raised: list[BaseException] = []

    def crash_meanwhile(operation: str, path: str, size: int) -> None:
        disk.on_operation = None
        disk.crash_at(disk.operations)
        with pytest.raises(SimulatedCrash) as crash:
            disk.remove("a")
        raised.append(crash.value)

    file.write([b"n"], 0)
    disk.on_operation = crash_meanwhile
    with pytest.raises(SimulatedCrash):
        file.sync()
    assert len(raised) == 1
    assert outcomes(disk, lambda after: after.read("a")) == {b"o", b"n"}


# --- damage -------------------------------------------------------------------------------------


@given(st.booleans(), st.integers(0, 1999), st.integers(0, 7))
@settings(max_examples=30)
def test_a_flipped_bit_is_read_and_survives_a_crash(synced: bool, offset: int, bit: int):
    disk = SimulatedDisk()
    file = durable(disk, "a", b"o" * 2000)
    file.write([b"n" * 1000], 500)
    if synced:
        file.sync()
    view = file.view()
    expected = bytearray(disk.read("a"))
    expected[offset] ^= 1 << bit
    disk.flip_bit("a", offset, bit)
    assert disk.read("a") == bytes(view) == bytes(expected)
    assert disk.after_crash(keep="all").read("a") == bytes(expected)
    flipped = disk.after_crash(keep="none").read("a")[offset]
    assert flipped in (ord("o") ^ 1 << bit, ord("n") ^ 1 << bit)
    disk.flip_bit("a", offset, bit)
    assert disk.read("a") == b"o" * 500 + b"n" * 1000 + b"o" * 500
