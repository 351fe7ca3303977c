"""The history of a subject in an archive and the live log: every message once, found by any condition."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from plait.client.send.open_rows import hash_keys
from plait.errors import ArchiveError, DataDirError, InvalidArgument, SubjectNotFound
from plait.model.logical_partitions import restamp
from plait.spark.history import lookup as history_module
from plait.spark.history import storage_order as ordering_module
from plait.spark.history.lookup import History
from plait.spark.history.pieces import SCHEMA, Piece
from plait.storage.reading.log_chunks import WantedRows, plan
from plait.storage.reading.log_reader import open_log
from tests.spark.archives import Filler, three_days
from tests.spark.histories import archive, copy_segments, replaced_once, sent, serving, thirty_messages


def bodies(rows: pa.Table) -> list[int]:
    return [int(body.removeprefix(b"body-")) for body in rows["body"].to_pylist()]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    thirty_messages(root)
    return root


@pytest.fixture
def both(template: Path, tmp_path: Path) -> tuple[Path, Path]:
    """20 messages archived in two runs, and 10 more in the log, which still has all 30."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path / "data", tmp_path / "archive"


def file_of(place: Path, number: int) -> Path:
    """The file of orders that the manifest of this number added."""
    return next(place.rglob(f"subject=orders/**/{number:020d}-*.parquet"))


# --- archive and log as one ---------------------------------------------------------------------


async def test_every_message_is_found_once_and_in_order(both: tuple[Path, Path]):
    data, place = both
    rows = History(place, data=data).find("orders")
    assert bodies(rows) == list(range(30))
    assert rows["sequence"].to_pylist() == list(range(30))
    assert rows.schema == SCHEMA


async def test_archived_and_live_rows_have_the_same_form(both: tuple[Path, Path]):
    data, place = both
    before = History(place, data=data).find("orders")
    archive(data, place)
    after = History(place).find("orders")
    assert after.to_pylist() == before.to_pylist()
    assert after["tags"][:3].to_pylist() == [["even", "größer"], None, ["even", "größer"]]
    headers = [("number", "3"), ("half", "1.5"), ("odd", "true"), ("city", "BJS")]
    assert after["headers"][3].as_py() == headers


async def test_an_open_history_sees_messages_that_are_archived_and_sent_later(both: tuple[Path, Path]):
    data, place = both
    history = History(place, data=data)
    assert len(history.find("orders")) == 30
    await sent(data, 5, start=30)
    assert bodies(history.find("orders")) == list(range(35))
    archive(data, place)
    await sent(data, 5, start=35)
    assert bodies(history.find("orders")) == list(range(40))


async def test_a_directory_that_was_never_archived_is_read_completely(tmp_path: Path, both: tuple[Path, Path]):
    other = tmp_path / "other"
    await sent(other, 4, start=100)
    rows = History(both[1], data=[both[0], other], group="g2").find("orders")
    assert sorted(bodies(rows)) == [*range(30), *range(100, 104)]
    assert set(rows["partition"].to_pylist()) == {"orders@g1", "orders@g2"}


async def test_files_that_the_manifest_does_not_name_are_ignored(both: tuple[Path, Path]):
    data, place = both
    named = file_of(place, 1)
    named.with_name("stray.parquet").write_bytes(named.read_bytes())
    assert bodies(History(place, data=data).find("orders")) == list(range(30))


