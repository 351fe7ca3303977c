"""Defects that shared and at-most-once groups had. Tests patch them into Plait's classes."""

from __future__ import annotations

import pytest

from plait.broker.groups.at_most_once import AtMostOnceGroup
from plait.client.closing import Closing


def interrupt_closing(patch: pytest.MonkeyPatch) -> None:
    """A cancelled ``close()`` leaves the consumer attached."""
    patch.setattr(Closing, "__call__", lambda self: self._close())


def throw_rows_away_at_a_clean_stop(patch: pytest.MonkeyPatch) -> None:
    """Rows that an at-most-once consumer pulled ahead are lost when it closes."""
    patch.setattr(AtMostOnceGroup, "nack", lambda *_: 0)
