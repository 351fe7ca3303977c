"""The rows of a block, wherever they were read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.frame.lp import NO_KEY_HASH, Hashes, Lps, lp_set, lps_of

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
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
    loose: npt.NDArray[np.bool_] | None = None

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
