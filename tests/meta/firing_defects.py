"""Defects of recurring messages, each a patch of one function of the shipped classes."""

from __future__ import annotations

import pytest

from plait.meta.recurring import recurrences
from plait.meta.recurring.firings import Firings, PendingFrame
from plait.meta.recurring.occurrences import Rule


def take_over_under_another_producer(patch: pytest.MonkeyPatch) -> None:
    """A frame that is found unconfirmed gets a new producer: if a broker had stored it, it stores it again."""
    pending = Firings.pending

    def renumbered(self: Firings) -> list[PendingFrame]:
        return [again for frame in pending(self) for again in self.restart(frame)]

    patch.setattr(Firings, "pending", renumbered)


def count_from_the_clock_after_a_pause(patch: pytest.MonkeyPatch) -> None:
    """A recurrence that is resumed or changed fires again at times that it had, if the clock was set back."""

    def restarted(rule: Rule, now: int, last: int) -> dict[str, int]:
        return {"next": rule.after(now), "behind": 0}

    patch.setattr(recurrences, "_restarted", restarted)
