"""Delayed messages among the others that the simulated producers send, some of them cancelled.

A delayed message has a key of its own, or none: its order is that of becoming due, of which no other message knows. It
waits while partitions come and go, so it becomes due at any moment of a change of the route.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import plait
from plait.errors import PlaitError
from plait.testing.sim import Fault

#: How many of a run's messages are delayed: none in some runs, half of them in others.
SHARES = (0.0, 0.3, 0.6)
#: How many of those are cancelled, sooner or later.
CANCELLED = 0.15
#: How many pairs of brokers are cut off from each other for a while.
CUT_OFF = 0.3
DELAYS = (0.1, 1.0, 2.5, 5.0)


class DelayedSends:
    """Which messages of a run are delayed, and by how much."""

    def __init__(self, seed: int, *, share: float | None = None) -> None:
        """``share``: so many of the messages, instead of what the seed gives."""
        self._draw = random.Random(f"{seed} delayed")
        self.share = self._draw.choice(SHARES) if share is None else share

    def faults(self, seconds: float, brokers: Sequence[str]) -> list[Fault]:
        """Brokers that cannot reach each other for a while: they forward delayed messages."""
        found = []
        for one, other in combinations(brokers, 2):
            if self.share and self._draw.random() < CUT_OFF:
                at = self._draw.uniform(0.5, seconds)
                found.append(Fault("cut", at, min(self._draw.uniform(0.1, 5.0), seconds - at), one, other))
        return found

    def delay(self, draw: random.Random) -> float | None:
        """How long the next message is delayed; None: it is not."""
        if not self.share or draw.random() >= self.share:
            return None
        return draw.uniform(0.01, draw.choice(DELAYS))

    @staticmethod
    def key(number: int, draw: random.Random) -> str | None:
        """The key of a delayed message."""
        return draw.choice((f"late-{number}", f"late-{number}", None))

    @staticmethod
    async def cancelled(client: plait.Client, receipt: plait.Receipt, draw: random.Random) -> bool | None:
        """Whether the message was cancelled, which only some are; None: that is not known."""
        if draw.random() >= CANCELLED:
            return False
        try:
            return await client.cancel(receipt)
        except PlaitError:
            return None
