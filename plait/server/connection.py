"""One client connection of a server: decodes requests, encodes replies, and limits the memory of both.

Memory stays bounded whatever a client does. While a client does not read its replies, its requests wait. When too many
requests wait, or too many bytes of its frames are unanswered, the server stops reading from it. Bytes of incomplete
packets and of unsent replies have limits per server; long polls have a limit per connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from plait.broker.groups.shared_group import AttachedConsumer
from plait.errors import InternalError, LimitExceeded, PlaitError, ProtocolError, StaleSession, TooLarge
from plait.limits import KIB
from plait.wire import messages as m
from plait.wire.packets import Buffer, Packet, Receiver, send

if TYPE_CHECKING:
    from plait.server.listener import Listener

log = logging.getLogger("plait.server")

#: Requests that may wait for a client that does not read its replies: enough for its heartbeats, not for a flood.
DELAYED_SIZE_MAX = 256 * KIB
#: Unsent replies of a connection count towards the server's limit only above this size.
COUNTED_SIZE_MIN = 64 * KIB
#: Memory of a waiting request in addition to its bytes.
DELAYED_OVERHEAD = 256


class Poll:
    """A pull or read that has not been answered; a read has no session."""

    __slots__ = ("correlation", "session")

    def __init__(self, correlation: int, session: int | None) -> None:
        self.correlation = correlation
        self.session = session


class Connection(Receiver, asyncio.BufferedProtocol):
    """Created by the listener; lives as long as its socket."""

    def __init__(self, server: Listener) -> None:
        super().__init__(server.shared_buffer)
        self.server = server
        self._transport: asyncio.Transport | None = None
        #: The client id from its hello. Empty: no hello yet, and no other request is served.
        self.client = ""
        #: Attached consumers by session.
        self.consumers: dict[int, AttachedConsumer] = {}
        self._polls: dict[Poll, None] = {}
        self.opened = self.last_received = server.clock.monotonic()
        #: Bytes of received frames that are not yet answered.
        self.in_flight = 0
        self._too_many_in_flight = False
        self._reading_paused = False
        #: Bytes of unsent replies at the last count; 0 while there are few.
        self.outgoing = 0
        self._counts_outgoing = False
        #: True if there are too many unsent replies: requests wait in ``_delayed``.
        self.writing_paused = False
        self._delayed: list[Packet] = []
        self._delayed_size = 0
        self._outgoing = 0
        #: Bytes of an incomplete packet, and when it began.
        self.partial = 0
        self.partial_since = 0.0
        self.closed = False

    @property
    def address(self) -> str:
        """The remote address, for logs and error texts."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "an unknown address")

    # --- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from ``asyncio.Transport``.
        self._transport = cast(asyncio.Transport, transport)
        limit = self.server.limits.outgoing_bytes_per_connection
        self._transport.set_write_buffer_limits(high=min(limit, COUNTED_SIZE_MIN))
        if self.server.ending:
            self.abort()
            return
        if len(self.server.connections) >= self.server.limits.connections:
            self.fail(
                0,
                LimitExceeded(
                    f"connection limit reached ({self.server.limits.connections} per server); close idle connections",
                    limit="connections",
                    value=self.server.limits.connections,
                ),
            )
            self.close()
            return
        self.server.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._count_partial(0)
        self.count_outgoing(0)
        for session, consumer in self.consumers.items():
            self.server.lost(consumer, session)
            if self.server.holders.get(consumer) == (self, session):
                del self.server.holders[consumer]
        self.consumers.clear()
        self._polls.clear()
        self._delayed.clear()
        self.server.hung_up(self)

    def buffer_updated(self, nbytes: int) -> None:
        self.last_received = self.server.now
        packets = self.received(nbytes)
        self._serve(packets)
        if packets or not self.partial:
            self.partial_since = self.server.now
        partial = self.partial_size
        if partial != self.partial and not self.closed:
            self._count_partial(partial)
            if self.server.partial_bytes > self.server.limits.partial_bytes_total:
                self.server.give_up_partial()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        # Called during a write: ``answer`` counts the unsent bytes after it.
        self._counts_outgoing = True

    def resume_writing(self) -> None:
        self._counts_outgoing = False
        self.count_outgoing(0)
        if not self.writing_paused:
            return
        self.writing_paused = False
        delayed, self._delayed, self._delayed_size = self._delayed, [], 0
        if self._transport is None or self._transport.is_closing():
            # The requests can no longer be answered, and the broker of a stopping server may be closed.
            return
        self._serve(delayed)
        self._pause_or_resume_reading()

    # --- requests -------------------------------------------------------------------------------

    def _serve(self, packets: list[Packet]) -> None:
        """Serve requests."""
        try:
            for packet in packets:
                if self.writing_paused:
                    self._delay(packet)
                else:
                    self.server.handlers.handle(self, packet)
            if self.failure is not None:
                raise self.failure
        except PlaitError as error:
            self.fail(0, error)
            self.close()
        except Exception as error:
            # A defect in a request handler closes one connection; the server continues.
            log.exception("a request of %s failed", self.client or "a new client")
            self.fail(0, InternalError(f"the server failed on this request ({type(error).__name__}); see its log"))
            self.close()

    def _delay(self, packet: Packet) -> None:
        """Keep a request until the client has read its replies."""
        if packet.kind == m.HeartbeatRequest.KIND:
            self.touch_consumers()
        self._delayed.append(packet)
        self._delayed_size += len(packet.head) + len(packet.payload) + DELAYED_OVERHEAD
        if self._delayed_size > DELAYED_SIZE_MAX:
            self._pause_or_resume_reading()

    def _count_partial(self, size: int) -> None:
        self.server.partial_bytes += size - self.partial
        self.partial = size

    def give_up_partial(self) -> None:
        """Close the connection because incomplete packets exceed the server's limit."""
        limit = self.server.limits.partial_bytes_total
        self.fail(
            0,
            LimitExceeded(
                f"incomplete packets on this server exceed {limit} bytes; send faster, or try again later",
                limit="partial_bytes_total",
                value=limit,
            ),
        )
        self._count_partial(0)
        self.end_packet()
        self.close()

    # --- sessions and polls ---------------------------------------------------------------------

    def consumer(self, session: int) -> AttachedConsumer:
        """The consumer that attached over this connection under the session. Raises ``StaleSession`` if it is lost."""
        consumer = self.server.sessions.get(session) if session in self.consumers else None
        if consumer is None:
            raise StaleSession(
                "the session of this consumer has ended (no contact, or attached elsewhere); attach again"
            )
        consumer.last_contact = self.server.clock.monotonic()
        return consumer

    def touch_consumers(self) -> None:
        """Record a contact of every consumer of this connection."""
        now = self.server.clock.monotonic()
        for consumer in self.consumers.values():
            consumer.last_contact = now

    def attached(self, consumer: AttachedConsumer) -> None:
        """Register a new session of a consumer, and end its earlier session on any connection."""
        session = consumer.session
        before = self.server.holders.get(consumer)
        if before is not None:
            before[0].end_session(before[1])
        self.consumers[session] = consumer
        self.server.holders[consumer] = (self, session)

    def end_session(self, session: int) -> None:
        """End a session. Its open polls fail with ``StaleSession``, because the broker does not answer them."""
        consumer = self.consumers.pop(session, None)
        if consumer is not None and self.server.holders.get(consumer) == (self, session):
            del self.server.holders[consumer]
        error = StaleSession("the session of this consumer has ended (no contact, or attached elsewhere); attach again")
        for poll in [poll for poll in self._polls if poll.session == session]:
            del self._polls[poll]
            self.fail(poll.correlation, error)

    def begin_poll(self, correlation: int, session: int | None) -> Poll:
        """Register a pull or read that may wait."""
        limit = self.server.limits.polls_per_connection
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

    # --- replies --------------------------------------------------------------------------------

    def answer(self, correlation: int, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0) -> None:
        """Send a reply. Does nothing if the connection is closed."""
        transport = self._transport
        if self.closed or transport is None or transport.is_closing():
            return
        try:
            send(transport, message.KIND, correlation, m.encode(message), payload, size)
        except ProtocolError as error:
            self.fail(correlation, TooLarge(f"the reply is too large ({error.message}); request less"))
            return
        if self._counts_outgoing:
            self._check_outgoing()

    def fail(self, correlation: int, error: PlaitError) -> None:
        self.answer(correlation, m.failure_of(error))

    def close(self) -> None:
        """Close after the unsent replies."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """Close at once and discard unsent replies."""
        if self._transport is not None:
            self._transport.abort()

    # --- flow control ---------------------------------------------------------------------------

    def frame_received(self, size: int) -> None:
        """Count a received frame. Stops reading if too many bytes are unanswered."""
        self.in_flight += size
        if self.in_flight > self.server.limits.in_flight_bytes_per_connection and not self._too_many_in_flight:
            self._too_many_in_flight = True
            self._pause_or_resume_reading()

    def frame_answered(self, size: int) -> None:
        """Count an answered frame. Resumes reading."""
        self.in_flight -= size
        if self._too_many_in_flight and self.in_flight <= self.server.limits.in_flight_bytes_per_connection // 2:
            self._too_many_in_flight = False
            self._pause_or_resume_reading()

    def _pause_or_resume_reading(self) -> None:
        wanted = self._too_many_in_flight or self._delayed_size > DELAYED_SIZE_MAX
        transport = self._transport
        if wanted == self._reading_paused or self.closed or transport is None or transport.is_closing():
            return
        self._reading_paused = wanted
        if wanted:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _check_outgoing(self) -> None:
        self.count_outgoing(self._outgoing_size())
        if self.outgoing > self.server.limits.outgoing_bytes_per_connection and not self.writing_paused:
            self.writing_paused = True
            self._outgoing = self.outgoing
        if self.server.outgoing_bytes > self.server.limits.outgoing_bytes_total:
            self.server.give_up_outgoing()

    def count_outgoing(self, size: int | None = None) -> None:
        """Set this connection's part of the server's unsent bytes; None: the present size."""
        if size is None:
            size = self._outgoing_size() if self._counts_outgoing else 0
        self.server.outgoing_bytes += size - self.outgoing
        self.outgoing = size

    def give_up_outgoing(self) -> None:
        """Close the connection because unsent replies exceed the server's limit."""
        log.warning(
            "client %s is disconnected: it has not read %d bytes of replies; all connections have %d unsent bytes "
            "(limit outgoing_bytes_total)",
            self.client or "without a name",
            self.outgoing,
            self.server.outgoing_bytes,
        )
        self.count_outgoing(0)
        self._counts_outgoing = False
        self.abort()

    def _outgoing_size(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # --- time -----------------------------------------------------------------------------------

    def overdue(self, now: float) -> bool:
        """True if the client was silent for too long, or sent no hello in time. Called every second."""
        limits = self.server.limits
        if not self.client:
            return now - self.opened > limits.hello_seconds
        if self._reading_paused:
            self._touch_paused(now)
        return now - self.last_received > limits.idle_seconds

    def _touch_paused(self, now: float) -> None:
        """Count a client as alive while reading is paused, unless it does not read its replies."""
        outgoing, before = self._outgoing_size(), self._outgoing
        self._outgoing = outgoing
        if self.writing_paused and outgoing >= before:
            return
        self.last_received = now
        self.touch_consumers()
