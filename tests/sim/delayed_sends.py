"""Delayed messages of the simulated producers; some of them are cancelled.

A delayed message has no key or a key that no other message has, because delayed messages are ordered by due time. It
may become due at any moment of a change of the route.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import plait
from plait.errors import PlaitError
from plait.testing.sim import Fault

#: The share of messages that are delayed. Each run chooses one of these.
SHARES = (0.0, 0.3, 0.6)
#: Share of delayed messages that are cancelled.
CANCELLED = 0.15
#: How many times two brokers are cut off from each other.
CUT_OFF = 0.3
DELAYS = (0.1, 1.0, 2.5, 5.0)


class DelayedSends:
    """Which messages of a run are delayed, and by how much."""

    def __init__(self, seed: int, *, share: float | None = None) -> None:
        """``share`` replaces the share of delayed messages that the seed chooses."""
        self._draw = random.Random(f"{seed} delayed")
        self.share = self._draw.choice(SHARES) if share is None else share

    def faults(self, seconds: float, brokers: Sequence[str]) -> list[Fault]:
        """Cuts between brokers, which forward delayed messages to each other."""
        found = []
        for one, other in combinations(brokers, 2):
            if self.share and self._draw.random() < CUT_OFF:
                at = self._draw.uniform(0.5, seconds)
                found.append(Fault("cut", at, min(self._draw.uniform(0.1, 5.0), seconds - at), one, other))
        return found

    def delay(self, draw: random.Random) -> float | None:
        """The delay of the next message; None: it is not delayed."""
        if not self.share or draw.random() >= self.share:
            return None
        return draw.uniform(0.01, draw.choice(DELAYS))

    @staticmethod
    def key(number: int, draw: random.Random) -> str | None:
        """The key of a delayed message."""
        return draw.choice((f"late-{number}", f"late-{number}", None))

    @staticmethod
    async def cancelled(client: plait.Client, receipt: plait.Receipt, draw: random.Random) -> bool | None:
        """Perhaps cancel the message. Returns whether it was cancelled; None: unknown."""
        if draw.random() >= CANCELLED:
            return False
        try:
            return await client.cancel(receipt)
        except PlaitError:
            return None
