"""Traits of a frame: bits that tell what its rows have, so that a search of many frames reads only a few of them.

The consume log has the traits of every frame. A frame without traits has rows of priority 0 for all groups.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from plait.frame.columns import ADDRESSED_BIT, Column
from plait.frame.view import FrameView
from plait.limits import PRIORITY_MAX

#: Bit p: some rows have the priority p. A frame without any of these bits has rows of priority 0 only.
PRIORITIES: Final = (1 << PRIORITY_MAX + 1) - 1
#: Some rows have a priority above 0.
RANKED: Final = PRIORITIES & ~1
#: Some rows are addressed to one group.
ADDRESSED: Final = 1 << 10
#: The columns that give a frame traits: a frame without them has none.
TRAIT_COLUMNS: Final = 1 << Column.PRIORITY | ADDRESSED_BIT


def traits_of(frame: FrameView) -> int:
    """The traits of a valid frame."""
    traits = ADDRESSED if frame.column_bits & ADDRESSED_BIT else 0
    if not frame.has(Column.PRIORITY):
        return traits
    return (
        traits
        | int(np.bitwise_or.reduce(np.left_shift(1, frame.values(Column.PRIORITY).astype(np.int64)))) & PRIORITIES
    )
