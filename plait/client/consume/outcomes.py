"""Outcomes that are collected and not yet sent: acked rows, and failed rows by failure outcome.

The rows of a frame with a tag are kept by frame, as ranges that the tag makes unambiguous. All others are sequence
ranges, which are valid in every session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from plait.client.consume.delivered import RangesByFrame, flat
from plait.client.consume.failure import UNBEGUN, EpochRange, FailureOutcome, Nacks
from plait.client.consume.ordered.failed_keys import FailedKeys, KeyHolds
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered, no_lps
from plait.client.consume.row_runs import RowMask, mask_runs
from plait.client.net.node import ConsumerSession
from plait.client.types import PartitionName
from plait.limits import FAILED_RANGES_MAX, REQUEST_RANGES_MAX
from plait.model.logical_partitions import runs_of
from plait.model.names import counted
from plait.model.reason import Reason
from plait.wire import messages as m

log = logging.getLogger("plait.client")

#: Nack requests in flight at a time. If every row has its own reason there is one request per row, and waiting for each
#: reply in turn would be slow.
REQUESTS_MAX = 64
#: The number of returned ranges from which it pays to express them by LP instead.
SCATTERED_MIN = 16


class ReturnedRanges(NamedTuple):
    """Returned rows: ranges that mean all their rows of ``lps``, the tag of each, and the other ranges by frame."""

    lps: list[m.LpRun]
    ranges: list[EpochRange]
    tags: list[int]
    rest: RangesByFrame


class PendingOutcomes(msgspec.Struct, eq=False):
    """The outcomes of one partition's rows, for the next requests."""

    #: The keys that failed rows hold back; None: the consumer is not ordered.
    holds: KeyHolds | None = None
    #: Acked rows, and failed rows by failure outcome.
    acks: RangesByFrame = {}
    nacks: dict[FailureOutcome, RangesByFrame] = {}
    #: Keys with failures among these outcomes, once they are being sent.
    failing: list[FailedKeys] = []

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        """Add outcomes from the spool of an earlier process, or of an earlier session."""
        if acks:
            self.acks.setdefault(None, []).extend(acks)
        for failed, ranges in nacks.items():
            self.nacks.setdefault(failed, {}).setdefault(None, []).extend(ranges)

    def give_back(self, unsent: PendingOutcomes) -> None:
        """Put back outcomes that could not be sent, before those that were added meanwhile."""
        later, self.acks = self.acks, unsent.acks
        _join(self.acks, later)
        for failed, ranges in unsent.nacks.items():
            _join(self.nacks.setdefault(failed, {}), ranges)

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        return _plain(self.acks), {failed: _plain(ranges) for failed, ranges in self.nacks.items()}

    def new_session(self) -> None:
        """A new session starts: the tags of these outcomes belong to an earlier one."""
        acks, nacks = self.plain()
        self.acks, self.nacks = {}, {}
        self.add(acks, nacks)

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        """The request for the rows with one failure outcome."""
        found = self.nacks[failed]
        if failed != UNBEGUN or sum(map(len, found.values())) < SCATTERED_MIN:
            ranges, tags = flat(found)
            return m.NackRequest(session, ranges, *failed, tags=tags)
        lps, lp_ranges, lp_tags, rest = by_logical_partitions(found)
        ranges, tags = flat(rest)
        return m.NackRequest(session, ranges, *failed, tags=tags, lps=lps, lp_ranges=lp_ranges, lp_tags=lp_tags)

    async def send(self, session: ConsumerSession, partition: PartitionName, group: str | None) -> None:
        """Send all outcomes of the partition's rows and wait for the replies.

        Nacks first: the broker must not store an ack before the nacks that were reported with it.
        """
        if self.nacks and self.holds is not None:
            self.failing = self.holds.unknown()
        await self._send_nacks(session, partition, group)
        for ack in split_ack(m.AckRequest(session.number, *flat(self.acks))):
            await session.link.request(ack)

    async def _send_nacks(self, session: ConsumerSession, partition: PartitionName, group: str | None) -> None:
        """Send all nacks and remove those that the broker has stored. After all replies, raises the first error."""
        nacks = [(failed, nack) for failed in self.nacks for nack in split_nack(self.nack(session.number, failed))]
        unanswered = Counter(failed for failed, _ in nacks)
        for at in range(0, len(nacks), REQUESTS_MAX):
            some = nacks[at : at + REQUESTS_MAX]
            answers = await asyncio.gather(*(session.link.request(nack) for _, nack in some), return_exceptions=True)
            for (failed, _), answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException):
                    continue
                unanswered[failed] -= 1
                if not unanswered[failed]:
                    self.confirm(failed)
                if answer.dead:
                    log.warning(
                        "%s of %s went to the dead letters of group %s: %s",
                        counted(answer.dead, "message"),
                        partition,
                        group,
                        failed.reason or Reason(),
                    )
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer

    def confirm(self, failed: FailureOutcome) -> None:
        """Remove the rows with one failure outcome: the broker has stored them."""
        for frame, ranges in self.nacks.pop(failed).items():
            if isinstance(frame, OrderedDelivered) and failed == UNBEGUN:
                frame.given_back(ranges)
        if not self.nacks and self.holds is not None:
            self.holds.stored(self.failing)


