"""Behaviour of the real disk only: short writes, system limits, the lock."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DataDirError
from plait.storage import disk as disk_module
from plait.storage.disk import IOV_MAX, WRITE_SIZE, Buffer, RealDisk, RealFile


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_short_writes_are_continued_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int):
    whole = os.pwritev

    def short(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return whole(fd, [b"".join(buffers)[:step]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    buffers: list[Buffer] = [
        b"abc",
        b"",
        bytearray(b"defghijk"),
        memoryview(b"lm"),
        *[b"x"] * IOV_MAX,
        b"end",
    ]
    file = RealDisk(tmp_path).open("a", create=True)
    assert file.write(buffers, 2) == len(b"".join(buffers))
    file.close()
    assert (tmp_path / "a").read_bytes() == b"\0\0" + b"".join(buffers)


@given(
    st.lists(
        st.one_of(st.integers(0, 40), st.integers(0, WRITE_SIZE // 64), st.integers(0, 3 * WRITE_SIZE)), max_size=8
    ),
    st.integers(0, 2 * WRITE_SIZE),
    st.booleans(),
)
def test_any_buffers_are_written_in_full(sizes: list[int], offset: int, many: bool):
    buffers = [bytes([number % 251]) * size for number, size in enumerate([*sizes, *[1, 0] * (many * IOV_MAX)])]
    with tempfile.TemporaryDirectory() as directory:
        file = RealDisk(directory).open("a", create=True)
        assert file.write(buffers, offset) == sum(map(len, buffers))
        file.close()
        written = Path(directory, "a").read_bytes()
    assert written == (bytes(offset) + b"".join(buffers) if any(buffers) else b"")


@pytest.mark.parametrize("offset", [0, 1, WRITE_SIZE - 1, WRITE_SIZE])
def test_large_writes_are_cut_at_multiples_of_the_write_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
):
    calls: list[tuple[int, int]] = []
    whole = os.pwritev

    def counted(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        calls.append((at, sum(map(len, buffers))))
        return whole(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", counted)
    buffers = [bytes([number]) * size for number, size in enumerate((7, WRITE_SIZE, 0, 3 * WRITE_SIZE + 5, 100))]
    file = RealDisk(tmp_path).open("a", create=True)
    assert file.write(buffers, offset) == sum(map(len, buffers))
    file.close()
    assert (tmp_path / "a").read_bytes() == bytes(offset) + b"".join(buffers)
    ends = [at + size for at, size in calls]
    assert [at for at, _ in calls] == [offset, *ends[:-1]]
    assert all(end % WRITE_SIZE == 0 for end in ends[:-1])
    assert max(size for _, size in calls) <= WRITE_SIZE


def test_a_disk_that_accepts_no_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    file = RealDisk(tmp_path).open("a", create=True)
    with pytest.raises(OSError, match="accepted no bytes"):
        file.write([b"abc"], 0)
    file.close()


def test_after_a_partly_failed_write_the_size_is_that_of_the_file(tmp_path: Path):
    file = RealDisk(tmp_path).open("a", create=True)
    with file_size_limit(1000), pytest.raises(OSError, match="large"):
        file.write([b"x" * 600, b"y" * 600], 0)
    assert file.size == (tmp_path / "a").stat().st_size == 1000
    assert bytes(file.view()) == b"x" * 600 + b"y" * 400
    file.close()


def test_after_a_failed_allocation_the_size_is_that_of_the_file(tmp_path: Path):
    file = RealDisk(tmp_path).open("a", create=True)
    file.write([b"abc"], 0)
    with file_size_limit(4096), pytest.raises(OSError, match="large"):
        file.allocate(100_000)
    assert file.size == (tmp_path / "a").stat().st_size
    file.close()


def test_a_full_device_raises_no_space():
    file = RealDisk("/dev").open("full")
    with pytest.raises(OSError, match="space") as raised:
        file.write([b"abc"], 0)
    assert raised.value.errno == errno.ENOSPC
    assert file.size == 0
    file.close()


def test_a_new_directory_is_synced_into_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    monkeypatch.setattr(disk_module, "_sync_directory", synced.append)
    disk = RealDisk(tmp_path / "data")
    disk.make_directory("d/e")
    assert synced == [tmp_path, tmp_path / "data", tmp_path / "data" / "d"]
    disk.make_directory("d/e")
    assert len(synced) == 3


def test_a_directory_left_by_a_killed_process_is_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "d" / "e").mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr(disk_module, "_sync_directory", synced.append)
    RealDisk(tmp_path).make_directory("d/e")
    assert synced == [tmp_path, tmp_path / "d"]


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path):
    first, second = RealDisk(tmp_path / "data"), RealDisk(tmp_path / "data")
    first.lock()
    with pytest.raises(DataDirError, match="in use by another plait process"):
        second.lock()
    first.unlock()
    first.unlock()
    second.lock()
    second.unlock()


def in_memory(path: Path, offset: int) -> bool:
    """True if a byte of a file is in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def left_memory(file: RealFile, path: Path, size: int) -> bool:
    """True if ``forget`` drops the first bytes from the page cache; the kernel may keep recently used pages."""
    for _ in range(20):
        file.forget(0, size)
        if not in_memory(path, size // 2):
            return True
    return False


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory next to the sources: the directory for temporary files may be in memory."""
    state = Path(__file__).parents[2] / ".plait"
    state.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=state) as directory:
        yield Path(directory)


def test_forgotten_bytes_leave_the_page_cache_even_if_they_were_read_through_a_view(on_disk: Path):
    size = 1 << 20
    plain = RealDisk(on_disk).open("plain", create=True)
    plain.write([b"x" * size], 0)
    plain.sync()
    if not left_memory(plain, on_disk / "plain", size):
        pytest.skip("this file system keeps all files in memory")
    file = RealDisk(on_disk).open("a", create=True)
    # Two writes: the kernel may cache one write as one block, and it drops only whole blocks.
    file.write([b"a" * size], 0)
    file.write([b"b" * size], size)
    file.sync()
    assert bytes(file.view()) == b"a" * size + b"b" * size
    assert left_memory(file, on_disk / "a", size)
    assert in_memory(on_disk / "a", size + size // 2)
    file.close()
    plain.close()
