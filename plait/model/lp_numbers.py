"""A number for each logical partition, stored as runs of equal numbers.

A broker has hundreds of thousands of groups, so arrays of 1024 numbers for each group would use most of its memory. The
locks, epochs and limits of a group are equal over long runs of logical partitions. So an ``LpNumbers`` usually uses a
few hundred bytes, and at most 10 KiB if every logical partition has another number. Code that computes with the numbers
makes the full array first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.limits import LOGICAL_PARTITIONS
from plait.model.lp_runs import Numbers


class LpNumbers:
    """1024 numbers, immutable."""

    __slots__ = ("_lengths", "values")

    def __init__(self, values: Numbers, lengths: npt.NDArray[np.uint16]) -> None:
        #: The number of each run.
        self.values = values
        self._lengths = lengths

    @classmethod
    def of(cls, numbers: Numbers) -> LpNumbers:
        """Compress an array with the number of each logical partition."""
        edges = (numbers[1:] != numbers[:-1]).nonzero()[0]
        if len(edges):
            lengths = np.empty(len(edges) + 1, np.uint16)
            lengths[:-1], lengths[-1] = edges, LOGICAL_PARTITIONS - 1
            values = numbers[lengths]
            lengths[1:] -= lengths[:-1]
            lengths[0] += 1
            return cls(values, lengths)
        return cls(numbers[:1].copy(), _WHOLE) if numbers[0] else ZEROS

    def array(self) -> Numbers:
        """The number of each logical partition, as a new array that the caller may change."""
        return np.repeat(self.values, self._lengths)

    def any(self) -> bool:
        """True if at least one number is not zero."""
        return bool(self.values.any())

    def same(self, other: LpNumbers) -> bool:
        """True if all 1024 numbers are equal to those of ``other``."""
        equal = self.values.tobytes() == other.values.tobytes()
        return equal and self._lengths.tobytes() == other._lengths.tobytes()


_WHOLE = np.full(1, LOGICAL_PARTITIONS, np.uint16)
#: The number 0 for every logical partition.
ZEROS = LpNumbers(np.zeros(1, np.int64), _WHOLE)
