"""Defects of shared and at-most-once groups, to be put back into the shipped classes."""

from __future__ import annotations

import pytest

from plait.broker.once import OnceGroup
from plait.client.closing import Closing


def interrupt_closing(patch: pytest.MonkeyPatch) -> None:
    """A cancelled ``close()`` leaves the consumer attached."""
    patch.setattr(Closing, "__call__", lambda self: self._close())


def throw_rows_away_at_a_clean_stop(patch: pytest.MonkeyPatch) -> None:
    """What an at-most-once consumer pulled ahead is lost when it closes."""
    patch.setattr(OnceGroup, "nack", lambda *_: 0)
