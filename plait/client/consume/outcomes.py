"""Outcomes that are collected and not yet sent: acked rows, and failed rows by failure outcome.

The rows of a frame with a tag are kept by frame, as ranges that the tag makes unambiguous. All others are sequence
ranges, which are valid in every session.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import UNBEGUN, EpochRange, FailureOutcome, Nacks
from plait.client.consume.ordered.failed_keys import FailedKeys, FrameOutcomes, KeyHolds
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered
from plait.client.consume.ordered.returned_ranges import RangesByFrame, by_logical_partitions
from plait.client.consume.row_runs import Run
from plait.limits import FAILED_RANGES_MAX, REQUEST_RANGES_MAX
from plait.wire import messages as m
from plait.wire.link import Link

#: Nack requests in flight at a time. If every row has its own reason there is one request per row, and waiting for each
#: reply in turn would be slow.
REQUESTS_MAX = 64
#: The number of returned ranges from which it pays to express them by LP instead.
SCATTERED_MIN = 16


class PendingOutcomes:
    """The pending outcomes of one partition."""

    def __init__(self, holds: KeyHolds | None = None) -> None:
        #: The keys that failed rows hold back; None: the consumer is not ordered.
        self.holds = holds
        #: Acked rows, and failed rows by failure outcome.
        self.acks: RangesByFrame = {}
        self.nacks: dict[FailureOutcome, RangesByFrame] = {}
        #: Keys with failures among these outcomes.
        self._failing: list[FailedKeys] = []

    # --- from the frames ------------------------------------------------------------------------

    def collect(self, frames: Iterable[DeliveredFrame]) -> None:
        """Add the outcomes of the frames' rows."""
        outcomes: list[FrameOutcomes] = []
        failed = False
        for frame in frames:
            acks, nacks = frame.collect()
            outcomes.append((frame, acks, nacks))
            failed = failed or bool(nacks)
        if failed and self.holds is not None:
            outcomes = self.holds.apply(outcomes)
        for frame, acks, nacks in outcomes:
            if acks:
                _put(frame, self.acks, acks)
            for how, runs in nacks.items():
                if runs:
                    _put(frame, self.nacks.setdefault(how, {}), runs)

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        """Add outcomes from the spool of an earlier process, or of an earlier session."""
        if acks:
            self.acks.setdefault(None, []).extend(acks)
        for failed, ranges in nacks.items():
            self.nacks.setdefault(failed, {}).setdefault(None, []).extend(ranges)

    # --- to the broker --------------------------------------------------------------------------

    def clear(self) -> None:
        """Discard all outcomes."""
        self.acks, self.nacks = {}, {}

    def take(self) -> PendingOutcomes:
        """Remove and return all outcomes, for sending."""
        taken = PendingOutcomes(self.holds)
        taken.acks, taken.nacks = self.acks, self.nacks
        self.acks, self.nacks = {}, {}
        if taken.nacks and self.holds is not None:
            taken._failing = self.holds.unknown()
        return taken

    def give_back(self, unsent: PendingOutcomes) -> None:
        """Put back outcomes that could not be sent, before those that were added meanwhile."""
        later, self.acks = self.acks, unsent.acks
        _join(self.acks, later)
        for failed, ranges in unsent.nacks.items():
            _join(self.nacks.setdefault(failed, {}), ranges)

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        """All outcomes as sequence ranges, which are valid in every session."""
        return _plain(self.acks), {failed: _plain(ranges) for failed, ranges in self.nacks.items()}

    def new_session(self) -> None:
        """A new session starts: the tags of these outcomes belong to an earlier one."""
        acks, nacks = self.plain()
        self.clear()
        self.add(acks, nacks)

    def only_ack(self, session: int) -> m.AckRequest | None:
        """All outcomes as one request; None: some are not acks, or they do not fit into one request."""
        request = None if self.nacks else self.ack(session)
        return None if request is None or len(request.ranges) > REQUEST_RANGES_MAX else request

    def ack(self, session: int) -> m.AckRequest:
        """The request for the acked rows; it may have no ranges."""
        return m.AckRequest(session, *_flat(self.acks))

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        """The request for the rows with one failure outcome."""
        found = self.nacks[failed]
        if failed != UNBEGUN or sum(map(len, found.values())) < SCATTERED_MIN:
            ranges, tags = _flat(found)
            return m.NackRequest(session, ranges, *failed, tags=tags)
        lps, lp_ranges, lp_tags, rest = by_logical_partitions(found)
        ranges, tags = _flat(rest)
        return m.NackRequest(session, ranges, *failed, tags=tags, lps=lps, lp_ranges=lp_ranges, lp_tags=lp_tags)

    async def send(self, link: Link, session: int, dead: Callable[[int, FailureOutcome], None]) -> None:
        """Send all outcomes and wait for the replies; calls ``dead`` with the number of messages that became letters.

        Nacks first: the broker must not store an ack before the nacks that were reported with it.
        """
        await self._send_nacks(link, session, dead)
        for ack in split_ack(self.ack(session)):
            await link.request(ack)

    async def _send_nacks(self, link: Link, session: int, dead: Callable[[int, FailureOutcome], None]) -> None:
        """Send all nacks and remove those that the broker has stored. After all replies, raises the first error."""
        nacks = [(failed, nack) for failed in self.nacks for nack in split_nack(self.nack(session, failed))]
        unanswered = Counter(failed for failed, _ in nacks)
        for at in range(0, len(nacks), REQUESTS_MAX):
            some = nacks[at : at + REQUESTS_MAX]
            answers = await asyncio.gather(*(link.request(nack) for _, nack in some), return_exceptions=True)
            for (failed, _), answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException):
                    continue
                unanswered[failed] -= 1
                if not unanswered[failed]:
                    self.confirm(failed)
                if answer.dead:
                    dead(answer.dead, failed)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer

    def confirm(self, failed: FailureOutcome) -> None:
        """Remove the rows with one failure outcome: the broker has stored them."""
        for frame, ranges in self.nacks.pop(failed).items():
            if frame is not None and failed == UNBEGUN:
                frame.given_back(ranges)
        if not self.nacks and self.holds is not None:
            self.holds.stored(self._failing)


