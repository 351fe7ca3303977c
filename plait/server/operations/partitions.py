"""Requests about partitions: broker orders of a meta server, stages of the Spark sink, and spans to plan reads with.

The replies about spans are computed from the consume log, with array operations. No message is read and no state
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from plait.broker.partitions import sealing
from plait.broker.partitions.partition import Partition
from plait.errors import InvalidArgument, PlaitError
from plait.limits import MIB, STAGES_PAGE_MAX
from plait.model import names
from plait.server.broker_host import BrokerHost
from plait.storage.catalog import Stage
from plait.storage.logs import consume_log as spans
from plait.storage.logs.consume_log import Records
from plait.wire.admin.partitions import (
    CutSpans,
    DescribeSpans,
    DropPartition,
    DropStages,
    NameStages,
    OpenPartition,
    OpenStage,
    ReadStage,
    SealPartition,
    SpanCuts,
    SpanRow,
)

#: Called once with the result, or with the error.
Answer = Callable[[Any, PlaitError | None], None]
#: Bytes of a stage that one request reads.
READ_SIZE: Final = 4 * MIB
#: Partitions and times in one request: the reply takes a few milliseconds.
SPAN_NAMES_MAX = 1_000
SPAN_TIMES_MAX = 64
#: Cuts of one range, well below the size of a packet. Beyond it the pieces are larger than requested.
CUTS_MAX = 100_000
_NUMBER_MAX: Final = 1 << 63


def open_partition(host: BrokerHost, request: OpenPartition, answer: Answer) -> None:
    names.check("subject", request.subject)
    names.check_partition(request.name)
    sealing.open_lps(host.broker, request.subject, request.name, request.lps, request.version, request.settings)
    host.broker.turn.answer_when_durable(lambda: answer(None, None))


def seal_partition(host: BrokerHost, request: SealPartition, answer: Answer) -> None:
    sealing.seal(host.broker, request.name, request.lps, request.version, lambda fences: answer(fences, None))


def drop_partition(host: BrokerHost, request: DropPartition, answer: Answer) -> None:
    sealing.drop(host.broker, request.subject, request.name, request.version)
    host.broker.turn.answer_when_durable(lambda: answer(None, None))


def open_stage(host: BrokerHost, request: OpenStage) -> int:
    """Answered after the commit: after a crash an uncommitted number is given to another partition."""
    names.check_partition(request.name)
    names.check("query", request.query)
    _check_numbers([request.producer, request.batch])
    stage = Stage(request.producer, request.query, request.batch, request.delayed)
    return host.broker.stages.open(request.name, stage).id


def complete(host: BrokerHost, request: NameStages, answer: Answer) -> None:
    host.broker.stages.complete(_checked(request), lambda error: answer(None, error))


def publish(host: BrokerHost, request: NameStages, answer: Answer) -> None:
    host.broker.publisher.publish(_checked(request), lambda error: answer(None, error))


def drop_stages(host: BrokerHost, request: DropStages) -> int:
    _check_numbers(request.producers)
    return host.broker.stages.drop(request.producers)


def read_stage(host: BrokerHost, request: ReadStage) -> Any:
    _check_numbers([request.producer, request.start])
    return host.broker.stages.read(request.producer, request.start, READ_SIZE)


def _checked(request: NameStages) -> list[tuple[int, int]]:
    if len(request.stages) > STAGES_PAGE_MAX:
        raise InvalidArgument(f"{len(request.stages)} stages exceed the limit of {STAGES_PAGE_MAX} per request")
    _check_numbers([number for stage in request.stages for number in stage])
    return request.stages


def _check_numbers(numbers: list[int]) -> None:
    for number in numbers:
        if not 0 <= number < _NUMBER_MAX:
            raise InvalidArgument(f"{number} is invalid; use 0 to {_NUMBER_MAX - 1}")


def describe_spans(host: BrokerHost, request: DescribeSpans) -> list[SpanRow]:
    """The views of the named partitions that exist on this broker, each once."""
    found = []
    if len(request.names) > SPAN_NAMES_MAX or len(request.times) > SPAN_TIMES_MAX:
        raise InvalidArgument(
            f"{len(request.names)} partitions and {len(request.times)} times are too many for one request; "
            f"use at most {SPAN_NAMES_MAX} and {SPAN_TIMES_MAX}"
        )
    for name in dict.fromkeys(request.names):
        names.check_partition(name)
        partition = host.broker.subjects.get(name)
        if partition is not None:
            found.append(_span_row(partition, host.config.group, request.times))
    return found


def _span_row(partition: Partition, group: str, times: list[int]) -> SpanRow:
    start, end = partition.start, partition.visible
    records = _records(partition, start, end) if times else None
    at, until = [], []
    if records is not None:
        at = np.maximum(spans.first_at(records, times, end), start).tolist()
        until = np.minimum(spans.end_before(records, times, start), end).tolist()
    row = partition.row
    sealed = row.lps == [] and end == partition.next
    return SpanRow(row.name, row.subject, row.id, start, end, partition.epochs, at, until, group, sealed)


def cut_spans(host: BrokerHost, request: CutSpans) -> list[SpanCuts]:
    """One view per range, in order. Removed sequences are not part of a range."""
    answers = []
    for name, start, end, size in request.ranges:
        partition = host.broker.partition_of(names.check_partition(name), create=False)
        if start < 0 or size < 0:
            raise InvalidArgument(
                f"a range of {name!r} from {start} with size {size} is invalid; use 0 or more for both"
            )
        start, end = max(start, partition.start), min(end, partition.visible)
        if start >= end:
            answers.append(SpanCuts(0, []))
            continue
        records = _records(partition, start, end)
        total = int(spans.sizes_in(records, start, end).sum())
        if request.reach:
            ends = [spans.reach(records, start, end, size)]
        else:
            ends = spans.cut(records, start, end, max(size, total // CUTS_MAX)) if size else []
        answers.append(SpanCuts(total, ends))
    return answers


def _records(partition: Partition, start: int, end: int) -> Records:
    log = partition.consume_log
    return log.slice(log.find(start), log.find(end - 1) + 1) if start < end else log.slice(0, 0)
