"""Builds the report of an audit from the facts (``tally``) that its blocks found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from plait.limits import LOGICAL_PARTITIONS
from plait.spark.auditing import tally
from plait.spark.auditing.block import Scale
from plait.spark.auditing.group_facts import GroupFacts
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
from plait.spark.inputs.audit_input import AuditedPartition, AuditInput, Cause

#: Points of the plot of lag over time.
MOMENTS: Final = 240
#: The most hot keys of a subject, and the most examples of broken promises, in a report.
KEYS_MAX: Final = 20
EXAMPLES_MAX: Final = 10

_REDELIVERED: Final = "redelivered_"
#: Promises to a group, except order: the names of ``tally.BROKEN`` facts, and ``invented``.
_PROMISES: Final = ("lost", "double_acks", "delivered_twice", "invented")


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

    def counts(self, kind: str, ids: list[int]) -> Counter[str]:
        """The counts by name."""
        total: Counter[str] = Counter()
        for number in ids:
            for name, counts in self._found[kind, number].items():
                total[name] += sum(counts.values())
        return total

    def numbers(self, kind: str, ids: list[int]) -> Counter[int]:
        """The counts by number, of facts without a name."""
        total: Counter[int] = Counter()
        for each in ids:
            total.update(self._found[kind, each][""])
        return total

    def examples(self, kind: str, number: int, partition: str) -> list[Example]:
        """The first examples of each broken promise."""
        found = self._found[kind, number]
        return [
            Example(promise, partition, at) for promise in sorted(found) for at in sorted(found[promise])[:EXAMPLES_MAX]
        ]


def summarize(
    source: AuditInput,
    table: pa.Table,
    crossed: Mapping[tuple[str, int], int],
    *,
    since: int | None,
    until: int | None,
) -> AuditReport:
    """Build the report. ``table``: the facts, added up. ``crossed``: violations found by comparing blocks."""
    summary = _Summary(source, _Facts(table), Counter(crossed), source.deaths())
    by_subject: dict[str, list[int]] = defaultdict(list)
    for number, partition in sorted(source.partitions.items()):
        by_subject[partition.subject].append(number)
    subjects = [summary.subject(name, ids) for name, ids in sorted(by_subject.items())]
    groups = [group for subject in subjects for group in subject.groups]
    return AuditReport(
        place=source.place,
        time_min=source.time_min,
        time_max=source.time_max,
        since=since,
        until=until,
        held=not (any(each.broken for each in subjects) or any(each.broken for each in groups)),
        judged=not any(group.unknown and group.unknown == group.messages for group in groups),
        subjects=subjects,
    )


@dataclass(frozen=True)
class _Summary:
    source: AuditInput
    facts: _Facts
    #: The number of violations found by comparing blocks, by kind of fact and id.
    crossed: Counter[tuple[str, int]]
    causes: Counter[Cause]

    def subject(self, subject: str, ids: list[int]) -> SubjectAudit:
        facts = self.facts
        partitions = []
        examples = []
        for number in ids:
            each = self.source.partitions[number]
            messages = facts.counts(tally.ROWS, [number])[""]
            # Where damage is skipped, the rows that a frame header counts and no block found are missing too.
            missing = sum(end - start for start, end in each.missing) + max(each.readable - messages, 0)
            partitions.append(
                PartitionAudit(partition=each.name, messages=messages, first=each.first, end=each.end, missing=missing)
            )
            examples += [Example("missing", each.name, start) for start, _ in each.missing]
            examples += facts.examples(tally.FLAW_EXAMPLE, number, each.name)
        by_group: dict[str, list[GroupFacts]] = defaultdict(list)
        for group in self.source.groups.values():
            if group.partition in ids:
                by_group[group.name].append(group)
        # An archive may have several partitions of one name.
        by_name: Counter[str] = Counter()
        for partition in partitions:
            by_name[partition.partition] += partition.messages
        keys = sorted(facts.counts(tally.KEY, ids).items(), key=lambda pair: (-pair[1], pair[0]))[:KEYS_MAX]
        flaws = facts.counts(tally.FLAW, ids)
        return SubjectAudit(
            subject=subject,
            messages=by_name.total(),
            missing=sum(each.missing for each in partitions),
            behind_fence=flaws["behind_fence"],
            stored_twice=flaws["stored_twice"] + self.crossed[tally.IDS, min(ids)],
            stored_out_of_order=flaws["stored_out_of_order"] + sum(self.crossed[tally.SENT, number] for number in ids),
            partitions=partitions,
            hot_keys=[HotKey(key, count) for key, count in keys],
            partition_skew=_skew(by_name, len(by_name)),
            slot_skew=_skew(facts.numbers(tally.SLOT, ids), LOGICAL_PARTITIONS),
            groups=[self.group(subject, name, members) for name, members in sorted(by_group.items())],
            examples=examples[:EXAMPLES_MAX],
        )

    def group(self, subject: str, name: str, members: list[GroupFacts]) -> GroupAudit:
        ids = [group.id for group in members]
        fates, broken, counts = (self.facts.counts(kind, ids) for kind in (tally.FATE, tally.BROKEN, tally.COUNT))
        broken["invented"] = sum(max(group.reach - self._partition(group).end, 0) for group in members)
        gone = sum(_below(group.skips, self._partition(group).first) for group in members)
        # A group that was deleted and created again may be of another kind.
        newest = max(members, key=lambda group: group.id)
        promises = [promise for promise in _PROMISES if broken[promise]]
        promises += ["out_of_order"] if self._out_of_order([each.id for each in members if each.keeps_order]) else []
        examples = [example for group in members for example in self._examples(group)]
        return GroupAudit(
            subject=subject,
            group=name,
            kind=newest.kind,
            delivery="at_most_once" if newest.at_most_once else "at_least_once",
            order="none" if not newest.keeps_order else "strict" if newest.strict else "best_tried",
            messages=fates.total() - fates["outside"] + gone,
            acked=fates["acked"],
            dead=fates["dead"],
            expired=fates["expired"] + gone,
            filtered=fates["filtered"],
            unacked=fates["held"] + fates["returned"] + fates["pending"],
            in_flight=fates["held"],
            returned=fates["returned"],
            pending=fates["pending"],
            unknown=fates["unknown"],
            lost=broken["lost"],
            double_acks=broken["double_acks"],
            delivered_twice=broken["delivered_twice"],
            out_of_order=self._out_of_order(ids),
            invented=broken["invented"],
            redelivered={
                key.removeprefix(_REDELIVERED): count
                for key, count in sorted(counts.items())
                if key.startswith(_REDELIVERED) and count
            },
            acked_again=counts["acked_again"],
            retried=counts["retried"],
            died=counts["died"],
            deaths=self._deaths(ids, counts["died"]),
            latency=_latency(self.facts.numbers(tally.LATENCY, ids)),
            lag=self._lag(ids),
            broken=promises,
            examples=[each for each in examples if each.promise in promises][:EXAMPLES_MAX],
            forgotten=all(group.forgotten for group in members),
        )

    def _partition(self, group: GroupFacts) -> AuditedPartition:
        return self.source.partitions[group.partition]

    def _out_of_order(self, ids: list[int]) -> int:
        between = sum(self.crossed[kind, number] for kind in (tally.ORDER, tally.MOVED) for number in ids)
        return self.facts.counts(tally.BROKEN, ids)["out_of_order"] + between

    def _examples(self, group: GroupFacts) -> list[Example]:
        partition = self._partition(group)
        found = self.facts.examples(tally.EXAMPLE, group.id, partition.name)
        return [*found, Example("invented", partition.name, partition.end)] if group.reach > partition.end else found

    def _deaths(self, ids: list[int], died: int) -> list[DeathCount]:
        """Sorted by count, highest first. Dead letters that are no longer stored are counted without a reason."""
        total: Counter[tuple[str, str]] = Counter()
        for (number, kind, handler), count in self.causes.items():
            if number in ids:
                total[kind, handler] += count
        total["", ""] += max(died - total.total(), 0)
        ordered = sorted(total.items(), key=lambda pair: (-pair[1], pair[0]))
        return [DeathCount(kind or None, handler or None, count) for (kind, handler), count in ordered if count]

    def _lag(self, ids: list[int]) -> list[Moment]:
        scale = scale_of(self.source)
        stored, settled = np.zeros(scale.count, np.int64), np.zeros(scale.count, np.int64)
        for target, kind in ((stored, tally.STORED), (settled, tally.SETTLED)):
            for moment, count in self.facts.numbers(kind, ids).items():
                target[moment] += count
        if not stored.any():
            return []
        total = np.cumsum(stored)
        lag = total - np.cumsum(settled)
        ends = scale.start + scale.width * np.arange(1, scale.count + 1)
        return [Moment(*each) for each in zip(ends.tolist(), total.tolist(), lag.tolist(), strict=True)]


def _skew(counts: Counter[str] | Counter[int], among: int) -> float:
    """The highest count as a multiple of the mean."""
    total = counts.total()
    return round(max(counts.values()) * among / total, 3) if total else 1.0


def _below(ranges: list[tuple[int, int]], limit: int) -> int:
    """The number of sequences in ``ranges`` that are below ``limit``."""
    return sum(max(min(end, limit) - start, 0) for start, end in ranges)


def _latency(bins: Counter[int]) -> Latency | None:
    if not bins:
        return None
    numbers, counts = np.array(list(bins)), np.array(list(bins.values()))
    shares = [tally.percentile(numbers, counts, share) for share in (0.5, 0.9, 0.99, 0.999, 1.0)]
    p50, p90, p99, p999, most = (float(f"{share:.3g}") for share in shares)
    return Latency(count=int(counts.sum()), p50=p50, p90=p90, p99=p99, p999=p999, max=most)
