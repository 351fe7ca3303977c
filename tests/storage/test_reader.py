"""Reading a log while a server writes it: exactly the rows that a server would keep, and no change on the disk."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.errors import DamageError, DataDirError, Expired, SubjectNotFound
from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.header import HEADER_SIZE
from plait.model.settings import SubjectSettings
from plait.storage.disk import Disk, RealDisk
from plait.storage.reading.log_chunks import ChunkPlan, LogChunk, WantedRows, plan, read_chunk
from plait.storage.reading.log_reader import LogReader, open_log
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node, Producer

Row = tuple[str, int, bytes]


def wanted(*subjects: str, **bounds: Any) -> WantedRows:
    return WantedRows(frozenset(subjects), **bounds)


def read(reader: LogReader, want: WantedRows, *, fail_on_damage: bool = True, **settings: Any) -> list[Row]:
    planned = plan(reader, want, fail_on_damage=fail_on_damage, **settings)
    return rows_of(reader, planned, want, fail_on_damage=fail_on_damage)


def rows_of(reader: LogReader, planned: ChunkPlan, want: WantedRows, *, fail_on_damage: bool = True) -> list[Row]:
    rows: list[Row] = []
    for chunk in planned.chunks:
        for partition, frame in read_chunk(reader.disk, reader.place, chunk, want, fail_on_damage=fail_on_damage):
            bodies = frame.binary(Column.BODY).to_pylist()
            rows += [(partition.subject, *pair) for pair in zip(frame.sequences().tolist(), bodies, strict=True)]
    return rows


def stored(node: Node, subject: str) -> list[Row]:
    return [(subject, row.sequence, row.body) for row in node.stored(subject)]


def message_log(disk: Disk) -> LogReader:
    return LogReader(disk, "message")


def segments(root: Path) -> list[Path]:
    return sorted((root / "message").glob("*.log"))


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(RealDisk(tmp_path))
    yield node
    node.broker.message_log.close()
    node.broker.action_log.close()


# --- what is read -------------------------------------------------------------------------------


def test_every_row_of_a_subject_is_read_once_and_in_order(node: Node, tmp_path: Path):
    for number in range(300):
        node.send("orders", b"%d" % number, b"x" * (number % 50))
    assert len(segments(tmp_path)) > 3
    rows = read(open_log(str(tmp_path)), wanted("orders"))
    assert rows == stored(node, "orders")
    assert len(rows) == 600


def test_a_prefix_names_every_subject_that_starts_with_it(node: Node, tmp_path: Path):
    for subject in ("eu.orders", "eu.refunds", "us.orders"):
        node.send(subject, subject.encode())
    rows = read(open_log(str(tmp_path)), WantedRows(prefixes=("eu.",)))
    assert [row[0] for row in rows] == ["eu.orders", "eu.refunds"]
    assert len(read(open_log(str(tmp_path)), WantedRows(prefixes=("",)))) == 3


def test_a_directory_without_messages_has_no_subjects(node: Node, tmp_path: Path):
    with pytest.raises(SubjectNotFound, match="there are no subjects"):
        plan(open_log(str(tmp_path)), wanted("orders"))


def test_rows_of_a_deleted_subject_are_left_out_and_those_of_its_successor_are_not(node: Node, tmp_path: Path):
    node.send("orders", b"old")
    node.send("other", b"other")
    node.broker.delete_subject("orders")
    node.turn()
    with pytest.raises(SubjectNotFound, match=r"'orders' is not in .*; there are other"):
        plan(open_log(str(tmp_path)), wanted("orders"))
    node.send("orders", b"new", producer=Producer(2))
    assert read(open_log(str(tmp_path)), wanted("orders")) == [("orders", 0, b"new")]


def test_the_error_for_an_unknown_subject_lists_the_existing_ones(node: Node, tmp_path: Path):
    node.send("orders", b"a")
    with pytest.raises(SubjectNotFound, match=r"'gone', 'absent\*' is not in .*; there are orders"):
        plan(open_log(str(tmp_path)), WantedRows(frozenset({"gone"}), ("absent",)))


def test_expired_rows_that_are_still_in_a_segment_are_left_out(node: Node, tmp_path: Path):
    node.broker.create_subject("orders", SubjectSettings(retention_seconds=60.0))
    node.send("orders", b"old")
    node.clock.advance(100.0)
    node.send("orders", b"new")
    node.retention.run()
    node.turn()
    node.checkpoint()
    assert read(open_log(str(tmp_path)), wanted("orders")) == [("orders", 1, b"new")]


# --- bounds -------------------------------------------------------------------------------------


def test_bounds_leave_out_frames_without_such_rows(node: Node, tmp_path: Path):
    times = []
    for number in range(30):
        node.clock.advance(1.0)
        times.append(node.clock.now())
        node.send("orders", b"a%d" % number, b"b%d" % number)
    reader = open_log(str(tmp_path))

    def sequences(**bounds: int) -> list[int]:
        return [row[1] for row in read(reader, wanted("orders", **bounds))]

    assert sequences(sequence_min=21, sequence_max=25) == [20, 21, 22, 23, 24, 25]
    assert sequences(time_min=times[28]) == [56, 57, 58, 59]
    assert sequences(time_max=times[1] - 1) == [0, 1]
    assert sequences(sequence_min=60) == []


# --- chunks -------------------------------------------------------------------------------------


def big_log(root: Path, frames: int = 48) -> Node:
    """A log with frames of 256 KiB, alternating between two subjects."""
    node = Node(RealDisk(root), message_segment_size=8 << 20)
    producer = Producer(3)
    for number in range(frames):
        node.submit(producer.frame(("orders", "other")[number % 2], *[bytes([number]) * 1024] * 255))
        node.turn()
    return node


def test_chunks_have_about_equal_sizes_and_contain_every_row_once(tmp_path: Path):
    node = big_log(tmp_path)
    reader = open_log(str(tmp_path))
    for chunks_min in (1, 2, 5):
        planned = plan(reader, wanted("orders"), chunks_min=chunks_min)
        assert len(planned.chunks) >= chunks_min
        rows = rows_of(reader, planned, wanted("orders"))
        assert rows == stored(node, "orders")
    sizes = [chunk.size for chunk in plan(reader, wanted("orders"), chunk_size=2 << 20).chunks]
    assert max(sizes) <= 2 << 20
    assert max(sizes) < 2 * min(sizes)
    one_segment = wanted("orders", sequence_max=3000)
    assert len(plan(reader, one_segment, chunk_size=1 << 20, chunks_min=2).chunks) == 4
    node.broker.stop()


def test_another_process_can_read_a_chunk_from_the_files_alone(tmp_path: Path):
    node = big_log(tmp_path, 8)
    node.broker.stop()
    (chunk,) = plan(open_log(str(tmp_path)), wanted("orders")).chunks
    assert chunk == LogChunk(
        chunk.segment, chunk.start, chunk.end, chunk.size, chunk.partitions, chunk.ranges, chunk.epochs
    )
    frames = list(read_chunk(RealDisk(tmp_path, read_only=True), "here", chunk, wanted("orders")))
    assert [frame.count for _, frame in frames] == [255] * 4


def test_a_segment_that_retention_removes_before_reading_raises_expired(tmp_path: Path):
    node = big_log(tmp_path)
    node.broker.stop()
    reader = open_log(str(tmp_path))
    planned = plan(reader, wanted("orders"))
    segments(tmp_path)[0].unlink()
    with pytest.raises(Expired, match="removed by retention"):
        rows_of(reader, planned, wanted("orders"))


def test_a_segment_that_retention_removes_before_planning_is_skipped(tmp_path: Path):
    node = big_log(tmp_path)
    kept = [row for row in stored(node, "orders") if row[1] >= 255 * 16]
    node.broker.stop()
    reader = open_log(str(tmp_path))
    segments(tmp_path)[0].unlink()
    rows = read(reader, wanted("orders"))
    assert rows[-len(kept) :] == kept
    assert rows[0][1] > 0


# --- only reading -------------------------------------------------------------------------------


def test_nothing_in_the_directory_changes(node: Node, tmp_path: Path):
    for number in range(100):
        node.send("orders", b"%d" % number)
    node.checkpoint()
    before = snapshot(tmp_path)
    read(open_log(str(tmp_path)), wanted("orders"))
    assert snapshot(tmp_path) == before


def test_read_permission_is_enough(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node.send("orders", b"a")
    node.checkpoint()
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    for name in ("mkdir", "rename", "replace", "unlink", "fsync", "fdatasync"):
        monkeypatch.delattr(os, name)
    assert read(open_log(str(tmp_path)), wanted("orders")) == [("orders", 0, b"a")]


def test_a_read_only_disk_refuses_every_change(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    disk = RealDisk(tmp_path, read_only=True)
    file = disk.open("a")
    assert bytes(file.view()) == b"abc"
    for change in (
        lambda: file.write([b"x"], 0),
        lambda: file.truncate(0),
        lambda: file.allocate(10),
        lambda: disk.open("b", create=True),
        lambda: disk.make_directory("c"),
        lambda: disk.rename("a", "b"),
        lambda: disk.remove("a"),
        lambda: disk.sync_directory(""),
        lambda: disk.lock(),
    ):
        with pytest.raises(OSError, match=r"read-only|Bad file|Invalid"):
            change()
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_action_log_is_not_taken_for_a_message_log(node: Node, tmp_path: Path):
    node.send("orders", b"a")
    for number in range(4):
        node.attach("orders", f"billing-{number}")
    with pytest.raises(DataDirError, match="holds no message log"):
        plan(open_log(str(tmp_path / "action")), wanted("orders"))


def test_frames_of_a_newer_format_are_refused_and_not_taken_for_the_end(node: Node, tmp_path: Path):
    node.send("orders", b"a")
    end = node.broker.message_log.end
    node.send("orders", b"b")
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[end + 2] = 9
    path.write_bytes(data)
    with pytest.raises(DataDirError, match="format version 9"):
        plan(open_log(str(tmp_path)), wanted("orders"))


# --- while a server writes, and after a crash ---------------------------------------------------


def test_a_log_that_grows_during_the_read_is_read_up_to_some_frame(tmp_path: Path):
    node = Node(RealDisk(tmp_path), message_segment_size=1 << 20)
    producer = Producer(1)
    node.submit(producer.frame("orders", b"first"))
    node.turn()
    done = threading.Event()

    def write() -> None:
        chance = random.Random(1)
        for _ in range(1500):
            bodies = [chance.randbytes(chance.randrange(2000)) for _ in range(chance.randrange(1, 20))]
            node.submit(producer.frame("orders", *bodies))
            node.turn()
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = []
    while not done.is_set():
        looks.append(read(open_log(str(tmp_path)), wanted("orders")))
    writer.join()
    final = stored(node, "orders")
    assert len(looks) > 3
    assert all(look == final[: len(look)] for look in looks)
    assert read(open_log(str(tmp_path)), wanted("orders")) == final
    node.broker.stop()


def test_an_unfinished_frame_at_the_end_is_left_out(node: Node, tmp_path: Path):
    node.send("orders", b"whole")
    end = node.broker.message_log.end
    node.send("orders", b"torn" * 300)
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    for cut in (end + 8, end + HEADER_SIZE, end + 512):
        torn = data[:cut] + bytes(len(data) - cut)
        path.write_bytes(torn)
        assert read(open_log(str(tmp_path)), wanted("orders")) == [("orders", 0, b"whole")]


@pytest.mark.parametrize("keep", ["none", "all", "random"])
@pytest.mark.parametrize("flush", ["async", "sync"])
def test_after_a_power_loss_the_rows_are_those_that_recovery_keeps(keep: Any, flush: Any, seed: int):
    for number in range(30):
        chance = random.Random(seed * 1000 + number)
        node = Node(flush=flush)
        producer = Producer(1)
        for _ in range(chance.randrange(1, 120)):
            subject = chance.choice(["a", "b", "c"])
            bodies = [chance.randbytes(chance.randrange(400)) for _ in range(chance.randrange(1, 5))]
            node.submit(producer.frame(subject, *bodies))
            if chance.random() < 0.7:
                node.turn()
            if chance.random() < 0.1:
                node.sync()
            if chance.random() < 0.03:
                node.checkpoint()
            if chance.random() < 0.02 and "b" in node.broker.subjects:
                node.broker.delete_subject("b")
                producer = Producer(producer.id + 1)
        node.commit()
        disk: SimulatedDisk = node.disk.after_crash(chance, keep)
        before = disk.copy()
        recovered = Node(disk.copy())
        damaged = any(damage.kind == "damaged" for damage in recovered.report.damages)
        rows = (
            read(message_log(disk), WantedRows(prefixes=("",)), fail_on_damage=not damaged)
            if recovered.broker.subjects
            else []
        )
        for subject in ("a", "b", "c"):
            kept = stored(recovered, subject) if subject in recovered.broker.subjects else []
            assert [row for row in rows if row[0] == subject] == kept, (number, recovered.report)
        assert disk.list("message") == before.list("message")


# --- damage -------------------------------------------------------------------------------------


def damaged_log(root: Path) -> tuple[Path, list[int], list[Row]]:
    """The log of a stopped server: its file, the positions of the frames of "orders", and all rows."""
    node = Node(RealDisk(root), message_segment_size=1 << 20)
    places = []
    for number in range(20):
        node.send("other", b"between")
        places.append(node.broker.message_log.end)
        node.send("orders", b"row %d" % number)
    rows = stored(node, "orders")
    node.broker.stop()
    return segments(root)[0], places, rows


@pytest.mark.parametrize(
    ("what", "byte"),
    [("magic", 0), ("size", 5), ("count", 8), ("columns", 12), ("partition", 44), ("base", 48), ("body", 93)],
)
def test_a_damaged_frame_is_reported_with_file_and_offset_or_skipped(tmp_path: Path, what: str, byte: int):
    path, places, rows = damaged_log(tmp_path)
    data = bytearray(path.read_bytes())
    data[places[7] + byte] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(DamageError, match=rf"{path.name} is damaged: \d+ bytes at offset {places[7]} .*plait doctor"):
        read(open_log(str(tmp_path)), wanted("orders"))
    left = read(open_log(str(tmp_path)), wanted("orders"), fail_on_damage=False)
    assert left == rows[:7] + rows[8:]


def test_a_wrong_size_in_another_subjects_frame_hides_no_row(tmp_path: Path):
    path, places, rows = damaged_log(tmp_path)
    data = bytearray(path.read_bytes())
    # The wrong size extends to the end of the next frame, so that the headers alone look valid.
    between = places[6] + int.from_bytes(data[places[6] + 4 : places[6] + 8], "little")
    end = places[7] + int.from_bytes(data[places[7] + 4 : places[7] + 8], "little")
    data[between + 4 : between + 8] = (end - between).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DamageError, match=f"at offset {between} "):
        read(open_log(str(tmp_path)), wanted("orders"))
    assert read(open_log(str(tmp_path)), wanted("orders"), fail_on_damage=False) == rows


def test_a_segment_missing_in_the_middle_is_damage(tmp_path: Path):
    node = Node(RealDisk(tmp_path))
    for number in range(300):
        node.send("orders", b"%d" % number)
    node.broker.stop()
    segments(tmp_path)[2].unlink()
    with pytest.raises(DamageError, match="missing"):
        read(open_log(str(tmp_path)), wanted("orders"))
    left = [row[1] for row in read(open_log(str(tmp_path)), wanted("orders"), fail_on_damage=False)]
    assert left == sorted(left)
    assert 200 < len(left) < 300


def test_a_frame_inside_a_message_body_is_never_read_as_a_frame_of_the_log(tmp_path: Path):
    node = Node(RealDisk(tmp_path), message_segment_size=1 << 20)
    inner = build_frame([b"inner"], producer=5, first=1).tobytes()
    node.send("orders", b"before")
    place = node.broker.message_log.end
    node.send("orders", bytes(80) + inner)
    node.send("orders", b"after")
    node.broker.stop()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    left = read(open_log(str(tmp_path)), wanted("orders"), fail_on_damage=False)
    assert [row[2] for row in left] == [b"before", b"after"]
