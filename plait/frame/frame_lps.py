"""The key hashes and logical partitions (LPs) of a frame's rows."""

from __future__ import annotations

import numpy as np

from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.model.logical_partitions import NO_KEY_HASH, Hashes, Lps, lps_of_hashes


def key_hashes(frame: FrameView) -> Hashes | None:
    """The key hash of each row, or None if no row of the frame has a key."""
    return frame.fixed(Column.KEY_HASH) if frame.has(Column.KEY_HASH) else None


def keyed_lps(frame: FrameView) -> Lps:
    """The LPs of the rows that have a key; rows without one are left out."""
    hashes = key_hashes(frame)
    return np.empty(0, np.uint16) if hashes is None else lps_of_hashes(hashes[hashes != NO_KEY_HASH])
