"""The audit as a Spark job: the driver plans and adds up, each task judges a block. Little data passes through Java.

Only comparisons between blocks need a shuffle: two numbers for each key of a block, and one number for 64 message ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait import chance
from plait.errors import PlaitError, from_code
from plait.spark.auditing import tally
from plait.spark.auditing.block import Domain, audit_block
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.inputs.audit_input import AuditInput, Progress
from plait.spark.auditing.inputs.block_rows import Numbers
from plait.spark.auditing.key_order import crossings, moved_crossings
from plait.spark.auditing.report import AuditReport
from plait.spark.auditing.stored_order import stored_again
from plait.spark.auditing.summary import scale_of, summarize
from plait.spark.auditing.tally import Tally
from plait.spark.runtime.job_runner import SHOWN_LENGTH_MAX
from plait.spark.runtime.worker import prepare_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The interval at which the driver reports progress.
LOOK_SECONDS: Final = 0.5


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
        facts.add(tally.ERROR, number, msgspec.json.encode((error.code, error.message)).decode(), 1)
        return facts.table()


def _raise_errors(table: pa.Table) -> None:
    errors = table.filter(pc.field("kind") == tally.ERROR).sort_by("id").column("name").to_pylist()
    if errors:
        raise from_code(*msgspec.json.decode(errors[0], type=tuple[str, str]))


def domains_of(source: AuditInput) -> dict[int, Domain]:
    """Partition → its ``Domain``."""
    subjects: dict[str, int] = {}
    for number, each in source.partitions.items():
        subjects[each.subject] = min(subjects.get(each.subject, number), number)
    names: dict[tuple[int, str], int] = {}
    for group in source.groups.values():
        name = (subjects[source.partitions[group.partition].subject], group.name)
        names[name] = min(names.get(name, group.id), group.id)
    found = {}
    for number, each in source.partitions.items():
        subject = subjects[each.subject]
        mine = [group for group in source.groups.values() if group.partition == number]
        found[number] = Domain(subject, each.strict, {group.id: names[subject, group.name] for group in mine})
    return found


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


def run(
    spark: SparkSession, source: AuditInput, *, since: int | None, until: int | None, progress: Progress
) -> AuditReport:
    """Judge all parts and add up their facts. Raises ``PlaitError`` if the Spark job fails."""
    with spark_failures():
        table, crossed = _judge_all(spark, source, progress)
    return summarize(source, tally.added_up(table), crossed, since=since, until=until)


@contextmanager
def spark_failures() -> Iterator[None]:
    """Turn an exception of Spark itself into a ``PlaitError`` of one line."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        reason = " ".join(str(error).split())[:SHOWN_LENGTH_MAX]
        raise PlaitError(f"the Spark job of the audit failed, nothing was judged; run it again: {reason}") from error


def _judge_all(
    spark: SparkSession, source: AuditInput, progress: Progress
) -> tuple[pa.Table, dict[tuple[str, int], int]]:
    """The facts of all parts, and the violations between blocks (``crossed_of``)."""
    from pyspark import StorageLevel
    from pyspark.sql.pandas.types import from_arrow_schema

    prepare_worker()
    count = len(source)
    if not count:
        return tally.SCHEMA.empty_table(), {}

    done = spark.sparkContext.accumulator(0)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _judged(source, number).to_batches()
                done.add(1)

    schema = from_arrow_schema(tally.SCHEMA)
    facts = spark.range(0, count, 1, count).mapInArrow(work, schema).persist(StorageLevel.DISK_ONLY)
    try:
        small = facts.where(~facts["kind"].isin(*tally.SHUFFLED))
        table = _collected(spark, small, lambda: progress("judging", min(done.value, count), count))
        _raise_errors(table)
        crossed = _crossed(facts, count, progress)
    finally:
        facts.unpersist()
    return table, crossed


def _crossed(facts: DataFrame, count: int, progress: Progress) -> dict[tuple[str, int], int]:
    progress("comparing keys and ids between blocks", 0, 1)

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


_CROSSED: Final = pa.schema([pa.field("kind", pa.string()), pa.field("id", pa.int64()), pa.field("count", pa.int64())])


def _collected(spark: SparkSession, frame: DataFrame, look: Callable[[], None]) -> pa.Table:
    """All rows of a data frame. ``look`` is called every ``LOOK_SECONDS`` until they arrive."""
    context = spark.sparkContext
    tag = f"plait-audit-{chance.token(8)}"

    def collect() -> pa.Table:
        context.addJobTag(tag)
        return frame.toArrow()

    with ThreadPoolExecutor(1, "plait-audit") as pool:
        future = pool.submit(collect)
        try:
            while not wait([future], LOOK_SECONDS).done:
                look()
        except BaseException:
            context.cancelJobsWithTag(tag)
            raise
        return future.result()
