"""Writes the leaves of clients, many at a time, in another thread than the one that answers heartbeats.

A leave is acknowledged when it is in the database. Until then the client is still a member. If the client sends another
heartbeat meanwhile, that heartbeat waits for the leave, because requests of a client take effect in the order in which
the client sent them.
"""

from __future__ import annotations

from collections import deque

from plait.meta.core import Core
from plait.meta.database.schema import MemberRow
from plait.meta.database.store import StoreChange


class Leave:
    """A request of one client to leave all its groups."""

    def __init__(self, client: str, rows: list[MemberRow]) -> None:
        self.client = client
        self.rows = rows
        #: True once the rows are written or ``error`` is set.
        self.done = not rows
        self.error: Exception | None = None


class LeaveQueue:
    """One thread begins and ends leaves; any thread may write them in between."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._leaves: dict[str, Leave] = {}
        self._waiting: deque[Leave] = deque()
        #: Committed changes that are not in the mirror yet.
        self._written: deque[StoreChange] = deque()

    def begin(self, client: str) -> Leave:
        """Begin the leave of a client from all its groups. Returns the existing leave if there is one."""
        leave = self._leaves.get(client)
        if leave is None:
            self._core.refresh()
            keys = sorted(self._core.mirror.memberships.get(client, ()))
            leave = self._leaves[client] = Leave(client, [MemberRow(*key, client, online=False) for key in keys])
            if not leave.done:
                self._waiting.append(leave)
        return leave

    def carry_out(self, leave: Leave) -> None:
        """Write this leave together with others that wait. Idempotent. Any thread may call this, one at a time."""
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
        except Exception as failed:  # noqa: BLE001 - raised by ``end``
            error = failed
        else:
            self._written.append(change)
        for leave in leaves:
            leave.error, leave.done = error, True

    def end(self, leave: Leave) -> None:
        """Complete the leave, after which the client is no member. Raises the error of a failed write."""
        self.carry_out(leave)
        if self._leaves.get(leave.client) is leave:
            del self._leaves[leave.client]
        self.take_in()
        with self._core.noted():
            if leave.error is not None:
                raise leave.error

    def end_of(self, client: str) -> None:
        """Complete the leave of a client, if there is one, before another request of it."""
        leave = self._leaves.get(client)
        if leave is not None:
            self.end(leave)

    def take_in(self) -> None:
        """Apply committed leaves to the mirror."""
        while self._written:
            self._core.take_in(self._written.popleft())
