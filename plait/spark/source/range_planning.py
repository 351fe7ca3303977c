"""Plans the ranges of sequences that a query reads from its input between its bounds, and runs one of its tasks.

The driver calls the input, a stream calls it for every batch. A task then reads its part without the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import pyarrow as pa

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.client.types import PartitionName
from plait.errors import FrameError
from plait.frame.header import TIME_MAX
from plait.spark.inputs.archive_input import ArchiveInput, is_archive
from plait.spark.inputs.broker_input import BrokerInput, BrokerTask
from plait.spark.inputs.log_input import LogInput, LogTask
from plait.spark.inputs.parquet_files import ArchiveReadTask
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source.offsets import (
    EARLIEST,
    LATEST,
    TIME,
    PartitionOffset,
    check_end,
    check_start,
    life_at,
    lives_of,
    report,
)
from plait.spark.source.read_options import ReadOptions
from plait.spark.source.row_picker import Picker
from plait.spark.source.spark_columns import joined, record_batches, source_builders
from plait.storage.reading.log_chunks import WantedRows

#: What Spark jobs read: a data directory, brokers or an archive.
Input = LogInput | BrokerInput | ArchiveInput


def input_of(options: ReadOptions, wanted: WantedRows) -> Input:
    """The input that the options name."""
    if options.server:
        return BrokerInput(options, wanted)
    return ArchiveInput(options, wanted) if is_archive(options.path) else LogInput(options, wanted)


def read_task(
    task: LogTask | BrokerTask | ArchiveReadTask | None, options: ReadOptions, wanted: WantedRows, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a task as batches with the columns of the schema; nothing if ``task`` is None."""
    if task is None:
        return
    prepare_worker()
    if isinstance(task, ArchiveReadTask):
        yield from task.batches(options, wanted, schema)
        return
    try:
        # Brokers apply the filter themselves.
        picker = Picker.of(replace(wanted, filter=None) if isinstance(task, BrokerTask) else wanted)
        batches = record_batches(task.frames(options, wanted), schema, task.group, picker, source_builders(schema))
        yield from batches if picker is None and wanted.filter is None else joined(batches)
    except FrameError as error:
        raise task.damage(options, str(error)) from error


def batch_ranges(
    source: Input, options: ReadOptions, wanted: WantedRows
) -> tuple[list[SpanRange], list[PartitionSpan]]:
    """The ranges of a batch: from the starting to the ending offsets, narrowed by filters on sequence and time."""
    times = [options.start.time, options.end.time, wanted.time_min, min(wanted.time_max + 1, TIME_MAX)]
    filtered = wanted.time_min > 0 or wanted.time_max < TIME_MAX
    spans = source.spans(times if filtered or TIME in (options.start.kind, options.end.kind) else ())
    options.start.check_names("startingOffsets", spans, wanted)
    options.end.check_names("endingOffsets", spans, wanted)
    losses: list[str] = []
    ranges = []
    for lives in lives_of(spans).values():
        first, last = options.start.resolve(lives, EARLIEST, 0), options.end.resolve(lives, LATEST, 1)
        for span, start, end in checked(lives, first, last, losses):
            if filtered:
                start, end = max(start, span.at[2]), min(end, span.until[3])
            start, end = max(start, wanted.sequence_min), min(end, wanted.sequence_max + 1)
            if start < end:
                ranges.append(span.range(start, end))
    report(losses, fail=options.fail_on_loss)
    return ranges, spans


def checked(
    lives: Sequence[PartitionSpan], start: PartitionOffset, end: PartitionOffset, losses: list[str]
) -> Iterator[tuple[PartitionSpan, int, int]]:
    """The existing sequences of each life between two offsets; appends descriptions of lost messages to ``losses``."""
    begin, finish = life_at(lives, start), life_at(lives, end)
    for index, span in enumerate(lives[begin : finish + 1], begin):
        first, lost_before = check_start(span, start) if index == begin else (span.start, None)
        last, lost_after = check_end(span, end) if index == finish else (span.end, None)
        losses += [loss for loss in (lost_before, lost_after) if loss is not None]
        yield span, first, last


def limited(
    source: Input,
    ranges: Sequence[SpanRange],
    messages: int | None,
    size: int | None,
) -> dict[PartitionName, int]:
    """The end of each range, such that all ranges together have at most ``messages`` messages and about ``size`` bytes.

    Each partition gets a share in proportion to its range, so that none falls behind; one frame or message at least.
    """
    ends = {each.place: each.end for each in ranges}
    if messages is not None:
        total = sum(each.end - each.start for each in ranges)
        if total > messages:
            shares = _shares([each.end - each.start for each in ranges], messages)
            ends = {each.place: each.start + share for each, share in zip(ranges, shares, strict=True)}
    if size is not None:
        ranges = [msgspec.structs.replace(each, end=ends[each.place]) for each in ranges]
        sizes = source.sizes(ranges)
        if sum(sizes) > size:
            full = [(each, own) for each, own in zip(ranges, sizes, strict=True) if own]
            shares = _shares([own for _, own in full], size)
            for (each, _), end in zip(full, source.reach([each for each, _ in full], shares), strict=True):
                ends[each.place] = min(end, ends[each.place])
    return ends


def _shares(amounts: Sequence[int], limit: int) -> list[int]:
    """``limit`` in proportion to the amounts. The remainder of rounding goes to the smallest shares, and among equal
    shares to the largest amounts."""
    total = sum(amounts)
    shares = [amount * limit // total for amount in amounts]
    left = limit - sum(shares)
    for index in sorted(range(len(amounts)), key=lambda index: (shares[index], -amounts[index])):
        if left and shares[index] < amounts[index]:
            shares[index] += 1
            left -= 1
    return shares


def stream_ranges(
    spans: Sequence[PartitionSpan],
    start: Mapping[str, PartitionOffset],
    end: Mapping[str, PartitionOffset],
    *,
    fail: bool,
) -> list[SpanRange]:
    """The ranges between two offsets of a stream: the same messages as when the batch was planned, or a report of
    losses."""
    known = lives_of(spans)
    losses: list[str] = []
    ranges = []
    for name, last in end.items():
        lives = known.get(name)
        first = start.get(name, last)
        if last.since is not None and start.get(name) != last:
            first = PartitionOffset(last.since, number=last.number)
        if lives is None:
            if first.sequence < last.sequence:
                losses.append(f"{name} is gone, with its messages up to sequence {last.sequence}")
            continue
        for span, begin, finish in checked(lives, first, last, losses):
            if begin < finish:
                ranges.append(span.range(begin, finish))
    report(losses, fail=fail)
    return ranges