async def test_a_file_that_a_newer_manifest_replaced_causes_no_error(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    history = History(both[1])
    replaced_once(history, monkeypatch)
    assert bodies(history.find("orders")) == list(range(20))


async def test_pieces_are_found_from_any_working_directory(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Tasks of a cluster run in other directories."""
    monkeypatch.chdir(tmp_path)
    history = History("archive", data="data")
    selection = history.selection("orders")
    pieces = history.plan(selection)
    monkeypatch.chdir("/")
    assert sum(rows.num_rows for piece in pieces for rows in piece.read(selection)) == 30


async def test_a_segment_that_was_removed_after_archiving_causes_no_error(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """Archiver and retention run between planning and reading."""
    data, place = both
    plan_live = history_module.plan_live
    planned: list[Any] = []

    def plan_then_remove(*arguments: Any) -> Any:
        live = plan_live(*arguments)
        if not planned:
            planned.append(live)
            archive(data, place)
            for segment in (data / "message").iterdir():
                segment.unlink()
        return live

    monkeypatch.setattr(history_module, "plan_live", plan_then_remove)
    assert bodies(History(place, data=data).find("orders")) == list(range(30))


# --- copied segments ----------------------------------------------------------------------------


def segmented(data: Path) -> Filler:
    """270 messages in several segments, the last of which is not full."""
    filler = Filler(data)
    filler.rounds(90, size=400)
    return filler


def counted(place: Path, data: Path | None = None) -> int:
    rows = History(place, data=data).find("orders")
    assert rows["sequence"].to_pylist() == list(range(rows.num_rows))
    return rows.num_rows


def written(data: Path) -> list[Path]:
    """The segments of the message log that have rows."""
    return sorted(path for path in (data / "message").iterdir() if path.read_bytes()[:2] == b"PL")


@pytest.mark.parametrize("is_gone", [False, True])
def test_copied_segments_are_found_whether_the_log_has_them_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_gone: bool
):
    data, place = tmp_path / "data", tmp_path / "archive"
    segmented(data).stop()
    copy_segments(data, place)
    for segment in written(data)[:-1] if is_gone else []:
        segment.unlink()
    assert counted(place, data) == 270
    assert 0 < counted(place) < 270
    assert caplog.text == ""
    if not is_gone:
        # Parquet files have the rows from here on, and no row is found twice.
        archive(data, place)
        assert counted(place, data) == counted(place) == 270


def test_copied_segments_of_a_run_that_did_not_commit_are_ignored(tmp_path: Path):
    data, place = tmp_path / "data", tmp_path / "archive"
    segmented(data).stop()
    copy_segments(data, place)
    shutil.copy(written(data)[-1], next((place / "raw").iterdir()) / "message")
    assert counted(place, data) == 270
    assert counted(place) < 270


def test_a_copied_segment_that_is_missing_is_named(tmp_path: Path):
    data, place = tmp_path / "data", tmp_path / "archive"
    segmented(data).stop()
    copy_segments(data, place)
    min(next((place / "raw").iterdir()).glob("message/*.log")).unlink()
    with pytest.raises(ArchiveError, match=r"raw/.*\.log does not exist"):
        counted(place, data)


def test_segments_that_were_removed_before_they_were_copied_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data, place = tmp_path / "data", tmp_path / "archive"
    filler = segmented(data)
    copy_segments(data, place)
    reached = int(written(data)[-1].stem)
    filler.rounds(90, size=400)
    filler.stop()
    for segment in written(data)[:-1]:
        segment.unlink()
    History(place, data=data).find("orders")
    assert f"(offsets {reached} to {int(written(data)[0].stem)})" in caplog.text


def test_copied_segments_that_are_not_read_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The archive is on another machine."""
    data, place = tmp_path / "data", tmp_path / "archive"
    segmented(data).stop()
    copy_segments(data, place)
    monkeypatch.setattr(history_module, "is_readable", lambda archive: False)
    assert counted(place, data) == 270
    assert "has segments that are in no Parquet file, and they are not read" in caplog.text


# --- conditions ---------------------------------------------------------------------------------


async def test_find_by_key(both: tuple[Path, Path]):
    data, place = both
    expected = [number for number in range(30) if number % 5 and number % 3 == 1]
    assert bodies(History(place, data=data).find("orders", key="order-1")) == expected
    assert bodies(History(place, data=data).find("orders", key="order-9")) == []


async def test_find_by_a_key_that_is_a_number(tmp_path: Path):
    data, place = tmp_path / "data", tmp_path / "archive"
    async with serving(data) as client:
        await client.send("orders", b"body-1", key=17)
        await client.send("orders", b"body-2", key="18")
    archive(data, place)
    assert bodies(History(place).find("orders", key=17)) == [1]


def test_find_by_a_key_whose_send_moved_to_another_logical_partition(tmp_path: Path):
    """The hash of such a row is changed, except for the bits that distinguish keys."""
    data, place = tmp_path / "data", tmp_path / "archive"
    filler = Filler(data)
    filler.rounds(1)
    archive(data, place)
    moved = restamp(hash_keys(["key-1", "key-2"], 2), np.array([7], np.uint64))
    filler.node.submit(filler.producer.frame("orders", b"1", b"2", keys=["key-1", "key-2"], key_hashes=moved))
    filler.node.turn()
    filler.stop()
    rows = History(place, data=data).find("orders", key="key-2")
    assert rows["body"].to_pylist()[-1] == b"2"
    assert rows["logical_partition"].to_pylist()[-1] == 7


@pytest.mark.parametrize("number", [0, 13, 29])
async def test_find_by_message_id(both: tuple[Path, Path], number: int):
    data, place = both
    history = History(place, data=data)
    message_id = history.find("orders")["message_id"][number].as_py()
    assert bodies(history.find("orders", message_id=message_id)) == [number]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"number": 7}, [7]),
        ({"number": "27"}, [27]),
        ({"half": 2.5}, [5]),
        ({"odd": True, "number": 4}, []),
        ({"odd": False, "city": "BJS"}, list(range(0, 30, 2))),
        ({"nothing": "x"}, []),
    ],
)
async def test_find_by_headers_of_any_type(both: tuple[Path, Path], headers: dict[str, Any], expected: list[int]):
    data, place = both
    assert bodies(History(place, data=data).find("orders", headers=headers)) == expected
    of_key = [number for number in expected if number % 5 and number % 3 == 1]
    assert bodies(History(place, data=data).find("orders", key="order-1", headers=headers)) == of_key


