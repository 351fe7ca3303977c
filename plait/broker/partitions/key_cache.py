"""Caches the logical partition and key hash of each row of recently read frames.

All owners of an ordered group read the same frames, one after another.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.model.logical_partitions import Hashes, Lps

Sequences = npt.NDArray[np.int64]


class FrameKeys(NamedTuple):
    """The logical partition and the key hash of each row of a frame."""

    lps: Lps
    #: None: no row has a key.
    hashes: Hashes | None


class KnownRows:
    """A cache of the keys of frames, shared by all partitions of a broker. Evicts the least recently used frame."""

    __slots__ = ("_known", "_limit", "_rows")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: (number of the partition's cache, first sequence of the frame) → keys.
        self._known: OrderedDict[tuple[int, int], FrameKeys] = OrderedDict()
        self._rows = 0

    @property
    def rows(self) -> int:
        """How many rows are cached, 10 bytes each."""
        return self._rows

    def get(self, place: tuple[int, int]) -> FrameKeys | None:
        keys = self._known.get(place)
        if keys is not None:
            self._known.move_to_end(place)
        return keys

    def put(self, place: tuple[int, int], keys: FrameKeys) -> None:
        self._known[place] = keys
        self._rows += len(keys.lps)
        while self._rows > self._limit and len(self._known) > 1:
            _, gone = self._known.popitem(last=False)
            self._rows -= len(gone.lps)


class KeyCache:
    """The keys of one partition's frames."""

    __slots__ = ("_lps_of", "_number", "_rows")

    #: Numbers each cache, so that a new partition never finds rows of a dropped one. Those are evicted in time.
    _numbers = itertools.count()

    def __init__(self, lps_of: Callable[[Sequences, Hashes | None], Lps], rows: KnownRows) -> None:
        self._lps_of = lps_of
        self._rows = rows
        self._number = next(self._numbers)

    def known(self, base: int) -> FrameKeys | None:
        """The cached keys of the frame that starts at sequence ``base``."""
        return self._rows.get((self._number, base))

    def of(self, frame: FrameView) -> FrameKeys:
        """The keys of a frame's rows."""
        whole = not frame.has(Column.SELECTION)
        known = self.known(frame.base) if whole else None
        if known is not None:
            return known
        hashes = frame.key_hashes()
        # A copy: the cache must not keep a segment's mapping open.
        keys = FrameKeys(self._lps_of(frame.sequences(), hashes), None if hashes is None else hashes.copy())
        if whole:
            self._rows.put((self._number, frame.base), keys)
        return keys
