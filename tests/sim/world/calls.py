"""Calls of the public interface that are cancelled at any step, as by a time-out of the user."""

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
    """Makes calls and cancels some of them."""

    def __init__(self, draw: random.Random, probability: float) -> None:
        self._draw = draw
        self.probability = probability

    async def __call__(self, call: Coroutine[Any, Any, T]) -> T:
        """The result or error of the call; raises ``Interrupted`` if it was cancelled."""
        if self._draw.random() >= self.probability:
            return await call
        task = asyncio.ensure_future(call)
        # Some steps of a call are microseconds apart, others a round trip.
        after = self._draw.choice((0.0, 0.00001, 0.0001, 0.001, 0.01, CANCEL_SECONDS)) * self._draw.random()
        try:
            done, _ = await asyncio.wait([task], timeout=after)
        except asyncio.CancelledError:
            # The caller itself was cancelled: end the call, too.
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
