"""Which process speaks for a client id at this meta server.

A heartbeat names all groups of a client id, so two processes with one id would undo each other's memberships with each
of theirs. The process that came first speaks for the id. Another one is refused until the first has left, its
connection is gone, or nothing was heard of it for ``speaker_seconds``: a process that is started again takes the place
of the one before it.
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
        """Where it comes from."""


class _IdOwner(NamedTuple):
    instance: int
    heard: float
    peer: Peer
    #: The last other one that was refused.
    refused: int = 0


class ClientIds:
    """See the module."""

    def __init__(self, clock: Clock, limits: MetaLimits) -> None:
        self._clock = clock
        self._limits = limits
        #: By client id; who was not heard of for longest comes first.
        self._speakers: dict[str, _IdOwner] = {}

    def refuse(self, client: str, instance: int, peer: Peer, *, leaving: bool) -> str | None:
        """A process speaks for a client id; where another one does, what it is to be told."""
        if not instance:
            return None
        now = self._clock.monotonic()
        speaker = self._speakers.get(client)
        if speaker is not None and speaker.instance != instance and self._lives(speaker, now):
            if speaker.refused != instance:
                self._speakers[client] = speaker._replace(refused=instance)
                log.warning(
                    "client id %r is used by two processes: the one at %s has it, the one at %s is refused",
                    client,
                    speaker.peer.address,
                    peer.address,
                )
            return (
                f"client id {client!r} is used by another live process, at {speaker.peer.address}; "
                "give every process a client_id of its own"
            )
        self._speakers.pop(client, None)
        if not leaving:
            refused = speaker.refused if speaker is not None and speaker.instance == instance else 0
            self._speakers[client] = _IdOwner(instance, now, peer, refused)
        self._forget(now)
        return None

    def _lives(self, speaker: _IdOwner, now: float) -> bool:
        return not speaker.peer.closed and now - speaker.heard < self._limits.speaker_seconds

    def _forget(self, now: float) -> None:
        """Drop those of whom nothing was heard for long."""
        while self._speakers:
            client = next(iter(self._speakers))
            if self._speakers[client].heard > now - self._limits.member_lost_seconds:
                return
            del self._speakers[client]