def _plain(found: RangesByFrame) -> list[EpochRange]:
    ranges: list[EpochRange] = []
    for frame, several in found.items():
        if isinstance(frame, OrderedDelivered):
            # As a mask: ``several`` is in the order of the outcomes, and runs of rows must ascend.
            ranges += frame.ranges(mask_runs(frame.mask_in(several)))
        else:
            ranges += several
    return ranges


def _join(into: RangesByFrame, more: RangesByFrame) -> None:
    for frame, ranges in more.items():
        into.setdefault(frame, []).extend(ranges)


def by_logical_partitions(tagged: RangesByFrame) -> ReturnedRanges:
    """Express returned rows by their logical partitions, for each frame where that takes fewer ranges.

    A consumer that gives up half of its LPs returns about every other row that it has prefetched. "All rows of these
    LPs in this range" covers a whole frame, provided that the user holds none of those rows.
    """
    chosen = no_lps()
    masks: dict[OrderedDelivered, RowMask] = {}
    rest: RangesByFrame = {}
    for frame, ranges in tagged.items():
        if not isinstance(frame, OrderedDelivered) or frame.keyed is None:
            rest[frame] = ranges
        else:
            masks[frame] = mask = frame.mask_in(ranges)
            chosen[frame.lps[mask & frame.keyed]] = True
    found: list[EpochRange] = []
    tags: list[int] = []
    for frame, mask in masks.items():
        assert frame.keyed is not None
        some = _between(frame, mask & frame.keyed, ~mask & (chosen[frame.lps] | ~frame.keyed))
        # Only the broker knows the LP of a row without a key.
        keyless = frame.tagged(mask_runs(mask & ~frame.keyed))
        if len(some) + len(keyless) >= len(tagged[frame]):
            some, keyless = [], tagged[frame]
        found += some
        tags += [frame.tag] * len(some)
        if keyless:
            rest[frame] = keyless
    return ReturnedRanges(runs_of(chosen), found, tags, rest)


def _between(frame: OrderedDelivered, rows: RowMask, excluded: RowMask) -> list[EpochRange]:
    """The ranges of a frame between the ``excluded`` rows that contain any of ``rows``."""
    edges = np.concatenate([[-1], np.flatnonzero(excluded), [frame.count]])
    counts = np.concatenate([[0], np.cumsum(rows)])
    first, end = edges[:-1] + 1, edges[1:]
    some = counts[end] > counts[first]
    return frame.tagged(list(zip(first[some].tolist(), end[some].tolist(), strict=True)))


def split_ack(ack: m.AckRequest) -> Iterator[m.AckRequest]:
    """Yield the ack as requests of at most ``REQUEST_RANGES_MAX`` ranges; none if it has no ranges."""
    for part in _parts(len(ack.ranges), REQUEST_RANGES_MAX):
        yield replace(ack, ranges=ack.ranges[part], tags=ack.tags[part])


def split_nack(nack: m.NackRequest) -> Iterator[m.NackRequest]:
    """Yield the nack as one or more requests of at most ``FAILED_RANGES_MAX`` ranges.

    Returns, which count no attempt, may have ``REQUEST_RANGES_MAX`` ranges.
    """
    most = FAILED_RANGES_MAX if nack.counted else REQUEST_RANGES_MAX
    if len(nack.ranges) + len(nack.lp_ranges) <= most:
        yield nack
        return
    for part in _parts(len(nack.lp_ranges), most):
        lp_ranges, lp_tags = nack.lp_ranges[part], nack.lp_tags[part]
        yield replace(nack, ranges=[], tags=[], lp_ranges=lp_ranges, lp_tags=lp_tags)
    for part in _parts(len(nack.ranges), most):
        ranges, tags = nack.ranges[part], nack.tags[part]
        yield replace(nack, ranges=ranges, tags=tags, lps=[], lp_ranges=[], lp_tags=[])


def _parts(count: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, count, most))
