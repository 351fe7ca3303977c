"""The rows of a block, wherever they were read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.frame.lp import Hashes, Lps

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
