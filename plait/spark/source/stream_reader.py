"""``spark.readStream.format("plait")``: messages as they come, with offsets that Spark keeps in its checkpoint.

An offset names the next sequence of every partition, with the epoch of the message before it and the partition's
number, as JSON with sorted names: Spark compares offsets as texts. Where the offset that a batch starts from does not
say where a partition begins, the one that it ends with does: in the first batch of a query, and of a partition.
Between two offsets lie the same messages whenever they are asked for, or the query fails with what was lost; so a sink
that Spark writes once for each batch has every message once, whatever was killed in between. Nothing is ever acked:
Spark's checkpoint alone says how far a query is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from plait.spark.inputs.input import Input, place_of
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source.offsets import (
    EARLIEST,
    TIME,
    OffsetJson,
    PartitionOffset,
    check_start,
    life_at,
    lives_of,
    report,
)
from plait.spark.source.range_planning import limited, stream_ranges
from plait.spark.source.read_options import ReadOptions
from plait.spark.source.task_reading import read_task

#: The next message of each partition, by the partition's name.
Offset = dict[str, OffsetJson]


class PlaitStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process beside the driver for as long as the query; a copy of it reads in each task."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._place: Input | None = None
        #: Where each partition, by its name and number, ended when a query that is to end began.
        self._target: dict[tuple[str, int], int] | None = None
        #: Partitions that are gone, which was said.
        self._gone: set[str] = set()
        #: What there was at the last look.
        self._latest: Offset | None = None
        #: Where this query began. Spark asks for it again when it reads the first batch again.
        self._initial: Offset | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Links and what is known of files stay where they are."""
        return {**self.__dict__, "_place": None}

    def _there(self) -> Input:
        if self._place is None:
            prepare_worker()
            self._place = place_of(self.options, self.options.wanted)
        return self._place

    # --- offsets --------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        """Where a new query starts; one that goes on starts where its checkpoint says."""
        bound = self.options.start
        spans = self._there().spans([bound.time] if bound.kind == TIME else ())
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
        """What the options say; where both do, bytes are looked at in ``latestOffset``, as Spark passes one on."""
        options = self.options
        if options.messages_per_trigger is not None:
            return ReadMaxRows(options.messages_per_trigger)
        if options.bytes_per_trigger is not None:
            return ReadMaxBytes(options.bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Where the next batch ends: all that there is, or what the limit lets through."""
        positions = _positions(start)
        place = self._there()
        there = lives_of(place.spans())
        self._latest = _offset({name: PartitionOffset.of(lives[-1], lives[-1].end) for name, lives in there.items()})
        spans = {name: _current(lives, positions, name) for name, lives in there.items()}
        # Retention has emptied a partition that was read to its end, and the route has left it out.
        positions = {name: each for name, each in positions.items() if name in spans or not each.sealed}
        ranges = self._unread(spans, positions)
        if not isinstance(limit, ReadAllAvailable):
            messages = limit.max_rows if isinstance(limit, ReadMaxRows) else self.options.messages_per_trigger
            size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.bytes_per_trigger
            ends = limited(place, ranges, messages, size)
            ranges = [msgspec.structs.replace(each, end=ends[each.place]) for each in ranges]
        for each in ranges:
            name = str(each.place)
            sealed = spans[name].sealed and each.end == spans[name].end
            known = positions.get(name)
            # What is lost is left behind at once, though nothing follows it yet: it is said once, not at every look.
            old = known is None or known.sealed != sealed or check_start(spans[name], known)[1] is not None
            if each.end > each.start or old:
                position = replace(PartitionOffset.of(spans[name], each.end), sealed=sealed)
                if each.end > each.start and (known is None or start == self._initial):
                    position = replace(position, since=each.start)
                positions[name] = position
        return _offset(positions)

    def _unread(self, spans: Mapping[str, PartitionSpan], positions: Mapping[str, PartitionOffset]) -> list[SpanRange]:
        """What each partition has from its position on; partitions that are new from their first message on."""
        # Their places are kept: should they come back, they are not read from the start.
        gone = positions.keys() - spans.keys() - self._gone
        losses = [
            f"{name} is gone, with what it had from sequence {positions[name].sequence} on" for name in sorted(gone)
        ]
        ranges = []
        expires = self._there().expires
        for name, span in spans.items():
            # A partition that is new was made since the query began: it is read from its first message on.
            new = PartitionOffset(0 if expires else span.start)
            first, lost = check_start(span, positions.get(name, new))
            losses += [lost] if lost is not None else []
            end = span.end if self._target is None else min(self._target.get((name, span.number), first), span.end)
            ranges.append(span.range(first, max(first, end)))
        report(losses, fail=self.options.fail_on_loss)
        self._gone |= gone
        return ranges

    def reportLatestOffset(self) -> Offset | None:
        """What there was when the last batch was planned, for the query's progress."""
        return self._latest

    def prepareForTriggerAvailableNow(self) -> None:
        """The query is to end with what is there now."""
        self._target = {(str(span.place), span.number): span.end for span in self._there().spans()}

    # --- batches --------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One task for each partition's range, or for each part of a segment file, unless more are asked for."""
        if start == end:
            return []
        place, options = self._there(), self.options
        spans = place.spans()
        ranges = stream_ranges(spans, _positions(start), _positions(end), fail=options.fail_on_loss)
        tasks: list[Any] = place.tasks(ranges, spans, options.partitions_min or 1)
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, each partition's in order."""
        return read_task(partition.value, self.options, self.options.wanted, self.arrow_schema)

    def commit(self, end: Offset) -> None:
        """Nothing: a batch is done when Spark's checkpoint says so, and that comes too late to tell brokers."""

    def stop(self) -> None:
        """Hang up."""
        if self._place is not None:
            self._place.close()


def _current(lives: Sequence[PartitionSpan], positions: dict[str, PartitionOffset], name: str) -> PartitionSpan:
    """The life that a partition's place is in; where that is read to its end, the place moves on to the next one."""
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
