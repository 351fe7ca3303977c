"""A number for each logical partition, kept as runs of equal numbers.

A group's locks, epochs and limits are the same over long runs of logical partitions, and a broker has hundreds of
thousands of groups: 1024 numbers each would be most of its memory. A value costs a few hundred bytes, and at most
10 KiB where every logical partition has another number. The array is made where it is computed with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.limits import LOGICAL_PARTITIONS

Numbers = npt.NDArray[np.int64]


class LpNumbers:
    """1024 numbers; never changed."""

    __slots__ = ("_lengths", "values")

    def __init__(self, values: Numbers, lengths: npt.NDArray[np.uint16]) -> None:
        #: The number of each run.
        self.values = values
        self._lengths = lengths

    @classmethod
    def of(cls, numbers: Numbers) -> LpNumbers:
        """The number of each logical partition."""
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
        """The number of each logical partition, for the caller to change."""
        return np.repeat(self.values, self._lengths)

    def any(self) -> bool:
        """One of them is not zero."""
        return bool(self.values.any())

    def same(self, other: LpNumbers) -> bool:
        """The numbers are equal."""
        mine, others = self.values.tobytes(), other.values.tobytes()
        return mine == others and self._lengths.tobytes() == other._lengths.tobytes()


_WHOLE = np.full(1, LOGICAL_PARTITIONS, np.uint16)
#: All of them zero.
ZEROS = LpNumbers(np.zeros(1, np.int64), _WHOLE)
