"""The sessions of consumers over connections, and the pulls and reads that wait for rows.

A consumer has at most one session: a new one, on any connection, ends the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.broker.groups.shared_group import AttachedConsumer
from plait.clock import Clock
from plait.errors import LimitExceeded, PlaitError, StaleSession

_ENDED = "the session of this consumer has ended (no contact, or attached elsewhere); attach again"


class Poll:
    """A pull or read that has not been answered; a read has no session."""

    __slots__ = ("correlation", "session")

    def __init__(self, correlation: int, session: int | None) -> None:
        self.correlation = correlation
        self.session = session


class SessionHolders:
    """The connection of each attached consumer of a server; a meta server has none."""

    def __init__(self, clock: Clock, polls_per_connection: int) -> None:
        self.monotonic = clock.monotonic
        self.polls_per_connection = polls_per_connection
        #: The broker's attached consumers by session.
        self.attached: Mapping[int, AttachedConsumer] = {}
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
        self._polls: dict[Poll, None] = {}

    def consumer(self, session: int) -> AttachedConsumer:
        """The consumer that attached over this connection under the session. Raises ``StaleSession`` if it is lost."""
        consumer = self._holders.attached.get(session) if session in self.consumers else None
        if consumer is None:
            raise StaleSession(_ENDED)
        consumer.last_contact = self._holders.monotonic()
        return consumer

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
        for poll in [poll for poll in self._polls if poll.session == session]:
            del self._polls[poll]
            self._fail(poll.correlation, StaleSession(_ENDED))

    def _forget(self, consumer: AttachedConsumer, session: int) -> None:
        if self._holders.held.get(consumer) == (self, session):
            del self._holders.held[consumer]

    def lose(self) -> None:
        """The connection is closed: its consumers are lost unless they attach again."""
        for session, consumer in self.consumers.items():
            self._holders.on_lost(consumer, session)
            self._forget(consumer, session)
        self.consumers.clear()
        self._polls.clear()

    def begin_poll(self, correlation: int, session: int | None) -> Poll:
        """Register a pull or read that may wait."""
        limit = self._holders.polls_per_connection
        if len(self._polls) >= limit:
            raise LimitExceeded(
                f"limit of long polls reached ({limit} per connection); wait for their replies",
                limit="polls_per_connection",
                value=limit,
            )
        poll = Poll(correlation, session)
        self._polls[poll] = None
        return poll

    def end_poll(self, poll: Poll) -> bool:
        """Remove a poll before its reply. Returns False if the poll has ended already and must not be answered."""
        if poll not in self._polls:
            return False
        del self._polls[poll]
        return True
