"""The sequences of partitions, and where to cut them: a reader without a group plans with them.

The replies are computed from the consume log, with array operations. No message is read and no state changes.
"""

from __future__ import annotations

import numpy as np

from plait.broker.partitions.partition import Partition
from plait.errors import InvalidArgument
from plait.model import names
from plait.server.broker_host import BrokerHost
from plait.storage.logs import consume_log as spans
from plait.storage.logs.consume_log import Records
from plait.wire.admin.partitions import CutSpans, DescribeSpans, SpanCuts, SpanRow

#: Partitions and times in one request: the reply takes a few milliseconds.
SPAN_NAMES_MAX = 1_000
SPAN_TIMES_MAX = 64
#: Cuts of one range, well below the size of a packet. Beyond it the pieces are larger than requested.
CUTS_MAX = 100_000


def describe(host: BrokerHost, request: DescribeSpans) -> list[SpanRow]:
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
            found.append(_view(partition, host.config.group, request.times))
    return found


def _view(partition: Partition, group: str, times: list[int]) -> SpanRow:
    start, end = partition.start, partition.visible
    records = _records(partition, start, end) if times else None
    at, until = [], []
    if records is not None:
        at = np.maximum(spans.first_at(records, times, end), start).tolist()
        until = np.minimum(spans.end_before(records, times, start), end).tolist()
    row = partition.row
    sealed = row.lps == [] and end == partition.next
    return SpanRow(row.name, row.subject, row.id, start, end, partition.epochs, at, until, group, sealed)


def cut(host: BrokerHost, request: CutSpans) -> list[SpanCuts]:
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
