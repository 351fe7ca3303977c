"""``Filter``: a checked filter that picks the rows of frames."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.filter.evaluation import wanted
from plait.filter.frame_fields import FrameFields
from plait.filter.grammar import Term, parse
from plait.frame.view import FrameView
from plait.model.filter_terms import FilterTerms

#: Compiled filters that are kept for the next request with the same terms.
CACHED_MAX: Final = 256


class Filter:
    """Which rows of a frame are wanted."""

    def __init__(self, terms: FilterTerms) -> None:
        self.terms = terms
        self._condition: Term | None = parse(terms.where) if terms.where else None

    def rows(self, frame: FrameView) -> npt.NDArray[np.bool_]:
        """A mask of the wanted rows of a valid frame."""
        fields, tags = FrameFields(frame), self.terms.tags
        mask: Any = np.ones(frame.count, bool)
        if tags.any:
            mask = np.logical_or.reduce([np.broadcast_to(fields.tagged(tag), (frame.count,)) for tag in tags.any])
        for tag in tags.all:
            mask = mask & fields.tagged(tag)
        for tag in tags.none:
            mask = mask & np.logical_not(fields.tagged(tag))
        if self._condition is not None and mask.any():
            mask = mask & wanted(self._condition, fields, frame.count)
        return np.asarray(mask)


@lru_cache(CACHED_MAX)
def compile_filter(terms: FilterTerms) -> Filter:
    """Check and translate a filter. Raises ``InvalidArgument``, or ``InvalidFilter`` with the place of a mistake."""
    return Filter(terms.check())
