"""The client connections of a server: each decodes requests, encodes replies, and limits the memory of both.

Memory stays bounded whatever a client does. While a client does not read its replies, its requests wait. When too many
requests wait, or too many bytes of its frames are unanswered, the server stops reading from it. Bytes of incomplete
packets and of unsent replies have limits per server; long polls have a limit per connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from plait.broker.groups.group import AttachedConsumer
from plait.broker.partitions.partition import Delivery
from plait.errors import InternalError, LimitExceeded, PlaitError, ProtocolError, StaleSession, TooLarge
from plait.limits import KIB
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import Buffer, Packet, Receiver, pack, write

if TYPE_CHECKING:
    from plait.server.listener import Connections

log = logging.getLogger("plait.server")

#: Requests that may wait for a client that does not read its replies: enough for its heartbeats, not for a flood.
DELAYED_SIZE_MAX = 256 * KIB
#: Unsent replies of a connection count towards the server's limit only above this size.
COUNTED_SIZE_MIN = 64 * KIB
#: Memory of a waiting request in addition to its bytes.
DELAYED_OVERHEAD = 256

ENDED = "the session of this consumer has ended (no contact, or attached elsewhere); attach again"


class Connection(Receiver):
    """One client connection, from its start until its socket is closed."""

    def __init__(self, pool: Connections) -> None:
        super().__init__(pool.shared_buffer)
        self.pool = pool
        self._transport: asyncio.Transport | None = None
        #: The client id from its hello. Empty: no hello yet, and no other request is served.
        self.client = ""
        #: Attached consumers by session.
        self.consumers: dict[int, AttachedConsumer] = {}
        #: Correlation of each pull or read that has no reply yet → its session; 0: a read.
        self.polls: dict[int, int] = {}
        self.opened = self.last_received = pool.clock.monotonic()
        #: Bytes of received frames that are not yet answered.
        self.in_flight = 0
        self.too_many_in_flight = False
        self._reading_paused = False
        #: Bytes of unsent replies at the last count; 0 while there are few.
        self.outgoing = 0
        self.counts_outgoing = False
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
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "an unknown address")

    # --- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from ``asyncio.Transport``.
        self._transport = cast(asyncio.Transport, transport)
        limit = self.pool.limits.outgoing_bytes_per_connection
        self._transport.set_write_buffer_limits(high=min(limit, COUNTED_SIZE_MIN))
        if self.pool.ending:
            self.abort()
            return
        if len(self.pool) >= self.pool.limits.connections:
            self.fail(
                0,
                LimitExceeded(
                    f"connection limit reached ({self.pool.limits.connections} per server); close idle connections",
                    limit="connections",
                    value=self.pool.limits.connections,
                ),
            )
            self.close()
            return
        self.pool[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.count_partial(0)
        self.count_outgoing(0)
        # Consumers are lost unless they attach again.
        self.polls.clear()
        for session, consumer in list(self.consumers.items()):
            self.pool.on_lost(consumer, session)
            self.end_session(session)
        self._delayed.clear()
        self.pool.remove(self)

    def buffer_updated(self, nbytes: int) -> None:
        self.last_received = self.pool.now
        packets = self.received(nbytes)
        self._serve(packets)
        if packets or not self.partial:
            self.partial_since = self.pool.now
        partial = self.partial_size
        if partial != self.partial and not self.closed:
            self.count_partial(partial)
            if self.pool.partial_bytes > self.pool.limits.partial_bytes_total:
                self.pool.give_up_partial()

    def pause_writing(self) -> None:
        # Called during a write: ``answer`` counts the unsent bytes after it.
        self.counts_outgoing = True

    def resume_writing(self) -> None:
        self.counts_outgoing = False
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
        """Serve requests. A protocol error closes the connection; any other error is a reply."""
        try:
            for packet in packets:
                if self.writing_paused:
                    self._delay(packet)
                    continue
                message, correlation, payload, _ = packet
                handler = self.pool.handlers.get(message.KIND)
                if handler is None:
                    raise ProtocolError(f"packet kind {message.KIND} is not a request; is the client newer?")
                if not self.client and not isinstance(message, m.Hello):
                    raise ProtocolError("the first packet must be a hello")
                try:
                    handler(self, correlation, message, payload)
                except ProtocolError:
                    raise
                except PlaitError as error:
                    self.pool.on_refusal()
                    self.fail(correlation, error)
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

    def begin_poll(self, correlation: int, session: int = 0) -> dict[int, int]:
        """Register a pull of a session, or a read, that may wait. Its reply removes it from the returned dictionary."""
        polls, limit = self.polls, self.pool.limits.polls_per_connection
        if len(polls) >= limit:
            raise LimitExceeded(
                f"limit of long polls reached ({limit} per connection); wait for their replies",
                limit="polls_per_connection",
                value=limit,
            )
        if correlation in polls:
            raise ProtocolError(f"correlation {correlation} belongs to a request that has no reply yet")
        polls[correlation] = session
        return polls

    # --- sessions of consumers ------------------------------------------------------------------

    def touch(self) -> None:
        """Record a contact of every consumer of this connection."""
        now = self.pool.clock.monotonic()
        for consumer in self.consumers.values():
            consumer.last_contact = now

    def begin_session(self, consumer: AttachedConsumer) -> None:
        """Register a new session of a consumer, and end its earlier session on any connection."""
        self.pool.end_session(consumer)
        self.consumers[consumer.session] = consumer
        self.pool.held[consumer] = (self, consumer.session)

    def end_session(self, session: int) -> None:
        """End a session. Its open polls fail with ``StaleSession``, because the broker does not answer them."""
        consumer = self.consumers.pop(session, None)
        if consumer is not None and self.pool.held.get(consumer) == (self, session):
            del self.pool.held[consumer]
        for correlation in [number for number, of in self.polls.items() if of == session]:
            del self.polls[correlation]
            self.fail(correlation, StaleSession(ENDED))

    # --- replies --------------------------------------------------------------------------------

    def answer(self, correlation: int, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0) -> None:
        transport = self._transport
        if self.closed or transport is None or transport.is_closing():
            return
        try:
            head = pack(message.KIND, correlation, codec.encode(message), size)
        except ProtocolError as error:
            self.fail(correlation, TooLarge(f"the reply is too large ({error.message}); request less"))
            return
        if payload:
            write(transport, head, payload, size)
        else:
            transport.write(head)
        if self.counts_outgoing:
            self._check_outgoing()

    def answer_send(self, correlation: int, size: int, sequence: int | None, error: PlaitError | None) -> None:
        """Answer a send of a frame of ``size`` bytes with the sequence of its first row, or with an error."""
        self.in_flight -= size
        if self.too_many_in_flight:
            self.check_in_flight()
        if error is not None:
            self.fail(correlation, error)
        else:
            self.answer(correlation, m.SendReply(sequence))

    def answer_pull(self, correlation: int, consumer: AttachedConsumer, delivery: Delivery | None) -> None:
        """Answer a pull, unless it was answered when its session ended."""
        if self.polls.pop(correlation, None) is None:
            return
        if delivery is None:
            self.answer(correlation, m.PullReply(news=consumer.news, paused=consumer.group.paused))
        else:
            pulled = m.PullReply(delivery.ranges, consumer.group.has_more, consumer.news, delivery.tags)
            self.answer(correlation, pulled, delivery.parts, delivery.size)

    def fail(self, correlation: int, error: PlaitError) -> None:
        self.answer(correlation, codec.failure_of(error))

    def close(self) -> None:
        """Close after the unsent replies."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """Close at once and discard unsent replies."""
        if self._transport is not None:
            self._transport.abort()

    # --- flow control ---------------------------------------------------------------------------

    def _delay(self, packet: Packet) -> None:
        """Keep a request until the client has read its replies."""
        if isinstance(packet.message, m.HeartbeatRequest):
            self.touch()
        self._delayed.append(packet)
        self._delayed_size += packet.size + DELAYED_OVERHEAD
        if self._delayed_size > DELAYED_SIZE_MAX:
            self._pause_or_resume_reading()

    def count_partial(self, size: int) -> None:
        self.pool.partial_bytes += size - self.partial
        self.partial = size

    def check_in_flight(self) -> None:
        """Stop reading while too many bytes of frames are unanswered."""
        limit = self.pool.limits.in_flight_bytes_per_connection
        self.too_many_in_flight = self.in_flight > (limit // 2 if self.too_many_in_flight else limit)
        self._pause_or_resume_reading()

    def _pause_or_resume_reading(self) -> None:
        wanted = self.too_many_in_flight or self._delayed_size > DELAYED_SIZE_MAX
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
        if self.outgoing > self.pool.limits.outgoing_bytes_per_connection and not self.writing_paused:
            self.writing_paused = True
            self._outgoing = self.outgoing
        if self.pool.outgoing_bytes > self.pool.limits.outgoing_bytes_total:
            self.pool.give_up_outgoing()

    def count_outgoing(self, size: int | None = None) -> None:
        """Set this connection's part of the server's unsent bytes; None: the present size."""
        if size is None:
            size = self._outgoing_size() if self.counts_outgoing else 0
        self.pool.outgoing_bytes += size - self.outgoing
        self.outgoing = size

    def _outgoing_size(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # --- time -----------------------------------------------------------------------------------

    def overdue(self, now: float) -> bool:
        """True if the client was silent for too long, or sent no hello in time. Called every second."""
        limits = self.pool.limits
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
        self.touch()
