"""Builds the report from the facts of all blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from plait.limits import LOGICAL_PARTITIONS
from plait.spark.auditing import tally
from plait.spark.auditing.block import Scale
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.inputs.audit_input import AuditInput
from plait.spark.auditing.inputs.death_causes import Cause
from plait.spark.auditing.report import (
    AuditReport,
    DeathCount,
    Example,
    GroupAudit,
    HotKey,
    Latency,
    Moment,
    PartitionAudit,
    SubjectAudit,
)

#: Points of the plot of lag over time.
MOMENTS: Final = 240
#: The most hot keys of a subject, and the most examples of broken promises, in a report.
KEYS_MAX: Final = 20
EXAMPLES_MAX: Final = 10

_REDELIVERED: Final = "redelivered_"
#: The number of violations between blocks, by kind of fact and id.
Crossed = Mapping[tuple[str, int], int]


def scale_of(source: AuditInput) -> Scale:
    """The time axis of a report."""
    span = max(source.time_max - source.time_min, 0) + 1
    return Scale(source.time_min, -(-span // MOMENTS), MOMENTS)


class _Facts:
    """Facts by kind and id: name → number → count."""

    def __init__(self, table: pa.Table) -> None:
        self._found: dict[tuple[str, int], dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        columns = [table.column(name).to_pylist() for name in ("kind", "id", "name", "number", "count_sum")]
        for kind, number, name, at, count in zip(*columns, strict=True):
            self._found[kind, number][name][at] = count

    def counts(self, kind: str, ids: list[int]) -> dict[str, int]:
        """The counts by name."""
        total: dict[str, int] = defaultdict(int)
        for number in ids:
            for name, counts in self._found[kind, number].items():
                total[name] += sum(counts.values())
        return total

    def numbers(self, kind: str, ids: list[int], name: str = "") -> dict[int, int]:
        """The counts by number."""
        total: dict[int, int] = defaultdict(int)
        for each in ids:
            for number, count in self._found[kind, each][name].items():
                total[number] += count
        return total

    def names(self, kind: str, number: int) -> list[str]:
        return sorted(self._found[kind, number])


def summarize(
    source: AuditInput, table: pa.Table, crossed: Crossed, *, since: int | None, until: int | None
) -> AuditReport:
    """Build the report. ``table``: the facts added up. ``crossed``: the violations between blocks (``crossed_of``)."""
    facts, causes = _Facts(table), source.deaths()
    by_partition: dict[int, list[GroupFacts]] = defaultdict(list)
    for group in source.groups.values():
        by_partition[group.partition].append(group)
    subjects = []
    for name, ids in _subjects(source).items():
        groups = [group for number in ids for group in by_partition[number]]
        subjects.append(_subject(source, facts, crossed, causes, name, ids, groups))
    held = not any(subject.broken or any(group.broken for group in subject.groups) for subject in subjects)
    return AuditReport(
        place=source.place,
        time_min=source.time_min,
        time_max=source.time_max,
        since=since,
        until=until,
        held=held,
        judged=not any(group.unknown and group.unknown == group.messages for s in subjects for group in s.groups),
        subjects=subjects,
    )


def _subjects(source: AuditInput) -> dict[str, list[int]]:
    """Subject → its partitions."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, partition in sorted(source.partitions.items()):
        found[partition.subject].append(number)
    return dict(sorted(found.items()))


