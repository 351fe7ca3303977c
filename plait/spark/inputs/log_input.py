"""The input for a data directory: reads its segment files, which a server may be writing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.errors import DamageError, Expired
from plait.frame.view import FrameView
from plait.spark.source.offsets import check_epoch
from plait.spark.source.read_options import ReadOptions
from plait.storage.disk import RealDisk
from plait.storage.logs import consume_log as arithmetic
from plait.storage.logs.consume_log import Records
from plait.storage.reading.log_chunks import ChunkPartition, ChunkPlan, LogChunk, WantedRows, plan, read_chunk
from plait.storage.reading.log_index import LogIndex
from plait.storage.reading.log_reader import damage_error, open_log

log = logging.getLogger("plait.spark")


@dataclass(frozen=True)
class LogTask:
    """Reads a part of one segment file."""

    chunk: LogChunk
    group: str
    #: Partition name → its span when the query was planned. Partitions without a span are not checked.
    spans: Mapping[str, PartitionSpan] = field(default_factory=dict)

    def frames(self, options: ReadOptions, wanted: WantedRows) -> Iterator[tuple[ChunkPartition, FrameView]]:
        disk = RealDisk(options.path, read_only=True)
        for member in read_chunk(disk, options.path, self.chunk, wanted, fail_on_damage=options.fail_on_damage):
            span = self.spans.get(member[0].name)
            if span is not None:
                check_epoch(span, member[1])
            yield member

    def damage(self, options: ReadOptions, reason: str) -> DamageError:
        chunk = self.chunk
        return damage_error(options.path, chunk.segment, chunk.start, chunk.end - chunk.start, reason)


class LogInput:
    """A data directory."""

    expires = True

    def __init__(self, options: ReadOptions, wanted: WantedRows) -> None:
        self._options = options
        self._wanted = wanted
        self._index = LogIndex(lambda: open_log(options.path), wanted, fail_on_damage=options.fail_on_damage)

    def spans(self, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """Built from the headers of all frames; later calls read the headers of new frames only."""
        self._index.refresh()
        found = []
        for number, partition in sorted(self._index.partitions.items()):
            start, end, records = partition.start, partition.end, partition.records
            at = np.maximum(arithmetic.first_at(records, times, end), start).tolist()
            until = np.minimum(arithmetic.end_before(records, times, start), end).tolist()
            row, group = partition.row, self._options.group
            sealed = row.lps == []
            found.append(
                PartitionSpan(row.name, row.subject, number, start, end, partition.epochs, at, until, group, sealed)
            )
        return found

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _records(self, each: SpanRange) -> Records:
        return self._index.partitions[each.number].between(each.start, each.end)

    def _wanted_of(self, records: Records) -> Records:
        """The records that pass the filters on store time."""
        times = records["time"]
        return records[(times >= self._wanted.time_min) & (times <= self._wanted.time_max)]

    def sizes(self, ranges: Sequence[SpanRange]) -> list[int]:
        """As of the last call of ``spans``."""
        return [int(arithmetic.sizes_in(self._records(each), each.start, each.end).sum()) for each in ranges]

    def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[int]:
        """As of the last call of ``spans``."""
        return [
            arithmetic.reach(self._records(each), each.start, each.end, size)
            for each, size in zip(ranges, sizes, strict=True)
        ]

    def tasks(self, ranges: Sequence[SpanRange], spans: Sequence[PartitionSpan], tasks_min: int) -> list[LogTask]:
        """Tasks for parts of segment files, from the first frame of the ranges to the last."""
        ranges = [each for each in ranges if each.start < each.end]
        records = [found for each in ranges if len(found := self._wanted_of(self._records(each)))]
        if not records:
            return []
        first = min(int(found["offset"][0]) for found in records)
        end = max(int(found["offset"][-1]) + int(found["size"][-1]) for found in records)
        options = self._options
        reader = open_log(options.path)
        reader.skip_before(first)
        bases = {path: base for base, path in reader.files}
        oldest = reader.files[0] if reader.files else (end, "")
        planned = plan(
            reader,
            self._wanted,
            chunks_min=tasks_min,
            fail_on_damage=options.fail_on_damage,
            bounds={each.number: (each.start, each.end) for each in ranges},
        )
        reached = max((bases[chunk.segment] + chunk.end for chunk in planned.chunks), default=0)
        # Retention removes the oldest segments first: a segment that exists after the planning existed throughout.
        exists = oldest[0] <= first and reader.disk.exists(oldest[1])
        if not exists or (reached < end and not planned.damages):
            raise Expired(f"{options.path}: messages were removed while the query was planned; run it again")
        return self._tasks_of(planned, {span.name: span for span in spans})

    def all_tasks(self, tasks_min: int) -> list[LogTask]:
        """Tasks for all messages, from one pass over the files."""
        options = self._options
        planned = plan(
            open_log(options.path), self._wanted, chunks_min=tasks_min, fail_on_damage=options.fail_on_damage
        )
        return self._tasks_of(planned)

    def _tasks_of(self, planned: ChunkPlan, spans: Mapping[str, PartitionSpan] | None = None) -> list[LogTask]:
        if planned.damages:
            size = sum(damage.size for damage in planned.damages)
            log.warning("%s: %d damaged bytes are left out; run 'plait doctor'", self._options.path, size)
        return [LogTask(chunk, self._options.group, spans or {}) for chunk in planned.chunks]
