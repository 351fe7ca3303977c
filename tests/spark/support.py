"""Helpers for tests of the source: readers as plain Python objects, and the rows they read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from plait.spark.source.data_source import PlaitDataSource, PlaitReader
from plait.spark.source.stream_reader import Offset, PlaitStreamReader
from plait.storage.disk import RealDisk
from tests.support.broker_node import Node, Producer


def batch_reader(**options: Any) -> PlaitReader:
    """A reader, made as Spark makes it."""
    source = PlaitDataSource({name: str(value) for name, value in {"subject": "orders", **options}.items()})
    reader = source.reader(source.schema())
    assert isinstance(reader, PlaitReader)
    return reader


def batches_of(reader: PlaitReader) -> list[pa.RecordBatch]:
    """The batches of all its tasks, one task after another."""
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    for batch in batches:
        batch.validate(full=True)
    return batches


def rows_of(reader: PlaitReader) -> list[dict[str, Any]]:
    """The rows of all its tasks, one task after another."""
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches_of(reader), reader.arrow_schema).to_pylist()
    return rows


def column(name: str, **options: Any) -> list[Any]:
    """The values of one column that a batch with these options reads."""
    return [row[name] for row in rows_of(batch_reader(columns=name, **options))]


def fill(path: Path, *frames: Sequence[bytes], **columns: Any) -> None:
    """Make a data directory with these frames of subject ``orders``, all with the same columns."""
    node, producer = Node(RealDisk(path), message_segment_size=1 << 24), Producer(5)
    for sent in frames:
        node.submit(producer.frame("orders", *sent, **columns))
        node.turn()
    node.broker.stop()


def bodies(**options: Any) -> list[bytes]:
    """The bodies that a batch with these options reads."""
    return column("body", **options)


class Stream:
    """A stream that a test drives: each ``step`` is a micro-batch."""

    def __init__(self, start: Offset | None = None, **options: Any) -> None:
        source = PlaitDataSource({name: str(value) for name, value in {"subject": "orders", **options}.items()})
        reader = source.streamReader(source.schema())
        assert isinstance(reader, PlaitStreamReader)
        self.reader = reader
        # Closed like the reader of a query that ends, because it has a connection.
        weakref.finalize(self, reader.stop).atexit = False
        #: The offset up to which batches were read.
        self.offset = reader.initialOffset() if start is None else start

    def step(self, limit: ReadLimit | None = None) -> list[dict[str, Any]]:
        """Plan the next batch and read it."""
        end = self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())
        rows = self.read(self.offset, end)
        self.offset = end
        return rows

    def read(self, start: Offset, end: Offset) -> list[dict[str, Any]]:
        """The rows between two offsets."""
        batches = [b for partition in self.reader.partitions(start, end) for b in self.reader.read(partition)]
        rows: list[dict[str, Any]] = pa.Table.from_batches(batches, self.reader.arrow_schema).to_pylist()
        return rows

    def bodies(self, limit: ReadLimit | None = None) -> list[bytes]:
        return [row["body"] for row in self.step(limit)]

    def all_bodies(self) -> list[bytes]:
        """The bodies of one batch without a limit."""
        return self.bodies(ReadAllAvailable())


def lose_tail(data: Path, frames: int) -> None:
    """Remove the last frames, which a power failure lost before they were written."""
    (segment,) = [path for path in (data / "message").iterdir() if path.stat().st_blocks]
    content = bytearray(segment.read_bytes())
    places = []
    position = 0
    while content[position : position + 2] == b"PL":
        places.append(position)
        position += int.from_bytes(content[position + 4 : position + 8], "little")
    content[places[-frames] :] = bytes(len(content) - places[-frames])
    segment.write_bytes(content)
