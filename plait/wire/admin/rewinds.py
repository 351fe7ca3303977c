"""Requests that move groups to another position: what a rewind changes in one partition, and the rewind itself."""

from __future__ import annotations

import msgspec

from plait.wire.admin.operation import Operation
from plait.wire.admin.subjects import OfGroup


class PartitionRewind(msgspec.Struct, frozen=True):
    """What a rewind of a group changes in one partition. Times are microseconds since 1970."""

    #: As name@group.
    partition: str
    #: The sequence that the group delivered next, and the sequence from which on it gets every message.
    before: int
    position: int
    #: Messages that come again, and how many of them the group had handled.
    again: int
    handled: int
    #: Messages below the position that the group has not handled: it still gets ``open`` and never gets ``skipped``.
    open: int
    skipped: int
    #: Messages that consumers hold, and failed messages that wait for a retry; ``again``, ``open`` or ``skipped``
    #: includes them.
    held: int
    waiting: int
    #: Dead letters that come again, and those that stay as they are.
    dead_again: int
    dead_left: int
    #: Keys that are not parked any more.
    resumed: int
    #: Messages that were asked for and that retention has removed; with ``gone_at_most``, an upper bound.
    gone: int
    gone_at_most: bool
    #: When the first and the last message that comes again, or is skipped, were stored; None: there is none.
    first: int | None
    last: int | None
    #: ``again``, ``handled``, ``open``, ``skipped`` and ``held`` are estimates, because counting the rows of
    #: many cursors takes too long.
    estimated: bool = False


class RewindGroup(OfGroup):
    """Move an idle group to a position; with ``preview`` only compute what would change."""

    start: str | tuple[str, int]
    #: Messages below the position that are not handled are skipped.
    skipping: bool = False
    preview: bool = False


REWIND_GROUP = Operation("group.rewind", RewindGroup, PartitionRewind)
