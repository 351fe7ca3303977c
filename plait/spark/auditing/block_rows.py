"""The rows of a block, independent of the input."""

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
    """Messages of one partition, by ascending sequence; one array per column."""

    sequences: Numbers
    epochs: Numbers
    #: The LP of each row, also of rows without a key.
    lps: Lps
    #: None: no row has a key.
    hashes: Hashes | None
    store_times: Numbers
    #: The send time, or the store time where the producer gave none.
    send_times: Numbers
    #: Producer id and producer sequence of each row: its message id. None: not known.
    ids: tuple[UInt64s, UInt64s] | None = None
    #: True for rows that were delayed or sent one-way: their order may differ from the order of sending. None: there
    #: are none.
    unordered: Flags | None = None
    #: True for rows of LPs that the partition did not accept at that time (``stored_order.astray``). None: there are
    #: none.
    astray: Flags | None = None
    #: The place of each row in the message log, comparable between partitions of one data directory. None: not known.
    places: Numbers | None = None
    #: How often the set of LPs that the partition accepts had changed when the row was stored. None: it never changed.
    spans: Numbers | None = None

    def __len__(self) -> int:
        return len(self.sequences)


def slots_of(sequences: Numbers, hashes: Hashes | None, taken: Sequence[tuple[int, list[tuple[int, int]]]]) -> Lps:
    """The LP of each row. A row without a key has one of the LPs that were ``taken`` when it was stored."""
    lps = lps_of(sequences, hashes)
    keyless = np.ones(len(lps), bool) if hashes is None else hashes == NO_KEY_HASH
    if taken and keyless.any():
        since = np.searchsorted([start for start, _ in taken], sequences, "right") - 1
        for index in np.unique(since[keyless]).tolist():
            slots = np.flatnonzero(lp_set(taken[max(index, 0)][1]))
            mine = keyless & (since == index)
            lps[mine] = slots[lps[mine] % len(slots)]
    return lps
