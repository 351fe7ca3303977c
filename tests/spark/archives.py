"""Helpers for tests of archives: filled data directories, and the rows of an archive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from plait import chance
from plait.broker.groups.group import AttachedConsumer
from plait.client.send.open_rows import hash_keys
from plait.errors import from_code
from plait.frame.view import FrameView
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving.archive_tasks import Job, TaskFacts
from plait.spark.archiving.archiver import ArchiveReport
from plait.spark.archiving.file_writer import MESSAGE_SCHEMA, read_batches
from plait.spark.archiving.manifest import Archive, ArchiveManifest
from plait.spark.source.spark_columns import STORED_COLUMNS, record_batches
from plait.storage.disk import RealDisk
from plait.storage.logs.recovery import LogScan
from plait.storage.logs.retained_log import DIRECTORY as KEPT
from plait.storage.logs.retained_log import is_header, note_of
from plait.storage.reading.log_chunks import WantedRows, plan, read_chunk
from plait.storage.reading.log_reader import LogReader, open_log
from tests.support.broker_node import Node, Producer

SCHEMA = pa.schema([pa.field(name, column.type, column.nullable) for name, column in STORED_COLUMNS.items()])
DAY = 86_400.0
#: The producer id of a ``Filler``.
FILLER = 5


class Filler:
    """Sends to a node and lets a group consume, round after round."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.node = Node(RealDisk(root), **settings)
        self.producer = Producer(FILLER)
        self.consumers = {"orders": self.node.attach("orders", "billing", "worker")}
        self.sent = 0

    def rounds(self, count: int, subjects: Sequence[str] = ("orders",), size: int = 100, seconds: float = 1.0) -> None:
        for _ in range(count):
            for subject in subjects:
                numbers = range(self.sent, self.sent + 3)
                keys = [("", f"key-{n % 7}", f"key-{n % 11}")[n % 3] for n in numbers]
                bodies = [b"%d:" % n + b"x" * size for n in numbers]
                frame = self.producer.frame(subject, *bodies, keys=keys, key_hashes=hash_keys(keys, 3))
                self.node.submit(frame)
                self.sent += 3
            self.node.turn()
            for consumer in self.consumers.values():
                for start, end, _ in self.node.pull(consumer).ranges:
                    self.node.ack(consumer, (start, end))
            self.node.clock.advance(seconds)

    def failing(self, group: str = "failing", attempts: int = 1) -> AttachedConsumer:
        """A consumer of "orders" whose messages become dead letters after ``attempts`` attempts."""
        return self.node.attach("orders", group, f"{group}-worker", retry=Retry(attempts=attempts))

    def fail(self, consumer: AttachedConsumer, reason: Reason, count: int = 1000) -> int:
        """Nack up to ``count`` messages; returns how many."""
        ranges = self.node.pull(consumer, count).ranges
        self.node.nack(consumer, *[(start, end) for start, end, _ in ranges], reason=reason)
        return sum(end - start for start, end, _ in ranges)

    def stop(self) -> None:
        self.node.broker.stop()


def three_days(root: Path) -> Path:
    """A data directory with three subjects over three days, in many segments of both logs."""
    filler = Filler(root)
    filler.rounds(40, ("orders", "refunds"), seconds=DAY / 20)
    filler.rounds(2, ("rare",))
    filler.stop()
    return root


def read_file(archive: Archive, relative: str) -> pa.Table:
    """All rows of an archived file."""
    batches = list(read_batches(archive, relative))
    return pa.Table.from_batches(batches, batches[0].schema if batches else MESSAGE_SCHEMA)


def damage(path: Path, after: int = 2000) -> int:
    """Damage a frame of a segment; returns its offset."""
    content = bytearray(path.read_bytes())
    offset = content.index(b"PL", after)
    content[offset + 90] ^= 0xFF
    path.write_bytes(content)
    return offset


def damage_frames(data: Path, *sequences: int) -> None:
    """Damage messages in frames of a filler that begin with these sequences; the headers stay valid."""
    for path in (data / "message").iterdir():
        with path.open("r+b") as file:
            content = file.read()
            position = 0
            while content[position : position + 2] == b"PL":
                view = FrameView(memoryview(content), position)
                position += view.size
                if view.producer == FILLER and view.base in sequences:
                    file.seek(position - 1)
                    file.write(bytes([content[position - 1] ^ 0xFF]))


