"""``Filter``: a checked filter that picks the rows of frames."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.filter.evaluation import wanted
from plait.filter.frame_fields import FrameFields, UsedFields
from plait.filter.grammar import Term, parse
from plait.filter.scan_budget import ScanBudget
from plait.filter.values import Fields, both, either, opposite
from plait.frame.view import FrameView
from plait.limits import FILTER_PART_BYTES, FILTER_PART_COUNT, FILTER_PART_WORK
from plait.model.filter_terms import FilterTerms

#: Compiled filters that are kept for the next request with the same terms.
CACHED_MAX: Final = 256
#: Rows of the first part of a frame that is examined for at most this many rows; each part is twice as large.
_FIRST_COUNT_MIN: Final = 256
#: A part of a condition examines so many bytes of text in the time of one row.
_ROW_BYTES: Final = 32


class Examined(NamedTuple):
    """A part of a frame: the rows [first, last), and which of them are wanted."""

    first: int
    last: int
    mask: npt.NDArray[np.bool_]

    def whole(self, count: int) -> npt.NDArray[np.bool_]:
        """A mask of all ``count`` rows of the frame; false for rows that were not examined."""
        mask = np.zeros(count, bool)
        mask[self.first : self.last] = self.mask
        return mask


class Filter:
    """Which rows of a frame are wanted. Does not change: all readers with the same terms share it."""

    def __init__(self, terms: FilterTerms, group: str | None = None) -> None:
        self.terms = terms
        #: Only rows that are addressed to this group, or to none; None: whatever group they are addressed to.
        self._group = group
        self._condition: Term | None = parse(terms.where) if terms.where else None
        tags = terms.tags
        nodes = [] if self._condition is None else list(_nodes(self._condition))
        fields = frozenset(node.value for node in nodes if node.op == "field")
        #: What ``mask`` reads.
        self.used = UsedFields(
            headers=frozenset(node.value for node in nodes if node.op == "header"),
            tags=bool(tags.any or tags.all or tags.none) or any(node.op == "tagged" for node in nodes),
            key="key" in fields,
            times=fields - {"key"},
            group=group is not None,
        )
        #: How many operations on columns an evaluation takes.
        cost = max(len(nodes) + len(tags.any) + len(tags.all) + len(tags.none), 1)
        self._count_max = min(FILTER_PART_COUNT, FILTER_PART_WORK // cost)
        self._size_max = min(FILTER_PART_BYTES, FILTER_PART_WORK * _ROW_BYTES // cost)

    def rows(self, frame: FrameView) -> npt.NDArray[np.bool_]:
        """A mask of the wanted rows of a valid frame."""
        masks = [part.mask for part in self.parts(frame, 0, frame.count, frame.count)]
        return masks[0] if len(masks) == 1 else np.concatenate(masks)

    def parts(self, frame: FrameView, first: int, last: int, count: int) -> Iterator[Examined]:
        """Examine the rows [first, last) of a valid frame in parts, for a caller that wants about ``count`` rows.

        A part takes a few milliseconds at most, and memory for its own rows only.
        """
        fields = FrameFields(frame, self.used)
        step = max(count, _FIRST_COUNT_MIN)
        while first < last:
            end = min(fields.end_of(first, min(step, self._count_max, last - first), self._size_max), last)
            part = fields.part(first, end)
            mask = self.mask(part, end - first)
            yield Examined(first, end, mask if self._group is None else both(mask, part.addressed(self._group)))
            first, step = end, 2 * step

    def examine(self, frame: FrameView, first: int, last: int, count: int, budget: ScanBudget) -> Examined:
        """Examine the rows [first, last) until ``count`` match or the budget has no room, but at least one part."""
        masks: list[npt.NDArray[np.bool_]] = []
        end = first
        for part in self.parts(frame, first, last, count):
            end, size = part.last, frame.size + frame.inflated_size
            budget.spend(end - part.first, size * (end - part.first) // frame.count)
            masks.append(part.mask)
            count -= int(np.count_nonzero(part.mask))
            if count <= 0 or (end < last and not budget.has_room()):
                break
        return Examined(first, end, masks[0] if len(masks) == 1 else np.concatenate([np.empty(0, bool), *masks]))

    def mask(self, fields: Fields, count: int) -> npt.NDArray[np.bool_]:
        """A mask of the wanted rows of ``count`` rows with these fields, whatever group they are addressed to."""
        tags = self.terms.tags
        mask: Any = not tags.any
        for tag in tags.any:
            mask = either(mask, fields.tagged(tag))
        for tag in tags.all:
            mask = both(mask, fields.tagged(tag))
        for tag in tags.none:
            mask = both(mask, opposite(fields.tagged(tag)))
        if self._condition is not None and np.any(mask):
            mask = both(mask, wanted(self._condition, fields))
        if isinstance(mask, np.ndarray) and mask.shape == (count,):
            return mask
        return np.broadcast_to(mask, (count,))


def _nodes(term: Term) -> Iterator[Term]:
    yield term
    for part in term.parts:
        yield from _nodes(part)


def filter_of(terms: FilterTerms | None, group: str | None) -> Filter | None:
    """The filter with these terms for the rows that are addressed to a group or to none; None: every row is wanted."""
    return None if terms is None and group is None else compile_filter(terms or FilterTerms(), group)


@lru_cache(CACHED_MAX)
def compile_filter(terms: FilterTerms, group: str | None = None) -> Filter:
    """Check and translate a filter; with a group, for the rows that are addressed to it or to none.

    Raises ``InvalidArgument``, or ``InvalidFilter`` with the place of a mistake.
    """
    return Filter(terms.check(), group)
