"""Defects of filters of groups, to plant in the shipped classes: the models and worlds must find them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.broker.groups import filtered_rows
from plait.broker.groups.ordered import ordered_delivery
from plait.broker.groups.ordered.frame_pieces import FramePiece, cut_matching
from plait.broker.groups.ordered.left_out import LeftOutRows
from plait.broker.partitions.frame_search import KeyCache
from plait.broker.recovery import shards
from plait.filter.message_filter import Examined
from plait.frame.view import FrameView

Patch = pytest.MonkeyPatch


def leave_out_what_has_no_room(patch: Patch) -> None:
    """A pull of an ordered group continues after the frame although rows that match did not fit."""

    def naive(*arguments: Any) -> FramePiece | None:
        piece = cut_matching(*arguments)
        return None if piece is None else piece._replace(end=arguments[-2])

    patch.setattr(ordered_delivery, "cut_matching", naive)


def hold_what_is_left_out(patch: Patch) -> None:
    """The range that the owner holds includes the rows between two that match, which come again after a failure."""
    examined = LeftOutRows.examined

    def naive(left_out: LeftOutRows, frame: Any, piece: FramePiece) -> list[tuple[int, int]]:
        examined(left_out, frame, piece)
        return [(piece.first, piece.last)] if piece.parts else []

    patch.setattr(LeftOutRows, "examined", naive)


def record_nothing_that_is_left_out(patch: Patch) -> None:
    """After a restart, rows that a shared group left out are examined again, with the filter of that time."""

    def naive(group: Any, start: int, end: int) -> None:
        group.cursor.settled(start, max(start, end))

    patch.setattr(filtered_rows, "_leave_out", naive)


def leave_out_what_is_not_examined(patch: Patch) -> None:
    """Rows of a frame for which a turn has no time count as examined, and are never delivered."""
    matching = KeyCache.matching

    def naive(cache: KeyCache, frame: FrameView, *rest: Any) -> Examined:
        found = matching(cache, frame, *rest)
        missing = np.zeros(frame.count - found.last, bool)
        return Examined(found.first, frame.count, np.concatenate([found.mask, missing]))

    patch.setattr(KeyCache, "matching", naive)


def forget_addresses_at_a_restart(patch: Patch) -> None:
    """After a start from a checkpoint, groups also get the rows that are addressed to another group."""
    dump = shards.dump_partition

    def naive(*arguments: Any) -> shards.PartitionState:
        state = dump(*arguments)
        state.addressed = False
        return state

    patch.setattr(shards, "dump_partition", naive)
