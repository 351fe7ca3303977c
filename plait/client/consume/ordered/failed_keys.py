"""Keys with a row that is to be redelivered: in a strict group a failed row, in any group a returned one.

Later rows of such a key must not be handled before that row. In a strict group, a failure also returns the later rows
of the key, whatever their outcome was. The broker redelivers them after the failed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from plait.client.consume.delivered import DeliveredFrame, Deliveries, FailedRuns
from plait.client.consume.failure import UNBEGUN
from plait.client.consume.ordered.ordered_delivered import WAITS, OrderedDelivered
from plait.client.consume.row_runs import RowMask, Run, mask_of, mask_runs, rows_of
from plait.model.logical_partitions import Hashes

#: A frame, its acked rows, and its failed rows.
FrameOutcomes = tuple[DeliveredFrame, list[Run], FailedRuns]


class FailedKeys:
    """The first failed row of each of some keys."""

    def __init__(self, keys: Hashes, sequences: npt.NDArray[np.int64]) -> None:
        order = np.lexsort((sequences, keys))
        self._keys, first = np.unique(keys[order], return_index=True)
        self._sequences = sequences[order][first]
        #: The number of the last pull sent before the broker had stored the failures; None: it may not have them yet.
        self.known_at: int | None = None

    def in_order(self, number: int) -> bool:
        """True if the reply to this pull is in order, because it was sent after the broker had stored the failures."""
        return self.known_at is not None and number > self.known_at

    def behind(self, frame: OrderedDelivered) -> RowMask | None:
        """The frame's rows of these keys that come after the failed row of their key; None: there are none."""
        if frame.keys is None or frame.keyed is None or not len(self._keys):
            return None
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self._keys) - 1)
        mask = (self._keys[at] == frame.keys) & frame.keyed
        mask &= frame.sequences > self._sequences[at]
        return mask if mask.any() else None

    def redelivered(self, frame: OrderedDelivered) -> None:
        """Remove the keys whose failed row is redelivered in this frame."""
        if frame.keys is None or not len(self._keys):
            return
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self._keys) - 1)
        again = at[(self._keys[at] == frame.keys) & (frame.sequences == self._sequences[at])]
        self._keys, self._sequences = np.delete(self._keys, again), np.delete(self._sequences, again)


class KeyHolds:
    """The failed keys of one partition. ``last_pull`` returns the number of the last pull."""

    def __init__(self, deliveries: Deliveries, last_pull: Callable[[], int]) -> None:
        self._deliveries = deliveries
        self._last_pull = last_pull
        #: True if a failed row holds back its key.
        self.strict = False
        #: Failures that the broker may not have stored yet: later rows of their keys that arrive must not be handled.
        self.failing: list[FailedKeys] = []

    def apply(self, outcomes: list[FrameOutcomes]) -> list[FrameOutcomes]:
        """Add what failures among the outcomes mean for later rows of their keys."""
        failing = self._failing_in(outcomes)
        if failing is None:
            return outcomes
        self.failing.append(failing)
        if self.strict:
            outcomes = [_without(failing, *each) for each in outcomes]
        return outcomes + self._behind(failing)

    def _failing_in(self, outcomes: Iterable[FrameOutcomes]) -> FailedKeys | None:
        """The keys with a row to be redelivered: in a strict group every failed row, otherwise only returned rows."""
        keys, sequences = [], []
        for frame, _, nacks in outcomes:
            holding = [rows_of(runs) for failed, runs in nacks.items() if self.strict or failed == UNBEGUN]
            if isinstance(frame, OrderedDelivered) and frame.keys is not None and frame.keyed is not None and holding:
                rows = np.concatenate(holding)
                rows = rows[frame.keyed[rows]]
                keys.append(frame.keys[rows])
                sequences.append(frame.sequences[rows])
        if not sum(map(len, keys)):
            return None
        return FailedKeys(np.concatenate(keys), np.concatenate(sequences))

    def _behind(self, failing: FailedKeys) -> list[FrameOutcomes]:
        """Return the open rows that come after a failed row of their key.

        In a group that is not strict only waiting rows are returned; the user keeps the rows it holds.
        """
        outcomes: list[FrameOutcomes] = []
        for delivered in list(self._deliveries.open):
            assert isinstance(delivered, OrderedDelivered)
            behind = failing.behind(delivered)
            if behind is not None and not self.strict:
                behind &= delivered.states == WAITS
            if behind is not None and behind.any():
                outcomes.append((delivered, [], {UNBEGUN: delivered.close_rows(behind)}))
        return outcomes

    def unknown(self) -> list[FailedKeys]:
        """Failures that the broker does not have yet."""
        return [failing for failing in self.failing if failing.known_at is None]

    def stored(self, failures: list[FailedKeys]) -> None:
        """Record that the broker has stored these failures."""
        for failing in failures:
            failing.known_at = self._last_pull()

    def held_back(self, delivered: OrderedDelivered, number: int) -> RowMask:
        """The rows in the reply to a pull that come after a failed row which is not redelivered yet."""
        held: RowMask = np.zeros(delivered.count, bool)
        for failing in self.failing:
            if not failing.in_order(number):
                failing.redelivered(delivered)
                behind = failing.behind(delivered)
                if behind is not None:
                    held |= behind
        return held

    def pulled(self, number: int) -> None:
        """Forget the failures for which the reply to this pull is in order: all later replies are in order too."""
        self.failing = [failing for failing in self.failing if not failing.in_order(number)]


def _without(failing: FailedKeys, frame: DeliveredFrame, acks: list[Run], nacks: FailedRuns) -> FrameOutcomes:
    """The outcomes of a frame's rows, where rows after a failed row of their key are returned instead."""
    behind = failing.behind(frame) if isinstance(frame, OrderedDelivered) else None
    if behind is None:
        return frame, acks, nacks
    back = np.zeros(frame.count, bool)

    def ahead(runs: list[Run]) -> list[Run]:
        nonlocal back
        mask = mask_of(rows_of(runs), frame.count)
        back |= mask & behind
        return mask_runs(mask & ~behind)

    acks, kept = ahead(acks), {failed: ahead(runs) for failed, runs in nacks.items()}
    back |= mask_of(rows_of(kept.get(UNBEGUN, [])), frame.count)
    kept[UNBEGUN] = mask_runs(back)
    return frame, acks, kept
