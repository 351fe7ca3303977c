"""Where a stored message is for a group, and its history."""

from __future__ import annotations

import msgspec

from plait.limits import Int64
from plait.model.filter_terms import FilterTerms
from plait.wire.admin.operation import Operation, Request


class ExplainMessage(Request):
    """The message with a sequence of a partition, named by ``subject``, for a group."""

    subject: str
    group: str
    sequence: Int64


class HistoryRow(msgspec.Struct, frozen=True):
    """An event of the group that concerns the message.

    ``action`` is the name of the event's action in lower case, or "passed" for a rewind that skips the message.
    """

    time: int
    action: str
    #: The consumer; empty: unknown, or none.
    client: str = ""
    attempt: int = 0
    #: When a failed message is delivered again; 0: at once.
    due: int = 0
    #: True if a delivery did not count as an attempt.
    uncounted: bool = False
    #: False if the event may concern other keys of the same cursor only.
    certain: bool = True


class MessageState(msgspec.Struct, frozen=True):
    """Where the message is now. ``state`` is one of

    - ``invisible``: stored, but not acknowledged to its producer yet; ``removed``: by retention;
    - ``before``: the group began after it; ``next``: not delivered yet, with ``ahead`` messages before it;
    - ``behind``: held by the message ``blocker`` of its key; ``parked``: behind the dead letter ``blocker``;
    - ``held``: delivered to ``client``; ``returned``: delivered again as soon as possible; ``retry``: when ``due``;
    - ``dead``: a dead letter; ``done``: acked, skipped or passed by a rewind, as the history says.
    """

    state: str
    delivery: str
    ordered: bool
    broadcast: bool
    client: str = ""
    attempt: int = 0
    due: int = 0
    #: -1: unknown, or in another partition.
    blocker: int = -1
    ahead: int = 0
    #: Later messages were delivered before it.
    overtaken: bool = False
    #: Consumers of the group that are connected.
    online: int = 0
    #: The filter of the group.
    filter: FilterTerms | None = None
    #: What the filter looks at: headers, and whether it looks at tags and at the key.
    filter_headers: list[str] = []
    filter_tags: bool = False
    filter_key: bool = False
    #: Since when the group is paused; 0: it is not.
    paused: int = 0
    #: Newest first.
    history: list[HistoryRow] = []
    #: True if the history ends before the message was stored, because enough of the log was read.
    partial: bool = False
    #: The history is complete from this time on.
    reached: int = 0


EXPLAIN_MESSAGE = Operation("message.why", ExplainMessage, MessageState)
