"""Finds the rows of a frame that match a filter on keys or message ids before any column is built.

Keys are found by their hashes, which every frame with keys has. Other keys with the same hash also pass: the filter is
applied again to the rows. The bits of a hash that hold the logical partition are ignored: a send that moved to another
partition has another logical partition there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from plait.client.send.open_rows import hash_keys
from plait.frame.columns import Column
from plait.frame.run_tables import expand_runs
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.storage.reading.log_chunks import WantedRows

_LP_BITS: Final = np.uint64(LOGICAL_PARTITIONS.bit_length() - 1)


class Picker:
    """Selects the rows of a frame that may match."""

    def __init__(self, wanted: WantedRows) -> None:
        self._hashes = None if wanted.keys is None else hash_keys(wanted.keys, len(wanted.keys)) >> _LP_BITS
        self._ids = wanted.message_ids

    @classmethod
    def of(cls, wanted: WantedRows) -> Picker | None:
        """None: all rows match."""
        return None if wanted.keys is None and wanted.message_ids is None else cls(wanted)

    def rows(self, view: FrameView) -> npt.NDArray[np.bool_] | None:
        """True for each row that may match; None: all rows may."""
        picked: npt.NDArray[np.bool_] | None = None
        if self._ids is not None:
            picked = self._rows_by_id(view, self._ids)
            if not picked.any():
                return picked
        if self._hashes is not None:
            keyed = self._rows_by_key(view, self._hashes)
            picked = keyed if picked is None else picked & keyed
        return None if picked is None or picked.all() else picked

    @staticmethod
    def _rows_by_key(view: FrameView, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        if not view.has(Column.KEY_HASH):
            return np.zeros(view.count, bool)
        values = view.values(Column.KEY_HASH) >> _LP_BITS
        found = values == hashes[0] if len(hashes) == 1 else np.isin(values, hashes)
        return found if len(found) == view.count else np.full(view.count, bool(found.any()))

    @staticmethod
    def _rows_by_id(view: FrameView, ids: frozenset[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        picked = np.zeros(view.count, bool)
        if view.has(Column.SELECTION):
            producers, numbers = view.message_ids()
        elif view.has(Column.RUNS):
            runs = view.runs()
            present = {int(producer) for producer in runs["producer"]}
            if not any(producer in present for producer, _ in ids):
                return picked
            producers, numbers = expand_runs(runs)
        else:
            for producer, number in ids:
                if producer == view.producer and view.first <= number < view.first + view.count:
                    picked[number - view.first] = True
            return picked
        for producer, number in ids:
            picked |= (producers == np.uint64(producer)) & (numbers == np.uint64(number))
        return picked
