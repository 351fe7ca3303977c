"""Defects of priorities, to plant in the shipped classes: the model must find them."""

from __future__ import annotations

from typing import Any

import pytest

from plait.broker.groups import look_ahead
from plait.broker.groups.ranked_rows import RankedRows
from plait.storage.cursor import Cursor, CursorState
from plait.storage.shared_cursor import SharedCursor

Patch = pytest.MonkeyPatch


def serve_the_highest_priority_only(patch: Patch) -> None:
    """While rows of a higher priority wait, lower ones get nothing."""
    patch.setattr(look_ahead, "PRIORITY_SHARE", 1 << 40)


def forget_passed_rows_at_a_checkpoint(patch: Patch) -> None:
    """A checkpoint has no rows that the position passed: they count as done."""

    def naive(cursor: Any, *, durable_holds: bool) -> CursorState:
        return Cursor.dump(cursor, durable_holds=durable_holds)

    patch.setattr(SharedCursor, "dump", naive)


def forget_rows_that_were_returned(patch: Patch) -> None:
    """Rows that a consumer returned before it began them are not examined again."""
    patch.setattr(RankedRows, "returned", lambda *arguments: None)


def say_that_no_row_overtook_another(patch: Patch) -> None:
    """The action log does not tell deliveries that leave older rows from others: the older rows look lost."""
    patch.setattr(SharedCursor, "overtaken", lambda *arguments: False)


def put_back_nothing(patch: Patch) -> None:
    """Rows that were chosen and had no room in the pull are forgotten."""
    patch.setattr(look_ahead.LookAhead, "_put_back", lambda *arguments: None)
