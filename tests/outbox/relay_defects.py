"""Defects of the outbox's relay, for tests/plants: each patches the shipped classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from plait.outbox.frame_queues import FrameQueues, OutboxFrame, WaitingRow
from plait.outbox.leader import Leader
from plait.outbox.relay_store import RelayStore


def renew_the_lease_of_another_relay(patch: pytest.MonkeyPatch) -> None:
    """A leader that was paused assigns and deletes rows under the epoch of its successor."""
    renew = RelayStore._renew

    def with_any_epoch(
        self: RelayStore, connection: sa.Connection, epoch: int, count: int, producer: int | None
    ) -> Any:
        lease = self.lease(connection)
        assert lease is not None
        return renew(self, connection, lease.epoch, count, producer)

    patch.setattr(RelayStore, "_renew", with_any_epoch)
    patch.setattr(Leader, "_check", lambda self: None)


def look_behind_the_highest_id_only(patch: pytest.MonkeyPatch) -> None:
    """Rows that become visible after rows with higher ids are never found."""
    waiting = RelayStore.waiting

    def newer(self: RelayStore, *args: Any, **kwargs: Any) -> list[WaitingRow]:
        found = waiting(self, *args, **kwargs)
        highest: int = self.__dict__.setdefault("highest", 0)
        rows = [row for row in found if row.id > highest]
        self.__dict__["highest"] = max([highest, *(row.id for row in rows)])
        return rows

    patch.setattr(RelayStore, "waiting", newer)


def number_again_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A new leader gives assigned rows new sequences: brokers do not recognize them."""
    add = FrameQueues.add

    def renumbered(self: FrameQueues, frames: Sequence[OutboxFrame]) -> Any:
        self._withdrawn.extend(frame for frame in frames if frame.doubt)
        return add(self, [frame for frame in frames if not frame.doubt])

    patch.setattr(FrameQueues, "add", renumbered)


def follow_the_route_at_once(patch: pytest.MonkeyPatch) -> None:
    """Rows of an LP are assigned to its new partition while earlier rows wait in the old one."""
    patch.setattr(FrameQueues, "_homes", lambda self: {})
