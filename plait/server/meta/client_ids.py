"""Which process owns a client id at this meta server.

A heartbeat names all groups of a client id, so two processes with the same id would undo each other's memberships. The
first process owns the id. Another process is refused until the first has left, its connection is closed, or it has sent
no heartbeat for ``speaker_seconds``. So a restarted process can replace its predecessor.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from plait.clock import Clock
from plait.limits import MetaLimits

log = logging.getLogger("plait.meta")


class Peer(Protocol):
    """The connection that a heartbeat came over."""

    closed: bool

    @property
    def address(self) -> str:
        """The remote address."""


class _IdOwner(NamedTuple):
    instance: int
    last_heartbeat: float
    peer: Peer
    #: The instance that was refused last.
    refused: int = 0


class ClientIds:
    """The owners of client ids."""

    def __init__(self, clock: Clock, limits: MetaLimits) -> None:
        self._clock = clock
        self._limits = limits
        #: By client id, the longest silent first.
        self._owners: dict[str, _IdOwner] = {}

    def refuse(self, client: str, instance: int, peer: Peer, *, leaving: bool) -> str | None:
        """Check a heartbeat of a process. Returns the text of the refusal if another process owns the client id."""
        if not instance:
            return None
        now = self._clock.monotonic()
        owner = self._owners.get(client)
        if owner is not None and owner.instance != instance and self._lives(owner, now):
            if owner.refused != instance:
                self._owners[client] = owner._replace(refused=instance)
                log.warning(
                    "two processes use client id %r: the one at %s owns it, the one at %s is refused",
                    client,
                    owner.peer.address,
                    peer.address,
                )
            return (
                f"client id {client!r} is used by another live process, at {owner.peer.address}; "
                "give every process its own client_id"
            )
        self._owners.pop(client, None)
        if not leaving:
            refused = owner.refused if owner is not None and owner.instance == instance else 0
            self._owners[client] = _IdOwner(instance, now, peer, refused)
        self._forget(now)
        return None

    def _lives(self, owner: _IdOwner, now: float) -> bool:
        return not owner.peer.closed and now - owner.last_heartbeat < self._limits.speaker_seconds

    def _forget(self, now: float) -> None:
        """Remove owners that were silent for ``member_lost_seconds``."""
        while self._owners:
            client = next(iter(self._owners))
            if self._owners[client].last_heartbeat > now - self._limits.member_lost_seconds:
                return
            del self._owners[client]
