"""Keys whose messages failed in a strict group, or were given back: what stands behind such a row comes after it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from plait.client.consume.failure import UNBEGUN, EpochRange, Nacks
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered, RowMask, rows_of
from plait.model.logical_partitions import Hashes

#: A frame, and the runs of its rows that were acked and that failed.
Said = tuple[OrderedDelivered, list[EpochRange], Nacks]


class FailedKeys:
    """The first failed row of each of some keys."""

    def __init__(self, keys: Hashes, sequences: npt.NDArray[np.int64]) -> None:
        order = np.lexsort((sequences, keys))
        self._keys, first = np.unique(keys[order], return_index=True)
        self._sequences = sequences[order][first]
        #: Pulls after this number were asked for when the broker knew; None: it may not know yet.
        self.known_at: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def over(self, number: int) -> bool:
        """What a pull with this number brings is in order."""
        return self.known_at is not None and number > self.known_at

    def behind(self, frame: OrderedDelivered) -> RowMask | None:
        """The frame's rows of these keys that come after the ones that failed; None: there are none."""
        if frame.keys is None or frame.keyed is None or not len(self):
            return None
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self) - 1)
        mask = (self._keys[at] == frame.keys) & frame.keyed
        mask &= frame.sequences > self._sequences[at]
        return mask if mask.any() else None

    def came_again(self, frame: OrderedDelivered) -> None:
        """Keys whose failed row is in the frame are in order again."""
        if frame.keys is None or not len(self):
            return
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self) - 1)
        again = at[(self._keys[at] == frame.keys) & (frame.sequences == self._sequences[at])]
        self._keys, self._sequences = np.delete(self._keys, again), np.delete(self._sequences, again)


def failing_in(said: Iterable[Said], *, strict: bool) -> FailedKeys | None:
    """What rows with keys hold their keys: in a strict group all that failed, in others what is given back."""
    keys, sequences = [], []
    for frame, _, nacks in said:
        holding = [rows_of(runs) for failed, runs in nacks.items() if strict or failed == UNBEGUN]
        if frame.keys is not None and frame.keyed is not None and holding:
            rows = np.concatenate(holding)
            rows = rows[frame.keyed[rows]]
            keys.append(frame.keys[rows])
            sequences.append(frame.sequences[rows])
    if not sum(map(len, keys)):
        return None
    return FailedKeys(np.concatenate(keys), np.concatenate(sequences))
