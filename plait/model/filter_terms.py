"""The terms of a filter, as users give them and requests carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from plait.errors import InvalidArgument, InvalidFilter
from plait.limits import FILTER_LENGTH_MAX, TAGS_MAX
from plait.model import names


class TagFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Wants messages with at least one of ``any``, with ``all`` of these tags, and with ``none`` of those."""

    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()


class FilterTerms(msgspec.Struct, frozen=True):
    """What a message must be like: its tags, and an SQL condition (empty: every message)."""

    tags: TagFilter = TagFilter()
    where: str = ""

    def __str__(self) -> str:
        """As the options of the command line."""
        parts = [f"where={self.where!r}"] if self.where else []
        parts += [f"{name}_tags={list(tags)}" for name in ("any", "all", "none") if (tags := getattr(self.tags, name))]
        return ", ".join(parts).replace("any_tags", "tags")

    def check(self) -> FilterTerms:
        """Check tags and length; the condition is checked when it is compiled."""
        for tags in (self.tags.any, self.tags.all, self.tags.none):
            if len(tags) > TAGS_MAX:
                raise InvalidArgument(f"a filter of {len(tags)} tags is over the limit of {TAGS_MAX} (TAGS_MAX)")
            for tag in tags:
                names.check_tag(tag)
        try:
            self.where.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"the filter has a character that UTF-8 does not have: {self.where[error.start]!r} at character "
                f"{error.start + 1}"
            ) from None
        if len(self.where) > FILTER_LENGTH_MAX:
            raise InvalidFilter(
                f"a filter of {len(self.where)} characters is over the limit of {FILTER_LENGTH_MAX} "
                "(FILTER_LENGTH_MAX)",
                position=FILTER_LENGTH_MAX,
            )
        return self


def filter_terms(where: Any, tags: Any) -> FilterTerms | None:
    """The filter of arguments: a condition, and one tag, several of which a message must have one, or a ``TagFilter``.

    None: every message is wanted.
    """
    if where is not None and (not isinstance(where, str) or not where.strip()):
        raise InvalidArgument(
            f"where={where!r} is not a condition; write one such as \"city = 'BJS'\", or leave it out"
        )
    if where is None and tags is None:
        return None
    return FilterTerms(TagFilter() if tags is None else _tag_filter(tags), where or "").check()


def _tag_filter(tags: Any) -> TagFilter:
    if isinstance(tags, TagFilter):
        found = TagFilter(
            any=_several(tags.any, "any"), all=_several(tags.all, "all"), none=_several(tags.none, "none")
        )
    else:
        found = TagFilter(any=_several(tags, "tags"))
    if found == TagFilter():
        # It may be the result of a search for tags, so it must not mean every message.
        raise InvalidArgument(f"tags={tags!r} names no tag; leave tags out to get messages with any tags")
    return found


def _several(tags: Any, name: str) -> tuple[str, ...]:
    """One tag or several."""
    if isinstance(tags, str):
        return (tags,)
    if not isinstance(tags, Iterable) or isinstance(tags, bytes | Mapping):
        raise InvalidArgument(f"{name}={tags!r} is neither a tag nor a list of tags")
    return tuple(tags)