def _subject(
    source: AuditInput,
    facts: _Facts,
    crossed: Crossed,
    causes: Counter[Cause],
    subject: str,
    ids: list[int],
    consumers: list[GroupFacts],
) -> SubjectAudit:
    partitions = []
    examples = []
    for number in ids:
        each = source.partitions[number]
        messages = facts.counts(tally.ROWS, [number]).get("", 0)
        # Where damage is skipped, a frame header may promise rows that cannot be read.
        missing = sum(end - start for start, end in each.missing) + max(each.readable - messages, 0)
        partitions.append(
            PartitionAudit(partition=each.name, messages=messages, first=each.first, end=each.end, missing=missing)
        )
        examples += [Example("missing", each.name, start) for start, _ in each.missing]
        for promise in facts.names(tally.FLAW_EXAMPLE, number):
            sequences = sorted(facts.numbers(tally.FLAW_EXAMPLE, [number], promise))
            examples += [Example(promise, each.name, sequence) for sequence in sequences[:EXAMPLES_MAX]]
    by_group: dict[str, list[GroupFacts]] = defaultdict(list)
    for group in consumers:
        by_group[group.name].append(group)
    keys = sorted(facts.counts(tally.KEY, ids).items(), key=lambda pair: (-pair[1], pair[0]))[:KEYS_MAX]
    slots = facts.numbers(tally.SLOT, ids)
    flaws = facts.counts(tally.FLAW, ids)
    return SubjectAudit(
        subject=subject,
        messages=sum(each.messages for each in partitions),
        missing=sum(each.missing for each in partitions),
        behind_fence=flaws.get("behind_fence", 0),
        stored_twice=flaws.get("stored_twice", 0) + crossed.get((tally.IDS, min(ids)), 0),
        stored_out_of_order=flaws.get("stored_out_of_order", 0)
        + sum(crossed.get((tally.SENT, number), 0) for number in ids),
        partitions=partitions,
        hot_keys=[HotKey(key, count) for key, count in keys],
        partition_skew=_skew(_by_name(partitions)),
        slot_skew=_skew(list(slots.values()), LOGICAL_PARTITIONS),
        groups=[
            _group(source, facts, crossed, subject, name, members, causes) for name, members in sorted(by_group.items())
        ],
        examples=examples[:EXAMPLES_MAX],
    )


def _by_name(partitions: list[PartitionAudit]) -> list[int]:
    """The messages of each partition name. An archive may have several partitions of one name."""
    counts: Counter[str] = Counter()
    for each in partitions:
        counts[each.partition] += each.messages
    return list(counts.values())


def _skew(counts: list[int], among: int | None = None) -> float:
    total = sum(counts)
    return round(max(counts) * (among or len(counts)) / total, 3) if total else 1.0


def _group(
    source: AuditInput,
    facts: _Facts,
    crossed: Crossed,
    subject: str,
    name: str,
    members: list[GroupFacts],
    causes: Counter[Cause],
) -> GroupAudit:
    ids = [group.id for group in members]

    def between(number: int) -> int:
        return crossed.get((tally.ORDER, number), 0) + crossed.get((tally.MOVED, number), 0)

    fates = facts.counts(tally.FATE, ids)
    broken = facts.counts(tally.BROKEN, ids)
    counts = facts.counts(tally.COUNT, ids)
    invented = sum(max(group.reach - source.partitions[group.partition].end, 0) for group in members)
    before = {group.id: source.partitions[group.partition].first for group in members}
    gone = sum(_below(group.skips, before[group.id]) for group in members)
    # A group that was deleted and created again may be of another kind.
    newest = max(members, key=lambda group: group.id)
    died = counts.get("died", 0)
    deaths = [
        DeathCount(kind or None, handler or None, n) for (number, kind, handler), n in causes.items() if number in ids
    ]
    deaths = _by_count(deaths, died)
    unacked = {kind: fates.get(kind, 0) for kind in ("held", "returned", "pending")}
    found = GroupAudit(
        subject=subject,
        group=name,
        kind=newest.kind,
        delivery="at_most_once" if newest.at_most_once else "at_least_once",
        order=_order(members, newest),
        messages=sum(fates.values()) - fates.get("outside", 0) + gone,
        acked=fates.get("acked", 0),
        dead=fates.get("dead", 0),
        expired=fates.get("expired", 0) + gone,
        unacked=sum(unacked.values()),
        in_hands=unacked["held"],
        returned=unacked["returned"],
        pending=unacked["pending"],
        unknown=fates.get("unknown", 0),
        lost=broken.get("lost", 0),
        double_acks=broken.get("double_acks", 0),
        two_hands=broken.get("two_hands", 0),
        out_of_order=broken.get("out_of_order", 0) + sum(map(between, ids)),
        invented=invented,
        redelivered={
            key.removeprefix(_REDELIVERED): count
            for key, count in sorted(counts.items())
            if key.startswith(_REDELIVERED) and count
        },
        acked_again=counts.get("acked_again", 0),
        retried=counts.get("retried", 0),
        died=died,
        deaths=deaths,
        latency=_latency(facts.numbers(tally.LATENCY, ids)),
        lag=_lag(source, facts, ids),
        broken=[],
        examples=_examples(source, facts, members, invented),
        forgotten=all(group.forgotten for group in members),
    )
    found.broken = [promise for promise in ("lost", "double_acks", "two_hands", "invented") if getattr(found, promise)]
    promised = [group.id for group in members if _has_order(group)]
    if facts.counts(tally.BROKEN, promised).get("out_of_order") or any(map(between, promised)):
        found.broken.append("out_of_order")
    found.examples = [each for each in found.examples if each.promise in found.broken][:EXAMPLES_MAX]
    return found