async def test_find_by_time_including_the_start_and_excluding_the_end(both: tuple[Path, Path]):
    data, place = both
    history = History(place, data=data)
    times = history.find("orders")["store_time"].to_pylist()
    found = history.find("orders", since=times[15], until=times[25])["store_time"].to_pylist()
    assert found == [time for time in times if times[15] <= time < times[25]]
    assert history.find("orders", since=datetime.now(UTC) + timedelta(hours=1)).num_rows == 0
    assert history.find("orders", since="-1h").num_rows == 30


async def test_find_the_first_messages_up_to_a_limit(both: tuple[Path, Path]):
    data, place = both
    assert bodies(History(place, data=data).find("orders", limit=22)) == list(range(22))


async def test_files_after_the_limit_are_not_read(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ordering_module, "CUT_COUNT", 4)
    file_of(both[1], 2).unlink()
    assert bodies(History(both[1]).find("orders", limit=5)) == list(range(5))


async def test_a_key_in_every_file_does_not_read_all_files_before_the_first_result(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """Memory is limited by the files that are read ahead, not by their number."""
    history = History(both[1])
    selection = history.selection("orders", key="order-1")
    piece = history.plan(selection)[0]
    pieces: list[Piece] = [piece] * 100
    begun: list[int] = []
    read = type(piece).read

    def counted(*arguments: Any, **named: Any) -> Any:
        begun.append(1)
        return read(*arguments, **named)

    monkeypatch.setattr(type(piece), "read", counted)
    monkeypatch.setattr(history_module, "THREADS_MAX", 2)
    found = iter(history._read_ahead(pieces, selection, encoded=False))
    for taken in range(1, 101):
        next(found)
        assert history._threads is not None
        # Queued behind all files that the threads were given.
        history._threads.submit(len, begun).result()
        assert len(begun) <= taken + 4
    assert next(found, None) is None
    assert len(begun) == 100
    history.close()


def test_expired_messages_are_found_while_their_segment_exists(tmp_path: Path):
    data, place = tmp_path / "data", tmp_path / "archive"
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(2)
    archive(data, place)
    filler.rounds(2, seconds=60.0)
    filler.node.retention.run()
    filler.node.checkpoint()
    filler.stop()
    expired = plan(open_log(str(data)), WantedRows(frozenset(["orders"]))).chunks
    assert expired == []
    assert History(place, data=data).find("orders")["sequence"].to_pylist() == list(range(12))


# --- errors -------------------------------------------------------------------------------------


async def test_an_unknown_subject_is_an_error_that_lists_the_known_ones(both: tuple[Path, Path]):
    data, place = both
    with pytest.raises(SubjectNotFound, match=r"'order'.*orders, others"):
        History(place, data=data).find("order")
    with pytest.raises(SubjectNotFound):
        History(place).find("order", key="order-1")


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"key": ""}, "empty"),
        ({"key": 1.5}, "float"),
        ({"message_id": "17"}, "0123456789abcdef-17"),
        ({"headers": {"a": None}}, "NoneType"),
        ({"headers": {"": "x"}}, "header name"),
        ({"since": "yesterday"}, "yesterday"),
        ({"since": "2026-01-02", "until": "2026-01-01"}, "not before"),
        ({"limit": 0}, "limit"),
    ],
)
async def test_invalid_conditions_are_named(both: tuple[Path, Path], conditions: dict[str, Any], message: str):
    with pytest.raises(InvalidArgument, match=message):
        History(both[1]).find("orders", **conditions)


