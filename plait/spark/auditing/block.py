"""The work of one block: judge some rows of a partition against the events of its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH
from plait.spark.auditing import tally
from plait.spark.auditing.block_arrays import BlockRows, Events
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.key_order import key_times, out_of_order
from plait.spark.auditing.stored_order import judge_stored, key_numbers, windows_of
from plait.spark.auditing.tally import Tally, latency_bins
from plait.spark.auditing.touches import touches
from plait.spark.auditing.verdicts import Fate, GroupVerdict, judge

#: The most frequent keys of a block that are reported by name. A key that is hot in most blocks is among them.
KEYS_MAX: Final = 64
#: Examples that a block reports for each broken promise.
EXAMPLES_MAX: Final = 5


@dataclass(frozen=True)
class Scale:
    """The time axis of a report: ``count`` moments of ``width`` microseconds each."""

    start: int
    width: int
    count: int

    def moments(self, times: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The moment of each time. Times before or after the axis fall into the first or the last moment."""
        return np.clip((times - self.start) // self.width, 0, self.count - 1)


@dataclass(frozen=True)
class Block:
    """Rows of one partition, the lookup of a row's key as text, and the lookup of a group's events about the rows."""

    partition: int
    rows: BlockRows
    key_of: Callable[[int], str]
    events_of: Callable[[GroupFacts], Events]


@dataclass(frozen=True)
class Domain:
    """Identifies the rows and groups of other partitions that a partition's rows and groups are compared with."""

    #: The lowest partition number of its subject.
    subject: int
    strict: bool
    #: Group → the lowest number among the subject's groups of the same name.
    groups: dict[int, int] = field(default_factory=dict)


def audit_block(block: Block, groups: Iterable[GroupFacts], scale: Scale, facts: Tally, domain: Domain) -> None:
    """Add the facts of a block about its partition and each group."""
    rows = block.rows
    if not len(rows):
        return
    facts.add(tally.ROWS, block.partition, "", len(rows))
    _add_keys(block, facts)
    _add_stored(block, domain, facts)
    for group in groups:
        events = block.events_of(group)
        verdict = judge(rows, events, touches(rows, events, group), group)
        _add_order(rows, verdict, group, facts)
        _add_moved(rows, verdict, group, domain, facts)
        _add_verdict(rows, verdict, group, facts)
        _add_times(rows, events, verdict, group, scale, facts)


def _add_keys(block: Block, facts: Tally) -> None:
    rows = block.rows
    facts.histogram(tally.SLOT, block.partition, rows.lps.astype(np.int64) % LOGICAL_PARTITIONS)
    hashes, firsts, counts = np.unique(rows.hashes, return_index=True, return_counts=True)
    keyed = hashes != NO_KEY_HASH
    firsts, counts = firsts[keyed], counts[keyed]
    most = np.argsort(-counts, kind="stable")[:KEYS_MAX]
    names = [block.key_of(int(row)) for row in firsts[most]]
    facts.add_many(tally.KEY, block.partition, names, np.zeros(len(most), np.int64), counts[most])


def _add_stored(block: Block, domain: Domain, facts: Tally) -> None:
    """Add how the messages were stored."""
    rows = block.rows
    for name, numbers in judge_stored(rows, strict=domain.strict).items():
        facts.add(tally.FLAW, block.partition, name, len(numbers))
        shown = rows.sequences[numbers[:EXAMPLES_MAX]]
        facts.add_many(tally.FLAW_EXAMPLE, block.partition, name, shown, np.ones(len(shown), np.int64))
    ids = windows_of(rows)
    bits = ids.bits.view(np.int64)
    facts.add_many(
        tally.IDS, domain.subject, "", ids.producers.view(np.int64), ids.windows, (bits, np.zeros_like(bits))
    )
    if domain.strict:
        keys = key_numbers(rows)
        first = np.full(len(keys.hashes), rows.sequences[0], np.int64)
        facts.add_many(tally.SENT, block.partition, "", keys.hashes.view(np.int64), first, (keys.least, keys.greatest))


def _add_moved(rows: BlockRows, verdict: GroupVerdict, group: GroupFacts, domain: Domain, facts: Tally) -> None:
    """Add the ack times of keys whose LPs may have moved from or to another partition."""
    if rows.spans is None or not group.keeps_order or not group.whole:
        return
    for span in np.unique(rows.spans).tolist():
        times = key_times(rows, verdict, np.flatnonzero(rows.spans == span))
        keys, acks = times.hashes.view(np.int64), (times.earliest, times.latest)
        facts.add_many(tally.MOVED, domain.groups[group.id], str(group.partition), keys, times.places, acks)


def _add_order(rows: BlockRows, verdict: GroupVerdict, group: GroupFacts, facts: Tally) -> None:
    wrong, times = out_of_order(rows, verdict)
    if group.whole or not group.ordered:
        verdict.broken["out_of_order"] = wrong
    if group.keeps_order and group.whole:
        first = np.full(len(times.hashes), rows.sequences[0], np.int64)
        keys = times.hashes.view(np.int64)
        facts.add_many(tally.ORDER, group.id, "", keys, first, (times.earliest, times.latest))


def _add_verdict(rows: BlockRows, verdict: GroupVerdict, group: GroupFacts, facts: Tally) -> None:
    counts = np.bincount(verdict.fates, minlength=len(Fate))
    for fate in Fate:
        facts.add(tally.FATE, group.id, fate.name.lower(), int(counts[fate]))
    for name, numbers in verdict.broken.items():
        facts.add(tally.BROKEN, group.id, name, len(numbers))
        shown = rows.sequences[numbers[:EXAMPLES_MAX]]
        facts.add_many(tally.EXAMPLE, group.id, name, shown, np.ones(len(shown), np.int64))
    for name, count in verdict.counts.items():
        facts.add(tally.COUNT, group.id, name, count)


def _add_times(
    rows: BlockRows, events: Events, verdict: GroupVerdict, group: GroupFacts, scale: Scale, facts: Tally
) -> None:
    of_group = rows.sequences >= group.first
    facts.histogram(tally.STORED, group.id, scale.moments(rows.store_times[of_group]))
    settled = of_group & (verdict.settled_by >= 0)
    facts.histogram(tally.SETTLED, group.id, scale.moments(events["time"][verdict.settled_by[settled]]))
    # A rewind moved the group past these rows: they no longer count as lag.
    left = of_group & (verdict.settled_by < 0) & (rows.sequences < group.start)
    facts.histogram(tally.SETTLED, group.id, scale.moments(np.maximum(rows.store_times[left], group.rewind_time)))
    acked = verdict.first_acks >= 0
    waited = events["time"][verdict.first_acks[acked]] - rows.send_times[acked]
    facts.histogram(tally.LATENCY, group.id, latency_bins(waited))
