"""Keys with a row that is to be redelivered: in a strict group a failed row, in any group a returned one.

Later rows of such a key must not be handled before that row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from plait.client.consume.failure import UNBEGUN, EpochRange, Nacks
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered, RowMask, rows_of
from plait.model.logical_partitions import Hashes

#: A frame, the runs of its acked rows, and the runs of its failed rows by failure outcome.
FrameOutcomes = tuple[OrderedDelivered, list[EpochRange], Nacks]


class FailedKeys:
    """The first failed row of each of some keys."""

    def __init__(self, keys: Hashes, sequences: npt.NDArray[np.int64]) -> None:
        order = np.lexsort((sequences, keys))
        self._keys, first = np.unique(keys[order], return_index=True)
        self._sequences = sequences[order][first]
        #: The number of the last pull sent before the broker had stored the failures; None: it may not have them yet.
        self.known_at: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def in_order(self, number: int) -> bool:
        """The reply to this pull is in order: the pull was sent after the broker had stored the failures."""
        return self.known_at is not None and number > self.known_at

    def behind(self, frame: OrderedDelivered) -> RowMask | None:
        """The frame's rows of these keys that come after the failed row of their key; None: there are none."""
        if frame.keys is None or frame.keyed is None or not len(self):
            return None
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self) - 1)
        mask = (self._keys[at] == frame.keys) & frame.keyed
        mask &= frame.sequences > self._sequences[at]
        return mask if mask.any() else None

    def redelivered(self, frame: OrderedDelivered) -> None:
        """Remove the keys whose failed row is redelivered in this frame."""
        if frame.keys is None or not len(self):
            return
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self) - 1)
        again = at[(self._keys[at] == frame.keys) & (frame.sequences == self._sequences[at])]
        self._keys, self._sequences = np.delete(self._keys, again), np.delete(self._sequences, again)


def failing_in(outcomes: Iterable[FrameOutcomes], *, strict: bool) -> FailedKeys | None:
    """The keys with a row to be redelivered: in a strict group every failed row, otherwise only returned rows."""
    keys, sequences = [], []
    for frame, _, nacks in outcomes:
        holding = [rows_of(runs) for failed, runs in nacks.items() if strict or failed == UNBEGUN]
        if frame.keys is not None and frame.keyed is not None and holding:
            rows = np.concatenate(holding)
            rows = rows[frame.keyed[rows]]
            keys.append(frame.keys[rows])
            sequences.append(frame.sequences[rows])
    if not sum(map(len, keys)):
        return None
    return FailedKeys(np.concatenate(keys), np.concatenate(sequences))