def _has_order(group: GroupFacts) -> bool:
    return group.ordered and not group.affinity


def _order(members: list[GroupFacts], newest: GroupFacts) -> str:
    if not _has_order(newest):
        return "none"
    if any(_has_order(group) and group.strict is None for group in members):
        return "not_known"
    return "strict" if newest.strict else "best_tried"


def _below(ranges: list[tuple[int, int]], limit: int) -> int:
    """The number of sequences in ``ranges`` that are below ``limit``."""
    return sum(max(min(end, limit) - start, 0) for start, end in ranges)


def _by_count(deaths: list[DeathCount], died: int) -> list[DeathCount]:
    """Sorted by count, highest first. Dead letters that are no longer stored are counted without a reason."""
    total: dict[tuple[str | None, str | None], int] = defaultdict(int)
    for death in deaths:
        total[death.type, death.handler] += death.count
    rest = died - sum(total.values())
    if rest > 0:
        total[None, None] += rest
    ordered = sorted(total.items(), key=lambda pair: (-pair[1], pair[0][0] or "", pair[0][1] or ""))
    return [DeathCount(kind, handler, count) for (kind, handler), count in ordered]


def _latency(bins: dict[int, int]) -> Latency | None:
    if not bins:
        return None
    numbers, counts = np.array(list(bins)), np.array(list(bins.values()))
    shares = [tally.percentile(numbers, counts, share) for share in (0.5, 0.9, 0.99, 0.999, 1.0)]
    p50, p90, p99, p999, most = (float(f"{share:.3g}") for share in shares)
    return Latency(count=int(counts.sum()), p50=p50, p90=p90, p99=p99, p999=p999, max=most)


def _lag(source: AuditInput, facts: _Facts, ids: list[int]) -> list[Moment]:
    scale = scale_of(source)
    stored, settled = np.zeros(scale.count, np.int64), np.zeros(scale.count, np.int64)
    for target, kind in ((stored, tally.STORED), (settled, tally.SETTLED)):
        for moment, count in facts.numbers(kind, ids).items():
            target[moment] += count
    if not stored.any():
        return []
    total = np.cumsum(stored)
    lag = total - np.cumsum(settled)
    ends = scale.start + scale.width * np.arange(1, scale.count + 1)
    return [Moment(*each) for each in zip(ends.tolist(), total.tolist(), lag.tolist(), strict=True)]


def _examples(source: AuditInput, facts: _Facts, members: list[GroupFacts], invented: int) -> list[Example]:
    found = []
    for group in members:
        partition = source.partitions[group.partition]
        for promise in facts.names(tally.EXAMPLE, group.id):
            sequences = sorted(facts.numbers(tally.EXAMPLE, [group.id], promise))
            found += [Example(promise, partition.name, sequence) for sequence in sequences[:EXAMPLES_MAX]]
        if invented and group.reach > partition.end:
            found.append(Example("invented", partition.name, partition.end))
    return found
