"""Selects the rows of a frame that a query can use, before any column is built."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.client.send.open_rows import hash_keys
from plait.filter.message_filter import compile_filter
from plait.frame.columns import Column
from plait.frame.run_tables import expand_runs
from plait.frame.view import FrameView
from plait.model.logical_partitions import without_lps
from plait.storage.reading.log_chunks import WantedRows


class Picker:
    """Selects the rows of a frame that may have the wanted keys and message ids, and that match the filter.

    Keys are found by their hashes, which every frame with keys has. Other keys with the same hash also pass: the filter
    is applied again to the rows. The bits of a hash that hold the logical partition are ignored: a send that moved to
    another partition has another logical partition there.
    """

    def __init__(self, wanted: WantedRows) -> None:
        self._hashes = None if wanted.keys is None else without_lps(hash_keys(wanted.keys, len(wanted.keys)))
        self._ids = wanted.message_ids
        self._filter = None if wanted.filter is None else compile_filter(wanted.filter)

    @classmethod
    def of(cls, wanted: WantedRows) -> Picker | None:
        """None: all rows match."""
        every = wanted.keys is None and wanted.message_ids is None and wanted.filter is None
        return None if every else cls(wanted)

    def rows(self, view: FrameView) -> npt.NDArray[np.bool_] | None:
        """True for each row that may match; None: all rows may."""
        picked: npt.NDArray[np.bool_] | None = None
        if self._ids is not None:
            picked = self._rows_by_id(view, self._ids)
        if self._hashes is not None and (picked is None or picked.any()):
            keyed = self._rows_by_key(view, self._hashes)
            picked = keyed if picked is None else picked & keyed
        if self._filter is not None and (picked is None or picked.any()):
            matching = self._filter.rows(view)
            picked = matching if picked is None else picked & matching
        return None if picked is None or picked.all() else picked

    @staticmethod
    def _rows_by_key(view: FrameView, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        if not view.has(Column.KEY_HASH):
            return np.zeros(view.count, bool)
        values = without_lps(view.values(Column.KEY_HASH))
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