async def test_a_directory_that_is_no_data_directory_is_an_error(both: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(DataDirError, match="message"):
        History(both[1], data=tmp_path)
    with pytest.raises(InvalidArgument, match="both data and server are given"):
        History(both[1], data=both[0], server="plait://127.0.0.1:1")


async def test_copied_segments_are_refused_as_data_directory(tmp_path: Path):
    data, place = tmp_path / "data", tmp_path / "archive"
    three_days(data)
    copy_segments(data, place)
    archive(data, place)
    copies = next((place / "raw").iterdir())
    with pytest.raises(DataDirError, match="has segment files but"):
        History(place, data=copies)
    # A copy with the identity of its data directory is accepted, and no message is found twice.
    shutil.copy(data / "identity", tmp_path / "identity")
    shutil.copytree(data / "message", tmp_path / "message")
    assert History(place, data=tmp_path).find("orders").num_rows == History(place).find("orders").num_rows


async def test_a_damaged_identity_of_a_data_directory_is_refused(both: tuple[Path, Path]):
    data, place = both
    history = History(place, data=data)
    (data / "identity").write_bytes(b"\xff" * 16)
    with pytest.raises(DataDirError, match="the archive's manifest has it"):
        history.find("orders")


async def test_a_missing_file_is_named_with_the_missing_messages(both: tuple[Path, Path]):
    data, place = both
    file_of(place, 2).unlink()
    with pytest.raises(ArchiveError, match=r"subject=orders.*\.parquet does not exist.*8 messages"):
        History(place, data=data).find("orders")


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
async def test_a_damaged_file_is_named(both: tuple[Path, Path], damage: str):
    data, place = both
    path = file_of(place, 2)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[4:200] = bytes(196)
    else:
        content = bytearray(file_of(place, 1).read_bytes())
    path.write_bytes(content)
    with pytest.raises(ArchiveError, match=r"subject=orders.*\.parquet is damaged"):
        History(place, data=data).find("orders")


async def test_messages_that_retention_removed_before_archiving_are_reported(
    both: tuple[Path, Path], caplog: pytest.LogCaptureFixture
):
    data, place = both
    segment = next((data / "message").iterdir())
    segment.rename(segment.with_name(f"{1 << 30:020d}.log"))
    History(place, data=data).find("others")
    assert "retention removed them before they were archived" in caplog.text


def test_a_lookup_in_an_archive_imports_neither_spark_nor_pandas(both: tuple[Path, Path]):
    """Importing either takes longer than a lookup."""
    program = (
        "import sys; from plait.spark.history.lookup import History; "
        f"rows = History({str(both[1])!r}).find('orders', key='order-1', since='-1h'); "
        "assert rows.num_rows == 6; sys.exit('pyspark' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
