"""Calls of the public interface that are cancelled while they run, at any step, as by a time-out of the user's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: The longest that a call runs before it is cancelled.
CANCEL_SECONDS = 0.3


class Interrupted(Exception):
    """The call was cancelled."""


class Calls:
    """Makes calls, some of which it cancels."""

    def __init__(self, draw: random.Random, probability: float) -> None:
        self._draw = draw
        self.probability = probability

    async def __call__(self, call: Coroutine[Any, Any, T]) -> T:
        """What the call returns or raises; ``Interrupted`` when it was cancelled first."""
        if self._draw.random() >= self.probability:
            return await call
        task = asyncio.ensure_future(call)
        # Many steps of a call come within microseconds of each other, others after a round trip.
        after = self._draw.choice((0.0, 0.00001, 0.0001, 0.001, 0.01, CANCEL_SECONDS)) * self._draw.random()
        try:
            done, _ = await asyncio.wait([task], timeout=after)
        except asyncio.CancelledError:
            # The caller is cancelled as well: the call is not left behind.
            task.cancel()
            await asyncio.wait([task])
            raise
        if done:
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            raise Interrupted
        return task.result()
