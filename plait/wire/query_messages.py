"""The messages of queries. docs/formats.md has the meaning of all messages and fields."""

from __future__ import annotations

from typing import ClassVar

from plait.model.filter_terms import FilterTerms
from plait.wire.messages import PacketHead


class QueryRequest(PacketHead, frozen=True):
    """Finds messages of a partition by key, by message id (producer, producer sequence) and by a filter.

    ``since`` and ``until`` bound the store time, in microseconds: since <= time < until. ``span`` is None in the first
    request of a query; later ones repeat the ``next`` and ``end`` of the reply before. At most ``count`` messages and
    about ``size`` bytes are returned.
    """

    KIND: ClassVar[int] = 70
    name: str
    key: str | None = None
    message_id: tuple[int, int] | None = None
    filter: FilterTerms | None = None
    since: int | None = None
    until: int | None = None
    span: tuple[int, int] | None = None
    count: int = 1000
    size: int = 1 << 20


class QueryReply(PacketHead, frozen=True):
    """The messages found so far, as frames in the payload.

    The search has reached the sequence ``next`` and ends at ``end``; it continues there if ``next`` is lower.
    ``examined`` counts the messages, and ``examined_bytes`` the bytes of frames, that this request examined.
    """

    KIND: ClassVar[int] = 71
    partition: int
    name: str
    next: int
    end: int
    examined: int = 0
    examined_bytes: int = 0