def log_rows(root: Path) -> list[dict[str, Any]]:
    """Every message of a data directory, from the log."""
    reader = open_log(str(root))
    wanted = WantedRows(prefixes=("",))
    planned = plan(reader, wanted, expired=True)
    rows: list[dict[str, Any]] = []
    for chunk in planned.chunks:
        frames = read_chunk(reader.disk, str(root), chunk, wanted)
        rows += pa.Table.from_batches(record_batches(frames, SCHEMA, "g1"), SCHEMA).to_pylist()
    return sorted(rows, key=place)


def commit_next(archive: Archive, **changes: Any) -> ArchiveManifest:
    """Commit a manifest that differs from the newest one."""
    newest = archive.open()
    following = msgspec.structs.replace(
        newest, number=newest.number + 1, writer=chance.token(8), previous=newest.writer, **changes
    )
    archive.commit(following)
    return following


def archived_rows(to: Path | str, manifest: ArchiveManifest | None = None) -> list[dict[str, Any]]:
    """Every message that the manifest of an archive names."""
    archive = Archive.at(to)
    rows: list[dict[str, Any]] = []
    for file in (manifest or archive.open()).find("messages"):
        rows += [{"subject": file.subject, **row} for row in read_file(archive, file.path).to_pylist()]
    return sorted(rows, key=place)


def archived_events(to: Path | str) -> list[dict[str, Any]]:
    """Every event of an archive, in log order."""
    archive = Archive.at(to)
    files = sorted(archive.open().find("actions"), key=lambda file: file.start)
    rows = [row for file in files for row in read_file(archive, file.path).to_pylist()]
    return sorted(rows, key=lambda row: (row["log_offset"], row["log_row"]))


def log_deaths(data: Path) -> list[tuple[Any, ...]]:
    """Every death in the retained log of a data directory, in log order."""
    reader = LogReader(RealDisk(data, read_only=True), KEPT)
    found = []
    for offset, frame in LogScan(reader.mapped(), reader.files[0][0], stamps_durable=False):
        death = None if is_header(frame) else note_of(frame).death
        if death is not None:
            reason = death.reason
            words = (reason.type or None, reason.text or None, reason.handler or None)
            times = (death.first_time, death.last_time, death.attempts)
            found += [(offset, sequence, *words, *times) for sequence in frame.sequences().tolist()]
    return found


def archived_deaths(to: Path | str) -> list[tuple[Any, ...]]:
    """Every death in an archive, in log order."""
    return [
        tuple(row[name] for name in ("log_offset", "sequence", "type", "text", "handler"))
        + tuple(int(row[name].timestamp() * 1_000_000) for name in ("first_failure", "time"))
        + (row["attempts"],)
        for row in death_rows(to)
    ]


def death_rows(to: Path | str) -> list[dict[str, Any]]:
    archive = Archive.at(to)
    files = sorted(archive.open().find("deaths"), key=lambda file: (file.start, file.date))
    return [row for file in files for row in read_file(archive, file.path).to_pylist()]


def place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["partition"], row["epoch"], row["sequence"]


def run_here(spark: object, job: Job, step: str, progress: object = None) -> list[TaskFacts]:
    """Like ``run_job``, but runs the tasks one after another in this process."""
    facts = [job.run(task) for task in job.tasks]
    for fact in facts:
        if fact.error is not None:
            raise from_code(*fact.error)
    return facts


def archive_here(data: Path | None, to: Path | str, **options: Any) -> ArchiveReport:
    """``plait.spark.archive`` without Spark; needs the fixture `here`."""
    return archiving.archive(None if data is None else str(data), to, spark=object(), **options)  # type: ignore[arg-type]


def files_below(to: Path) -> Iterator[str]:
    """All Parquet files and copied segments in the directory, whether a manifest names them or not."""
    for path in sorted(to.rglob("*")):
        if path.is_file() and "_plait" not in path.parts:
            yield str(path.relative_to(to))
