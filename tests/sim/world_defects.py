"""Defects that the shipped classes once had, to be put back one at a time into a simulated world.

Each restores what was wrong by patching one method, so that ``test_world_defects.py`` can ask whether the generator
finds it by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plait.broker.forwards import Forwards
from plait.client import consumer as client_consumer
from plait.client.closing import Closing
from plait.client.cursor import Cursor
from plait.client.producer import Producer
from plait.client.reader import Reader
from plait.client.subscription import Subscription
from plait.errors import CodecError
from plait.server.meta_handlers import MetaHandlers

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]


def deliver_behind_the_fence(patch: Patch) -> None:
    """Delayed rows enter the partition that they were sent to, whether or not it still takes their keys."""
    patch.setattr(Forwards, "ways", lambda self, target, hashes, numbers: [(target, np.arange(len(numbers)))])


def interrupt_closing(patch: Patch) -> None:
    """A cancelled ``close()`` leaves the consumer attached."""

    async def naive(self: Closing[Any]) -> Any:
        return await self._close()

    patch.setattr(Closing, "__call__", naive)


def start_a_known_group_again_on_new_partitions(patch: Patch) -> None:
    """``start="latest"`` counts for every partition that is new to the group."""

    async def naive(router: Any, route: Any, terms: Any, limits: Any, deadline: float) -> int:
        return int(route.version)

    patch.setattr(client_consumer, "began", naive)


def end_the_app_with_a_body_that_does_not_decode(patch: Patch) -> None:
    """Whatever a decoder raises besides a refusal ends the app."""
    refuse = Subscription._refuse

    def naive(self: Subscription, message: Any, error: BaseException) -> BaseException:
        if not isinstance(error, CodecError):
            raise error
        return refuse(self, message, error)

    patch.setattr(Subscription, "_refuse", naive)


def return_a_message_while_its_thread_runs(patch: Patch) -> None:
    """A ``def`` handler past its time-out: the message goes back, and its key on, while the thread still runs."""
    patch.setattr(Subscription, "_one_at_a_time", property(lambda self: False))


def open_while_the_last_one_closes(patch: Patch) -> None:
    """A consumer joins its group before the leaving of the one before it, in the same client, is known."""

    async def naive(self: Closing[Any]) -> None:
        return

    patch.setattr(Closing, "wait", naive)


def refuse_all_for_one(patch: Patch) -> None:
    """A client whose membership of a deleted subject is refused gets no answer for its other subjects."""
    answer = MetaHandlers._beaten

    def naive(self: MetaHandlers, beaten: Any) -> Any:
        for error in beaten.refused.values():
            raise error
        return answer(self, beaten)

    patch.setattr(MetaHandlers, "_beaten", naive)


def forget_rows_of_a_cancelled_fetch(patch: Patch) -> None:
    """Positions move when their partition answers, rows are handed out when all have answered."""
    fill = Reader._fill_from_all

    async def naive(self: Reader, count: int, wait: float) -> None:
        if wait > 0:
            await fill(self, count, wait)
            return
        cursors: list[Cursor] = list(self._cursors.values())
        found: list[deque[Any]] = [deque() for _ in cursors]
        for cursor, rows in zip(cursors, found, strict=True):
            cursor._rows = rows
        try:
            await fill(self, count, wait)
        finally:
            for cursor in cursors:
                cursor._rows = self._rest
        for rows in found:
            self._rest.extend(rows)

    patch.setattr(Reader, "_fill_from_all", naive)


def overtake_sends_that_wait_for_room(patch: Patch) -> None:
    """A send goes as soon as the buffer has room, also before others that wait for it."""

    async def naive(self: Producer) -> None:
        while self.buffered >= self.limits.buffer_bytes:
            if self.closed is not None:
                raise self.closed
            me = object()
            future = self._room[me] = self.loop.create_future()
            try:
                await future
            finally:
                self._room.pop(me, None)

    patch.setattr(Producer, "room", naive)
