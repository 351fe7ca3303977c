"""The audit: checks the arguments, opens the input, judges its blocks on Spark and adds up their facts.

The driver plans and adds up, each task judges a block. Little data passes through Java: only comparisons between blocks
need a shuffle, of two numbers for each key of a block, and one number for 64 message ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.clock import SystemClock
from plait.errors import InvalidArgument, PlaitError
from plait.frame.header import TIME_MAX
from plait.model import names
from plait.spark.auditing import tally
from plait.spark.auditing.block import Domain, audit_block
from plait.spark.auditing.block_arrays import Numbers
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.key_order import crossings, moved_crossings
from plait.spark.auditing.report import AuditReport
from plait.spark.auditing.stored_order import stored_again
from plait.spark.auditing.summary import scale_of, summarize
from plait.spark.auditing.tally import Tally
from plait.spark.history.selection import When, period_of
from plait.spark.inputs.archive_audit import open_archived
from plait.spark.inputs.audit_input import AuditInput
from plait.spark.inputs.log_audit import open_live
from plait.spark.runtime.job_runner import (
    NoProgress,
    ProgressListener,
    encode_error,
    raise_encoded,
    run_action,
    spark_errors,
)
from plait.spark.runtime.session import check_packages, session
from plait.spark.runtime.worker import prepare_worker
from plait.storage.reading.log_chunks import WantedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The Spark master unless the caller names one. Two threads bound the memory on small machines.
DEFAULT_MASTER: Final = "local[2]"
_FAILED: Final = "the Spark job of the audit failed, nothing was judged; run it again"
_CROSSED: Final = pa.schema([pa.field("kind", pa.string()), pa.field("id", pa.int64()), pa.field("count", pa.int64())])


def audit(
    data: str | PathLike[str] | None = None,
    *,
    archive: str | PathLike[str] | None = None,
    subjects: Sequence[str] = (),
    groups: Sequence[str] = (),
    since: When | None = None,
    until: When | None = None,
    broker_group: str = "g1",
    skip_damage: bool = False,
    spark: SparkSession | None = None,
    master: str | None = None,
    progress: ProgressListener | None = None,
) -> AuditReport:
    """Check the first-hand logs of a data directory or of an archive against Plait's promises.

    ``subjects`` are names, or prefixes with ``*`` (none: all); ``groups`` are consumer groups (none: all); ``since``
    and ``until`` select messages by store time: a datetime, ISO 8601, or "-2h" before now. docs/audit.md explains each
    count of the report.
    """
    progress = progress or NoProgress()
    low, high = period_of(since, until, SystemClock().now())
    source = open_input(
        data,
        archive,
        subjects=subjects,
        groups=groups,
        since=low,
        until=high,
        broker_group=broker_group,
        skip_damage=skip_damage,
        progress=progress,
    )
    check_packages()
    with spark_errors(_FAILED, PlaitError):
        if spark is None:
            progress.step("starting Spark", 1, "parts")
            spark = session("plait audit", master=master or DEFAULT_MASTER)
        table, crossed = _judge_all(spark, source, progress)
    return summarize(source, tally.added_up(table), crossed, since=low, until=high)


def open_input(
    data: str | PathLike[str] | None,
    archive: str | PathLike[str] | None,
    *,
    subjects: Sequence[str] = (),
    groups: Sequence[str] = (),
    since: int | None = None,
    until: int | None = None,
    broker_group: str = "g1",
    skip_damage: bool = False,
    progress: ProgressListener,
) -> AuditInput:
    """Open the data directory or the archive and plan the work. Times are in microseconds since 1970."""
    wanted = WantedRows.of_subjects(subjects or ("*",))
    wanted = replace(wanted, time_min=since or 0, time_max=TIME_MAX if until is None else until - 1)
    named = frozenset(names.check("group", group) for group in groups)
    if archive is not None and data is None:
        return open_archived(fspath(archive), wanted, named, progress)
    if data is not None and archive is None:
        return open_live(fspath(data), wanted, named, broker_group, fail_on_damage=not skip_damage, progress=progress)
    raise InvalidArgument("name a data directory or an archive to audit: exactly one of them")


def judge_part(source: AuditInput, number: int) -> pa.Table:
    """The facts of one part of the work."""
    facts = Tally()
    scale = scale_of(source)
    groups: dict[int, list[GroupFacts]] = {}
    for group in source.groups.values():
        groups.setdefault(group.partition, []).append(group)
    domains = domains_of(source)
    for block in source.blocks(number):
        audit_block(block, groups.get(block.partition, []), scale, facts, domains[block.partition])
    return facts.table()


def _judged(source: AuditInput, number: int) -> pa.Table:
    """``judge_part``, with a ``PlaitError`` returned as a fact: raised in a task, it would arrive as a Java trace."""
    try:
        return judge_part(source, number)
    except PlaitError as error:
        facts = Tally()
        facts.add(tally.ERROR, number, encode_error(error), 1)
        return facts.table()


def domains_of(source: AuditInput) -> dict[int, Domain]:
    """Partition → its ``Domain``."""
    # The last entry of a name is that of the lowest number.
    subjects = {each.subject: number for number, each in sorted(source.partitions.items(), reverse=True)}
    groups: dict[tuple[str, str], int] = {}
    domains = {number: Domain(subjects[each.subject], each.strict) for number, each in source.partitions.items()}
    for number, group in sorted(source.groups.items()):
        first = groups.setdefault((source.partitions[group.partition].subject, group.name), number)
        domains[group.partition].groups[number] = first
    return domains


def crossed_of(table: pa.Table) -> Counter[tuple[str, int]]:
    """The number of violations between blocks, by kind and id, from ``SHUFFLED`` facts."""
    total: Counter[tuple[str, int]] = Counter()
    for kind in tally.SHUFFLED:
        facts = table.filter(pc.field("kind") == kind)
        if facts.num_rows:
            found, counts = np.unique(_crossed_of(kind, facts), return_counts=True)
            total.update({(kind, number): count for number, count in zip(found.tolist(), counts.tolist(), strict=True)})
    return total


def _crossed_of(kind: str, facts: pa.Table) -> Numbers:
    columns = [facts.column(name).to_numpy() for name in ("id", "number", "count", "earliest", "latest")]
    ids, numbers, firsts, earliest, latest = columns
    if kind == tally.IDS:
        return stored_again(ids, numbers, firsts, earliest)
    if kind == tally.MOVED:
        partitions = facts.column("name").cast(pa.int64()).to_numpy()
        return moved_crossings(ids, numbers, partitions, (firsts, earliest, latest))
    return crossings(ids, numbers, firsts, (earliest, latest))


def _judge_all(
    spark: SparkSession, source: AuditInput, progress: ProgressListener
) -> tuple[pa.Table, dict[tuple[str, int], int]]:
    """The facts of all parts, and the violations between blocks (``crossed_of``)."""
    from pyspark import StorageLevel
    from pyspark.sql.pandas.types import from_arrow_schema

    prepare_worker()
    count = len(source)
    if not count:
        return tally.SCHEMA.empty_table(), {}

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _judged(source, number).to_batches()

    schema = from_arrow_schema(tally.SCHEMA)
    facts = spark.range(0, count, 1, count).mapInArrow(work, schema).persist(StorageLevel.DISK_ONLY)
    try:
        progress.step("judging", count, "parts")
        small = facts.where(~facts["kind"].isin(*tally.SHUFFLED))
        table = run_action(spark, small.toArrow, lambda ended: progress.update(min(ended, count)))
        for error in table.filter(pc.field("kind") == tally.ERROR).sort_by("id").column("name").to_pylist():
            raise_encoded(error)
        progress.step("comparing keys and ids between blocks", 1, "parts")
        crossed = _crossed(facts, count)
    finally:
        facts.unpersist()
    return table, crossed


def _crossed(facts: DataFrame, count: int) -> dict[tuple[str, int], int]:
    def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Each task gets some keys and producers, with all facts of each. There are as many tasks as blocks.
        found = crossed_of(pa.Table.from_batches(batches, tally.SCHEMA))
        columns = {"kind": [kind for kind, _ in found], "id": [number for _, number in found]}
        yield pa.RecordBatch.from_pydict({**columns, "count": list(found.values())}, _CROSSED)

    keys = facts.where(facts["kind"].isin(*tally.SHUFFLED)).repartition(count, "kind", "id", "number")
    total: Counter[tuple[str, int]] = Counter()
    for row in keys.mapInArrow(compare, "kind string, id long, count long").collect():
        total[row["kind"], row["id"]] += row["count"]
    return total
