"""Clients that leave: written many at a time, and by another thread than the one that answers heartbeats.

A leave is answered when it is in the database. Until then its client counts as a member still; if it is back by then,
that waits for the leave: what a client says counts in the order in which it says it.
"""

from __future__ import annotations

from collections import deque

from plait.meta.core import Core
from plait.meta.database.schema import MemberRow
from plait.meta.database.store import StoreChange


class Leave:
    """A client on its way out."""

    def __init__(self, client: str, rows: list[MemberRow]) -> None:
        self.client = client
        self.rows = rows
        #: It is in the database, or it is known why it is not.
        self.done = not rows
        self.error: Exception | None = None


class LeaveQueue:
    """One thread begins and ends leaves; any may write them in between."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._leaves: dict[str, Leave] = {}
        self._waiting: deque[Leave] = deque()
        #: Not yet in the mirror.
        self._written: deque[StoreChange] = deque()

    def begin(self, client: str) -> Leave:
        """A client says that it leaves all its groups."""
        leave = self._leaves.get(client)
        if leave is None:
            self._core.refresh()
            keys = sorted(self._core.mirror.memberships.get(client, ()))
            leave = self._leaves[client] = Leave(client, [MemberRow(*key, client, online=False) for key in keys])
            if not leave.done:
                self._waiting.append(leave)
        return leave

    def carry_out(self, leave: Leave) -> None:
        """Write it, and others that wait; nothing if that is done. Any thread may do this, one at a time."""
        while not leave.done:
            self._write(self._gathered())

    def _gathered(self) -> list[Leave]:
        leaves, count = [], 0
        while self._waiting and count < self._core.limits.write_members:
            leaves.append(self._waiting.popleft())
            count += len(leaves[-1].rows)
        return leaves

    def _write(self, leaves: list[Leave]) -> None:
        error: Exception | None = None
        try:
            with self._core.store.change() as change:
                change.put(*(row for leave in leaves for row in leave.rows))
        except Exception as failed:  # noqa: BLE001 - told to who ends the leave
            error = failed
        else:
            self._written.append(change)
        for leave in leaves:
            leave.error, leave.done = error, True

    def end(self, leave: Leave) -> None:
        """The client is no member any more; raises why it is one still."""
        self.carry_out(leave)
        if self._leaves.get(leave.client) is leave:
            del self._leaves[leave.client]
        self.take_in()
        with self._core.noted():
            if leave.error is not None:
                raise leave.error

    def end_of(self, client: str) -> None:
        """The same for a client that has something else to say by now."""
        leave = self._leaves.get(client)
        if leave is not None:
            self.end(leave)

    def take_in(self) -> None:
        """What was written is in the mirror afterwards."""
        while self._written:
            self._core.take_in(self._written.popleft())
