"""The pending outcomes of an ordered consumer: runs of rows, by the tag of the frame that delivered them.

In a strict group a failed row takes the later rows of its key with it: whatever their outcome was, they are returned
and redelivered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import UNBEGUN, EpochRange, FailureOutcome, Nacks
from plait.client.consume.ordered.failed_keys import FailedKeys, FrameOutcomes, failing_in
from plait.client.consume.ordered.ordered_delivered import WAITS, OrderedDelivered, mask_of, rows_of
from plait.client.consume.ordered.returned_ranges import RangesByFrame, by_logical_partitions
from plait.client.consume.pending_outcomes import merged
from plait.wire import messages as m

#: The number of returned ranges from which it pays to express them by LP instead.
SCATTERED_MIN = 16


class OrderedPending:
    """Pending outcomes by frame. ``open_frames`` are frames with open rows, ``pulls`` is the last pull number."""

    def __init__(self, open_frames: Callable[[], Iterable[DeliveredFrame]], pulls: Callable[[], int]) -> None:
        self._open_frames = open_frames
        self._pulls = pulls
        #: A failed row holds back its key.
        self.strict = False
        self._acks: RangesByFrame = {}
        self._nacks: dict[FailureOutcome, RangesByFrame] = {}
        #: Failures that the broker may not have stored yet: later rows of their keys that arrive must not be handled.
        self.failing: list[FailedKeys] = []
        #: Those of them that are sent with these outcomes.
        self._sent_failures: list[FailedKeys] = []

    # --- from the frames ------------------------------------------------------------------------

    def collect(self, frames: Iterable[DeliveredFrame]) -> None:
        outcomes: list[FrameOutcomes] = [(d, *d.collect()) for d in frames if isinstance(d, OrderedDelivered)]
        if any(nacks for _, _, nacks in outcomes):
            failing = failing_in(outcomes, strict=self.strict)
            if failing is not None:
                self.failing.append(failing)
                if self.strict:
                    outcomes = [_without(failing, *each) for each in outcomes]
                outcomes += self._behind(failing)
        for frame, acks, nacks in outcomes:
            _put(frame, self._acks, acks)
            for failed, runs in nacks.items():
                if runs:
                    _put(frame, self._nacks.setdefault(failed, {}), runs)

    def _behind(self, failing: FailedKeys) -> list[FrameOutcomes]:
        """Return the open rows that come after a failed row of their key.

        In a group that is not strict only waiting rows are returned; the user keeps the rows it holds.
        """
        outcomes: list[FrameOutcomes] = []
        for delivered in list(self._open_frames()):
            assert isinstance(delivered, OrderedDelivered)
            behind = failing.behind(delivered)
            if behind is not None and not self.strict:
                behind &= delivered.states == WAITS
            if behind is not None and behind.any():
                outcomes.append((delivered, [], {UNBEGUN: delivered.close_rows(behind)}))
        return outcomes

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        if acks:
            self._acks.setdefault(None, []).extend(acks)
        for failed, ranges in nacks.items():
            self._nacks.setdefault(failed, {}).setdefault(None, []).extend(ranges)

    # --- to the broker --------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._acks or self._nacks)

    def only_acks(self, ranges_max: int) -> bool:
        return not self._nacks and sum(map(len, self._acks.values())) <= ranges_max

    def clear(self) -> None:
        self._acks, self._nacks = {}, {}

    def take(self) -> OrderedPending:
        taken = OrderedPending(self._open_frames, self._pulls)
        taken._acks, taken._nacks = self._acks, self._nacks
        taken._sent_failures = [failing for failing in self.failing if failing.known_at is None]
        self.clear()
        return taken

    def give_back(self, unsent: OrderedPending) -> None:
        later, self._acks = self._acks, unsent._acks
        _join(self._acks, later)
        for failed, tagged in unsent._nacks.items():
            _join(self._nacks.setdefault(failed, {}), tagged)

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        return _plain(self._acks), {failed: _plain(tagged) for failed, tagged in self._nacks.items()}

    def new_session(self) -> None:
        acks, nacks = self.plain()
        self.clear()
        self.add(acks, nacks)

    def ack(self, session: int) -> m.AckRequest | None:
        return m.AckRequest(session, *_flat(self._acks)) if self._acks else None

    def failures(self) -> list[FailureOutcome]:
        return list(self._nacks)

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        tagged = self._nacks[failed]
        if failed != UNBEGUN or sum(map(len, tagged.values())) < SCATTERED_MIN:
            ranges, tags = _flat(tagged)
            return m.NackRequest(session, ranges, *failed, tags=tags)
        lps, lp_ranges, lp_tags, rest = by_logical_partitions(tagged)
        ranges, tags = _flat(rest)
        return m.NackRequest(session, ranges, *failed, tags=tags, lps=lps, lp_ranges=lp_ranges, lp_tags=lp_tags)

    def confirm(self, failed: FailureOutcome) -> None:
        for frame, ranges in self._nacks.pop(failed).items():
            if frame is not None and failed == UNBEGUN:
                frame.given_back(ranges)
        if not self._nacks:
            for failing in self._sent_failures:
                failing.known_at = self._pulls()


def _without(failing: FailedKeys, frame: OrderedDelivered, acks: list[EpochRange], nacks: Nacks) -> FrameOutcomes:
    """The outcomes of a frame's rows, where rows after a failed row of their key are returned instead."""
    behind = failing.behind(frame)
    if behind is None:
        return frame, acks, nacks
    back = np.zeros(frame.count, bool)

    def ahead(runs: list[EpochRange]) -> list[EpochRange]:
        nonlocal back
        mask = mask_of(rows_of(runs), frame.count)
        back |= mask & behind
        return frame.runs(mask & ~behind)

    acks, kept = ahead(acks), {failed: ahead(runs) for failed, runs in nacks.items()}
    back |= mask_of(rows_of(kept.get(UNBEGUN, [])), frame.count)
    kept[UNBEGUN] = frame.runs(back)
    return frame, acks, kept


def _put(frame: OrderedDelivered, place: RangesByFrame, runs: list[EpochRange]) -> None:
    if not runs:
        return
    if frame.tag:
        place.setdefault(frame, []).extend(frame.tagged(runs))
    else:
        place.setdefault(None, []).extend(frame.plain(rows_of(runs)))


def _plain(tagged: RangesByFrame) -> list[EpochRange]:
    """Plain sequence ranges, which cover only those rows and need no tag."""
    ranges: list[EpochRange] = []
    for frame, several in tagged.items():
        if frame is None:
            ranges += several
            continue
        for start, end, _ in several:
            first, last = np.searchsorted(frame.sequences, [start, end]).tolist()
            ranges += frame.plain(np.arange(first, last))
    return ranges


def _join(into: RangesByFrame, more: RangesByFrame) -> None:
    for frame, ranges in more.items():
        into.setdefault(frame, []).extend(ranges)


def _flat(tagged: RangesByFrame) -> tuple[list[EpochRange], list[int]]:
    """All ranges, and the tag of each."""
    ranges: list[EpochRange] = []
    tags: list[int] = []
    for frame, several in tagged.items():
        joined = merged(several) if frame is None else frame.widened(merged(several))
        ranges += joined
        tags += [0 if frame is None else frame.tag] * len(joined)
    return ranges, tags