def _put(frame: DeliveredFrame, place: RangesByFrame, runs: list[Run]) -> None:
    if frame.tag and isinstance(frame, OrderedDelivered):
        place.setdefault(frame, []).extend(frame.tagged(runs))
    else:
        place.setdefault(None, []).extend(frame.ranges(runs))


def _plain(found: RangesByFrame) -> list[EpochRange]:
    ranges: list[EpochRange] = []
    for frame, several in found.items():
        if frame is None:
            ranges += several
        else:
            ranges += frame.ranges([tuple(np.searchsorted(frame.sequences, each[:2]).tolist()) for each in several])
    return ranges


def _join(into: RangesByFrame, more: RangesByFrame) -> None:
    for frame, ranges in more.items():
        into.setdefault(frame, []).extend(ranges)


def _flat(found: RangesByFrame) -> tuple[list[EpochRange], list[int]]:
    """All ranges, and the tag of each; no tags if all are 0."""
    if found.keys() <= {None}:
        plain = found.get(None, [])
        return plain if len(plain) < 2 else merged(plain), []
    ranges: list[EpochRange] = []
    tags: list[int] = []
    for frame, several in found.items():
        joined = merged(several) if frame is None else frame.widened(merged(several))
        ranges += joined
        tags += [0 if frame is None else frame.tag] * len(joined)
    return ranges, tags


def merged(ranges: list[EpochRange]) -> list[EpochRange]:
    """The ranges sorted, with overlapping and adjacent ranges of one epoch joined."""
    if len(ranges) < 2:
        return ranges
    ranges.sort()
    joined = [ranges[0]]
    for start, end, epoch in ranges[1:]:
        last_start, last_end, last_epoch = joined[-1]
        if start <= last_end and epoch == last_epoch:
            joined[-1] = (last_start, max(end, last_end), epoch)
        else:
            joined.append((start, end, epoch))
    return joined


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
