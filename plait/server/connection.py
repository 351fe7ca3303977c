"""One client connection of a server: bytes to requests, answers to bytes, and the limits on both.

Memory stays bounded whatever a client does. While its answers are not taken its requests wait, and when too many of
them wait, or too many of its frames have an open fate, nothing more is read from it. Bytes of half a packet and bytes
that are not taken count towards limits of the whole server, long polls towards one of the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from plait.broker.groups.shared_group import AttachedConsumer
from plait.errors import InternalError, LimitExceeded, PlaitError, ProtocolError, StaleSession, TooLarge
from plait.limits import KIB
from plait.wire import messages as m
from plait.wire.packets import Buffer, Packet, Receiver, pack, send

if TYPE_CHECKING:
    from plait.server.listener import Listener

log = logging.getLogger("plait.server")

#: Requests that wait until answers are taken: some heartbeats of a slow reader are heard, a flood is not read.
DELAYED_SIZE_MAX = 256 * KIB
#: Answers that are not taken count towards the server's total from here on: less is always there for each.
COUNTED_SIZE_MIN = 64 * KIB
#: What a waiting request takes beside its bytes.
DELAYED_OVERHEAD = 256


class Poll:
    """A pull or read that has not been answered; a read has no session."""

    __slots__ = ("correlation", "session")

    def __init__(self, correlation: int, session: int | None) -> None:
        self.correlation = correlation
        self.session = session


class Connection(asyncio.BufferedProtocol):
    """Created by the listener; lives as long as its socket."""

    def __init__(self, server: Listener) -> None:
        self.server = server
        self._receiver = Receiver(server.shared_buffer)
        self._transport: asyncio.Transport | None = None
        #: Said hello; nothing else is served before.
        self.client = ""
        #: Its attached consumers by session.
        self.consumers: dict[int, AttachedConsumer] = {}
        self._polls: dict[Poll, None] = {}
        self.born = self.heard = server.clock.monotonic()
        #: Bytes of received frames whose fate is open.
        self.in_flight = 0
        self._too_many_in_flight = False
        self._reading_paused = False
        #: Bytes of answers that the socket has not taken, as counted last; they are counted while there are many.
        self.outgoing = 0
        self._counts_outgoing = False
        #: There are too many of them: requests wait here until they are taken.
        self.writing_paused = False
        self._delayed: list[Packet] = []
        self._delayed_size = 0
        self._outgoing = 0
        #: Bytes of an unfinished packet, and when it began.
        self.partial = 0
        self.partial_since = 0.0
        self.closed = False

    @property
    def address(self) -> str:
        """Where it comes from, for people."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "an unknown address")

    # --- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by inheritance, only by what they do.
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
                    f"this server has its {self.server.limits.connections} connections",
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

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = self.server.now
        if self._serve(self._receiver.received(nbytes)) or not self.partial:
            self.partial_since = self.server.now
        partial = self._receiver.partial_size
        if partial != self.partial and not self.closed:
            self._count_partial(partial)
            if self.server.partial_bytes > self.server.limits.partial_bytes_total:
                self.server.give_up_partial()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        # Called in the middle of a write: ``answer`` looks at it when that is done.
        self._counts_outgoing = True

    def resume_writing(self) -> None:
        self._counts_outgoing = False
        self.count_outgoing(0)
        if not self.writing_paused:
            return
        self.writing_paused = False
        delayed, self._delayed, self._delayed_size = self._delayed, [], 0
        if self._transport is None or self._transport.is_closing():
            # They cannot be answered any more, and a server that hangs up has no broker left to carry them out.
            return
        self._serve(delayed)
        self._pause_or_resume_reading()

    # --- requests -------------------------------------------------------------------------------

    def _serve(self, packets: Iterable[Packet]) -> int:
        """Carry requests out; how many there were."""
        count = 0
        try:
            for packet in packets:
                count += 1
                if self.writing_paused:
                    self._delay(packet)
                else:
                    self.server.handlers.handle(self, packet)
        except PlaitError as error:
            self.fail(0, error)
            self.close()
        except Exception as error:
            # A defect of ours must cost one connection, not the server; the log has what is needed to mend it.
            log.exception("a request of %s failed", self.client or "a new client")
            self.fail(0, InternalError(f"the server failed on this request ({type(error).__name__}); see its log"))
            self.close()
        return count

    def _delay(self, packet: Packet) -> None:
        """A reader that does not read gets no more until it does."""
        if packet.kind == m.HeartbeatRequest.KIND:
            self.hear_consumers()
        self._delayed.append(packet)
        self._delayed_size += len(packet.head) + len(packet.payload) + DELAYED_OVERHEAD
        if self._delayed_size > DELAYED_SIZE_MAX:
            self._pause_or_resume_reading()

    def _count_partial(self, size: int) -> None:
        self.server.partial_bytes += size - self.partial
        self.partial = size

    def give_up_partial(self) -> None:
        """Its unfinished packet takes memory that others need."""
        limit = self.server.limits.partial_bytes_total
        self.fail(
            0,
            LimitExceeded(
                f"{limit} bytes of unfinished packets are on this server; send faster, or later",
                limit="partial_bytes_total",
                value=limit,
            ),
        )
        self._count_partial(0)
        self._receiver = Receiver(self.server.shared_buffer)
        self.close()

    # --- sessions and polls ---------------------------------------------------------------------

    def consumer(self, session: int) -> AttachedConsumer:
        """The consumer that attached here under that session; nobody else's, and not one that was given up."""
        if session not in self.consumers:
            raise StaleSession("this consumer was given up (out of contact or attached elsewhere); attach again")
        return self.server.session(session)

    def hear_consumers(self) -> None:
        """Its consumers live."""
        now = self.server.clock.monotonic()
        for consumer in self.consumers.values():
            consumer.heard = now

    def attached(self, consumer: AttachedConsumer) -> None:
        """A consumer has a new session here; wherever it was attached before, it is no more."""
        session = consumer.session
        before = self.server.holders.get(consumer)
        if before is not None:
            before[0].gave_up(before[1])
        self.consumers[session] = consumer
        self.server.holders[consumer] = (self, session)

    def gave_up(self, session: int) -> None:
        """The session is over: who waits under it is told, because the broker will not answer it."""
        consumer = self.consumers.pop(session, None)
        if consumer is not None and self.server.holders.get(consumer) == (self, session):
            del self.server.holders[consumer]
        error = StaleSession("this consumer was given up (out of contact or attached elsewhere); attach again")
        for poll in [poll for poll in self._polls if poll.session == session]:
            del self._polls[poll]
            self.fail(poll.correlation, error)

    def begin_poll(self, correlation: int, session: int | None) -> Poll:
        """A pull or read may have to wait."""
        limit = self.server.limits.polls_per_connection
        if len(self._polls) >= limit:
            raise LimitExceeded(
                f"this connection has its {limit} long polls; wait for their answers",
                limit="polls_per_connection",
                value=limit,
            )
        poll = Poll(correlation, session)
        self._polls[poll] = None
        return poll

    def end_poll(self, poll: Poll) -> bool:
        """It may be answered now; False: nobody waits for that any more."""
        if poll not in self._polls:
            return False
        del self._polls[poll]
        return True

    # --- answers --------------------------------------------------------------------------------

    def answer(self, correlation: int, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0) -> None:
        """Write a packet; nothing when the client is gone."""
        transport = self._transport
        if self.closed or transport is None or transport.is_closing():
            return
        try:
            head = pack(message.KIND, correlation, m.encode(message), size)
        except ProtocolError as error:
            self.fail(correlation, TooLarge(f"the answer is too large ({error.message}); ask for less"))
            return
        send(transport, head, payload, size)
        if self._counts_outgoing:
            self._look_at_outgoing()

    def fail(self, correlation: int, error: PlaitError) -> None:
        self.answer(correlation, m.failure_of(error))

    def close(self) -> None:
        """Close once what was answered is sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for a peer that may never read."""
        if self._transport is not None:
            self._transport.abort()

    # --- flow control ---------------------------------------------------------------------------

    def took(self, size: int) -> None:
        """A frame was received; too many with an open fate stop the reading."""
        self.in_flight += size
        if self.in_flight > self.server.limits.in_flight_bytes_per_connection and not self._too_many_in_flight:
            self._too_many_in_flight = True
            self._pause_or_resume_reading()

    def settled(self, size: int) -> None:
        """A frame's fate is known."""
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

    def _look_at_outgoing(self) -> None:
        self.count_outgoing(self._outgoing_size())
        if self.outgoing > self.server.limits.outgoing_bytes_per_connection and not self.writing_paused:
            self.writing_paused = True
            self._outgoing = self.outgoing
        if self.server.outgoing_bytes > self.server.limits.outgoing_bytes_total:
            self.server.give_up_outgoing()

    def count_outgoing(self, size: int | None = None) -> None:
        """Its part of the server's total is so much; without a number, what it is now."""
        if size is None:
            size = self._outgoing_size() if self._counts_outgoing else 0
        self.server.outgoing_bytes += size - self.outgoing
        self.outgoing = size

    def give_up_outgoing(self) -> None:
        """What it does not take takes memory that others need."""
        log.warning(
            "client %s is disconnected: it does not take %d bytes of answers, and %d wait on all connections "
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
        """Nothing was heard for too long, or no hello. Called every second."""
        limits = self.server.limits
        if not self.client:
            return now - self.born > limits.hello_seconds
        if self._reading_paused:
            self._hear_paused(now)
        return now - self.heard > limits.idle_seconds

    def _hear_paused(self, now: float) -> None:
        """What it says is not read at present: it lives if it takes what it is sent, or if that is up to us."""
        outgoing, before = self._outgoing_size(), self._outgoing
        self._outgoing = outgoing
        if self.writing_paused and outgoing >= before:
            return
        self.heard = now
        self.hear_consumers()
