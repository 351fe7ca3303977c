"""``spark.readStream.format("plait")``: messages as they arrive, with offsets that Spark keeps in its checkpoint.

An offset has the next sequence of every partition, with the epoch of the message before it and the partition's number,
as JSON with sorted names, since Spark compares offsets as text. In the first batch that reads a partition, the ending
offset also has the sequence where reading begins (``from``), as the starting offset may not have it.

Promise: reading between two offsets always gives the same messages, or fails and names the lost messages. So a sink
that Spark writes once for each batch has every message once, even if a process was killed in between. The reader acks
nothing, because Spark's checkpoint alone records the progress of a query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source.offsets import (
    EARLIEST,
    TIME,
    PartitionOffset,
    check_start,
    life_at,
    lives_of,
    report,
)
from plait.spark.source.range_planning import Input, input_of, limited, read_task, stream_ranges
from plait.spark.source.read_options import ReadOptions

#: The next message of each partition, by the partition's name.
Offset = dict[str, dict[str, int]]


class PlaitStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Runs in a process beside the driver for the duration of the query; a pickled copy reads in each task."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._source: Input | None = None
        #: (partition, number) → its end when a query with ``availableNow`` began; None: the query does not end.
        self._target: dict[tuple[str, int], int] | None = None
        #: Partitions that are gone and were reported.
        self._gone: set[str] = set()
        #: The ends of all partitions when the last batch was planned.
        self._latest: Offset | None = None
        #: Where this query began. Spark passes it again when it reads the first batch again.
        self._initial: Offset | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: without the input, whose connections and index of the files are not pickled."""
        return {**self.__dict__, "_source": None}

    def _input(self) -> Input:
        if self._source is None:
            prepare_worker()
            self._source = input_of(self.options, self.options.wanted)
        return self._source

    # --- offsets --------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        """Where a new query starts; a resumed query starts from its checkpoint."""
        bound = self.options.start
        spans = self._input().spans([bound.time] if bound.kind == TIME else ())
        bound.check_names("startingOffsets", spans, self.options.wanted)
        losses: list[str] = []
        positions = {}
        for name, lives in lives_of(spans).items():
            start = bound.resolve(lives, EARLIEST, 0)
            span = lives[life_at(lives, start)]
            first, lost = check_start(span, start)
            losses += [lost] if lost is not None else []
            positions[name] = PartitionOffset.of(span, first)
        report(losses, fail=self.options.fail_on_loss)
        self._initial = _offset(positions)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of the options. Spark passes one limit on: if both are given, ``latestOffset`` applies both."""
        options = self.options
        if options.messages_per_trigger is not None:
            return ReadMaxRows(options.messages_per_trigger)
        if options.bytes_per_trigger is not None:
            return ReadMaxBytes(options.bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Where the next batch ends: at the end of all partitions, or earlier if a limit applies."""
        positions = _positions(start)
        source = self._input()
        found = lives_of(source.spans())
        self._latest = _offset({name: PartitionOffset.of(lives[-1], lives[-1].end) for name, lives in found.items()})
        spans = {name: _current(lives, positions, name) for name, lives in found.items()}
        # Drop sealed partitions that were read to their end and have been retired from the route.
        positions = {name: each for name, each in positions.items() if name in spans or not each.sealed}
        ranges = self._unread(spans, positions)
        if not isinstance(limit, ReadAllAvailable):
            messages = limit.max_rows if isinstance(limit, ReadMaxRows) else self.options.messages_per_trigger
            size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.bytes_per_trigger
            ends = limited(source, ranges, messages, size)
            ranges = [msgspec.structs.replace(each, end=ends[each.place]) for each in ranges]
        for each in ranges:
            name = str(each.place)
            sealed = int(spans[name].sealed and each.end == spans[name].end)
            known = positions.get(name)
            # Move past lost messages even if nothing follows them yet, so that they are reported once.
            old = known is None or known.sealed != sealed or check_start(spans[name], known)[1] is not None
            if each.end > each.start or old:
                position = msgspec.structs.replace(PartitionOffset.of(spans[name], each.end), sealed=sealed)
                if each.end > each.start and (known is None or start == self._initial):
                    position = msgspec.structs.replace(position, since=each.start)
                positions[name] = position
        return _offset(positions)

    def _unread(self, spans: Mapping[str, PartitionSpan], positions: Mapping[str, PartitionOffset]) -> list[SpanRange]:
        """The unread range of each partition; a new partition is read from its first message."""
        # The positions of partitions that are gone stay in the offset: if they come back, they are not read again.
        gone = positions.keys() - spans.keys() - self._gone
        losses = [
            f"{name} is gone, with its messages from sequence {positions[name].sequence} on" for name in sorted(gone)
        ]
        ranges = []
        expires = self._input().expires
        for name, span in spans.items():
            # A new partition was created after the query began: read it from its first message.
            new = PartitionOffset(0 if expires else span.start)
            first, lost = check_start(span, positions.get(name, new))
            losses += [lost] if lost is not None else []
            end = span.end if self._target is None else min(self._target.get((name, span.number), first), span.end)
            ranges.append(span.range(first, max(first, end)))
        report(losses, fail=self.options.fail_on_loss)
        self._gone |= gone
        return ranges

    def reportLatestOffset(self) -> Offset | None:
        """The ends of all partitions when the last batch was planned, for the progress of the query."""
        return self._latest

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end with the messages that exist now."""
        self._target = {(str(span.place), span.number): span.end for span in self._input().spans()}

    # --- batches --------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One task for each range of a partition or part of a segment file, or more with ``minPartitions``."""
        if start == end:
            return []
        source, options = self._input(), self.options
        spans = source.spans()
        ranges = stream_ranges(spans, _positions(start), _positions(end), fail=options.fail_on_loss)
        tasks: list[Any] = source.tasks(ranges, spans, options.partitions_min or 1)
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, in order for each partition."""
        return read_task(partition.value, self.options, self.options.wanted, self.arrow_schema)

    def commit(self, end: Offset) -> None:
        """Does nothing: Spark's checkpoint records the progress, and brokers get no acks."""

    def stop(self) -> None:
        """Close the connections."""
        if self._source is not None:
            self._source.close()


def _current(lives: Sequence[PartitionSpan], positions: dict[str, PartitionOffset], name: str) -> PartitionSpan:
    """The life to read next. If the life of the position is read to its end, the position moves to the next life."""
    position = positions.get(name)
    if position is None:
        return lives[0]
    index = life_at(lives, position)
    span = lives[index]
    if len(lives) == index + 1 or position.sequence < span.end:
        return span
    span = lives[index + 1]
    positions[name] = PartitionOffset.of(span, span.start)
    return span


def _offset(positions: Mapping[str, PartitionOffset]) -> Offset:
    return {name: positions[name].to_json() for name in sorted(positions)}


def _positions(offset: Mapping[str, Any]) -> dict[str, PartitionOffset]:
    return {name: PartitionOffset.from_json(name, value) for name, value in offset.items()}
