"""Which logical partition and key each row of a frame has, remembered for the frames that were looked at last.

Every owner of an ordered group looks at the same frames, one after another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.frame.columns import Column
from plait.frame.lp import Hashes, Lps, key_hashes
from plait.frame.view import FrameView

Sequences = npt.NDArray[np.int64]

#: Rows that are remembered for one partition, 10 bytes each.
ROWS_MAX = 1 << 18


class FrameKeys(NamedTuple):
    """Of each row of a frame."""

    lps: Lps
    #: None: no row has a key.
    hashes: Hashes | None


class KeyCache:
    """See the module."""

    __slots__ = ("_known", "_lps_of", "_rows")

    def __init__(self, lps_of: Callable[[Sequences, Hashes | None], Lps]) -> None:
        self._lps_of = lps_of
        #: By the first sequence of the frame.
        self._known: OrderedDict[int, FrameKeys] = OrderedDict()
        self._rows = 0

    def known(self, base: int) -> FrameKeys | None:
        """The keys of a frame that was looked at lately, by its first sequence."""
        keys = self._known.get(base)
        if keys is not None:
            self._known.move_to_end(base)
        return keys

    def of(self, frame: FrameView) -> FrameKeys:
        """The keys of a frame's rows."""
        whole = not frame.has(Column.SELECTION)
        known = self.known(frame.base) if whole else None
        if known is not None:
            return known
        hashes = key_hashes(frame)
        # A copy: what is remembered must not keep a segment's mapping open.
        keys = FrameKeys(self._lps_of(frame.sequences(), hashes), None if hashes is None else hashes.copy())
        if whole:
            self._known[frame.base] = keys
            self._rows += frame.count
            while self._rows > ROWS_MAX and len(self._known) > 1:
                _, gone = self._known.popitem(last=False)
                self._rows -= len(gone.lps)
        return keys
