"""The contract of both disks: storage is tested on the simulated one and runs on the real one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.storage.disk import IOV_MAX, Disk, RealDisk
from plait.testing.simulated_disk import SimulatedDisk


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return RealDisk(tmp_path) if request.param == "real" else SimulatedDisk()


def store(disk: Disk, path: str, data: bytes) -> None:
    file = disk.open(path, create=True)
    file.write([data], 0)
    file.close()


def test_written_bytes_are_read(disk: Disk):
    file = disk.open("a", create=True)
    assert file.write([b"hello ", bytearray(b"big "), memoryview(b"world")], 0) == 15
    assert file.size == 15
    assert disk.read("a") == b"hello big world"
    assert bytes(file.view()) == b"hello big world"
    file.close()


@pytest.mark.parametrize("count", [IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 3 * IOV_MAX + 7])
def test_more_buffers_than_one_system_call_takes_are_all_written(disk: Disk, count: int):
    buffers = [str(number).encode() for number in range(count)]
    file = disk.open("a", create=True)
    assert file.write(buffers, 3) == len(b"".join(buffers))
    assert disk.read("a") == bytes(3) + b"".join(buffers)
    assert file.size == 3 + len(b"".join(buffers))
    file.close()


def test_a_negative_offset_or_size_is_refused(disk: Disk):
    file = disk.open("a", create=True)
    for attempt in (lambda: file.write([b"x"], -1), lambda: file.truncate(-1), lambda: file.allocate(-1)):
        with pytest.raises(OSError, match=r"\[Errno 22\]"):
            attempt()
    assert disk.read("a") == b""
    file.close()


def test_a_view_shows_later_writes_inside_its_size(disk: Disk):
    file = disk.open("a", create=True)
    file.allocate(4096)
    view = file.view()
    file.write([b"later"], 100)
    assert bytes(view[100:105]) == b"later"
    file.close()


def test_an_old_view_of_a_grown_file_still_shows_writes(disk: Disk):
    file = disk.open("a", create=True)
    file.write([b"0123456789"], 0)
    views = []
    for turn in range(6):
        views.append(file.view())
        file.write([b"x" * file.size * 2], file.size)
        file.write([str(turn).encode()], 3)
        assert [len(view) for view in views] == [10 * 3**n for n in range(turn + 1)]
        assert all(view[3] == ord(str(turn)) for view in views)
    assert len(file.view()) == file.size
    file.close()


def test_a_view_is_read_only(disk: Disk):
    store(disk, "a", b"abc")
    file = disk.open("a")
    assert file.view().readonly
    file.close()


def test_a_view_outlives_its_file(disk: Disk):
    store(disk, "a", b"abc")
    file = disk.open("a")
    part = file.view()[1:]
    file.close()
    disk.remove("a")
    assert bytes(part) == b"bc"


def test_one_handle_shows_the_writes_of_another(disk: Disk):
    one = disk.open("a", create=True)
    one.write([b"abcdef"], 0)
    two = disk.open("a")
    view = two.view()
    one.write([b"XY"], 1)
    assert bytes(view) == b"aXYdef"
    one.write([b"more"], 6)
    assert two.write([b"Z"], 0) == 1
    assert two.size == 6
    assert bytes(two.view()) == b"ZXYdef"
    one.close()
    two.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda file: file.write([b"x"], 0),
        lambda file: file.allocate(10),
        lambda file: file.truncate(1),
        lambda file: file.sync(),
        lambda file: file.view(),
        lambda file: file.forget(0, 3),
    ],
    ids=["write", "allocate", "truncate", "sync", "view", "forget"],
)
def test_a_closed_file_refuses_every_call(disk: Disk, call: Callable[[Any], object]):
    store(disk, "a", b"abc")
    file = disk.open("a")
    file.close()
    file.close()
    with pytest.raises(OSError, match=r"\[Errno 9\]"):
        call(file)
    assert disk.read("a") == b"abc"


@pytest.mark.parametrize("synced", [True, False])
def test_forgotten_bytes_read_as_before(disk: Disk, synced: bool):
    data = bytes(range(256)) * 256
    file = disk.open("a", create=True)
    file.write([data], 0)
    if synced:
        file.sync()
    view = file.view()
    assert bytes(view) == data
    for start, end in ((0, len(data)), (5000, 5001), (4000, 9000), (len(data) - 1, 1 << 20), (1 << 20, 1 << 21)):
        file.forget(start, end)
        assert bytes(view) == data
    file.write([b"new"], 4096)
    assert bytes(file.view())[4095:4100] == b"\xffnew\x03"
    file.close()


def test_a_synced_file_and_directory_read_as_before(disk: Disk):
    file = disk.open("a", create=True)
    file.write([b"abc"], 0)
    file.sync()
    disk.sync_directory("")
    assert disk.read("a") == b"abc"
    assert disk.list("") == ["a"]
    file.close()


def test_a_file_is_not_created_in_a_missing_directory(disk: Disk):
    with pytest.raises(FileNotFoundError):
        disk.open("d/a", create=True)
    assert not disk.exists("d")


def test_a_missing_directory_lists_as_empty(disk: Disk):
    assert disk.list("d") == []
    assert disk.list("d/e") == []


def test_a_file_cannot_be_listed(disk: Disk):
    store(disk, "a", b"")
    with pytest.raises(NotADirectoryError):
        disk.list("a")


def test_make_directory_makes_parents_and_may_be_repeated(disk: Disk):
    disk.make_directory("d/e/f")
    disk.make_directory("d/e/f")
    disk.make_directory("d/e")
    disk.make_directory("")
    assert disk.exists("d/e/f")
    assert disk.list("d/e") == ["f"]


def test_make_directory_refuses_the_name_of_a_file(disk: Disk):
    store(disk, "a", b"abc")
    for path in ("a", "a/b"):
        with pytest.raises(FileExistsError):
            disk.make_directory(path)
    assert disk.read("a") == b"abc"


def test_rename_needs_its_source_and_the_directory_of_its_target(disk: Disk):
    with pytest.raises(FileNotFoundError):
        disk.rename("a", "b")
    store(disk, "a", b"x")
    with pytest.raises(FileNotFoundError):
        disk.rename("a", "d/a")
    assert disk.read("a") == b"x"


def test_an_open_file_is_written_through_its_new_name(disk: Disk):
    file = disk.open("a", create=True)
    disk.rename("a", "b")
    file.write([b"abc"], 0)
    assert disk.read("b") == b"abc"
    file.close()


def test_a_directory_is_not_a_file(disk: Disk):
    disk.make_directory("d")
    for attempt in (lambda: disk.open("d"), lambda: disk.read("d"), lambda: disk.remove("d")):
        with pytest.raises(IsADirectoryError):
            attempt()


def test_a_missing_directory_cannot_be_synced(disk: Disk):
    with pytest.raises(FileNotFoundError):
        disk.sync_directory("d")


NAMES = st.sampled_from(["a", "b", "d/a", "d/b"])
PLACES = st.integers(0, 2500)
ACTIONS = st.one_of(
    st.tuples(st.just("write"), NAMES, PLACES, st.binary(max_size=1500)),
    st.tuples(st.just("truncate"), NAMES, PLACES),
    st.tuples(st.just("allocate"), NAMES, PLACES),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("sync"), NAMES),
)


def act(disk: Disk, action: tuple[Any, ...]) -> object:
    """One action through its own handle. Returns its result or error, and the visible state after it."""
    kind, path, *rest = action
    outcome: object = None
    try:
        if kind in ("rename", "remove"):
            getattr(disk, kind)(path, *rest)
        else:
            file = disk.open(path, create=kind == "write")
            if kind == "write":
                outcome = file.write([rest[1]], rest[0])
            else:
                getattr(file, kind)(*rest)
            outcome = outcome, file.size, bytes(file.view())
            file.close()
    except OSError as error:
        outcome = error.errno
    names = [*disk.list(""), *(f"d/{name}" for name in disk.list("d"))]
    return outcome, {name: disk.read(name) for name in names if name != "d"}


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_both_disks_behave_the_same_for_any_actions(actions: list[tuple[Any, ...]]):
    with tempfile.TemporaryDirectory() as directory:
        real, simulated = RealDisk(directory), SimulatedDisk()
        for disk in (real, simulated):
            disk.make_directory("d")
        for action in actions:
            assert act(real, action) == act(simulated, action), action
