"""The sessions of consumers over connections, and the pulls and reads that wait for rows.

A consumer has at most one session: a new one, on any connection, ends the one before.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.broker.groups.group import AttachedConsumer
from plait.clock import Clock
from plait.errors import PlaitError, StaleSession

ENDED = "the session of this consumer has ended (no contact, or attached elsewhere); attach again"


class SessionHolders:
    """The connection of each attached consumer of a server; a meta server has none."""

    def __init__(self, clock: Clock) -> None:
        self.monotonic = clock.monotonic
        #: Called with a consumer and its session when their connection is closed.
        self.on_lost: Callable[[AttachedConsumer, int], None] = lambda consumer, session: None
        self.held: dict[AttachedConsumer, tuple[ConnectionSessions, int]] = {}

    def end(self, consumer: AttachedConsumer) -> None:
        """End the session of a consumer, if a connection has one."""
        held = self.held.get(consumer)
        if held is not None:
            held[0].end(held[1])


class ConnectionSessions:
    """The sessions and the open polls of one connection."""

    def __init__(self, holders: SessionHolders, fail: Callable[[int, PlaitError], None]) -> None:
        """``fail`` answers a request, given by its correlation number, with an error."""
        self._holders = holders
        self._fail = fail
        #: Attached consumers by session.
        self.consumers: dict[int, AttachedConsumer] = {}
        #: Correlation of each pull or read that has no reply yet → its session; 0: a read.
        self.polls: dict[int, int] = {}

    def touch(self) -> None:
        """Record a contact of every consumer of this connection."""
        now = self._holders.monotonic()
        for consumer in self.consumers.values():
            consumer.last_contact = now

    def begin(self, consumer: AttachedConsumer) -> None:
        """Register a new session of a consumer, and end its earlier session on any connection."""
        self._holders.end(consumer)
        self.consumers[consumer.session] = consumer
        self._holders.held[consumer] = (self, consumer.session)

    def end(self, session: int) -> None:
        """End a session. Its open polls fail with ``StaleSession``, because the broker does not answer them."""
        consumer = self.consumers.pop(session, None)
        if consumer is not None:
            self._forget(consumer, session)
        for correlation in [number for number, of in self.polls.items() if of == session]:
            del self.polls[correlation]
            self._fail(correlation, StaleSession(ENDED))

    def _forget(self, consumer: AttachedConsumer, session: int) -> None:
        if self._holders.held.get(consumer) == (self, session):
            del self._holders.held[consumer]

    def lose(self) -> None:
        """The connection is closed: its consumers are lost unless they attach again."""
        for session, consumer in self.consumers.items():
            self._holders.on_lost(consumer, session)
            self._forget(consumer, session)
        self.consumers.clear()
        self.polls.clear()
