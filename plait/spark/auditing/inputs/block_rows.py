"""The rows of a block, wherever they were read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.model.logical_partitions import NO_KEY_HASH, Hashes, Lps, lp_set, lps_of

Numbers = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BlockRows:
    """Messages of one partition, ascending."""

    sequences: Numbers
    epochs: Numbers
    #: The logical partition of each, also of those without a key.
    lps: Lps
    #: None: no row has a key.
    hashes: Hashes | None
    store_times: Numbers
    #: When it was sent, or stored where the producer did not say.
    send_times: Numbers
    #: Rows whose logical partition is not known; None: there are none.
    loose: Flags | None = None
    #: Producer and number of each: its message id. None: not known.
    ids: tuple[UInt64s, UInt64s] | None = None
    #: Rows that were delayed or sent one way: when they were sent says nothing of their order. None: there are none.
    unordered: Flags | None = None
    #: Rows of logical partitions that the partition did not take then (``stored.astray``). None: there are none.
    astray: Flags | None = None
    #: The place of each in the message log, comparable between partitions of one data directory. None: not known.
    places: Numbers | None = None
    #: Since which of its changes the partition took what it did then; None: it never changed.
    spans: Numbers | None = None

    def __len__(self) -> int:
        return len(self.sequences)


def slots_of(sequences: Numbers, hashes: Hashes | None, taken: Sequence[tuple[int, list[tuple[int, int]]]]) -> Lps:
    """The logical partition of each row; one without a key has one that was ``taken`` when it was stored."""
    lps = lps_of(sequences, hashes)
    keyless = np.ones(len(lps), bool) if hashes is None else hashes == NO_KEY_HASH
    if taken and keyless.any():
        since = np.searchsorted([start for start, _ in taken], sequences, "right") - 1
        for index in np.unique(since[keyless]).tolist():
            slots = np.flatnonzero(lp_set(taken[max(index, 0)][1]))
            mine = keyless & (since == index)
            lps[mine] = slots[lps[mine] % len(slots)]
    return lps
