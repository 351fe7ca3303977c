"""One client connection of a server: bytes to requests, answers to bytes, and the limits on both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from plait.broker.group import Consumer
from plait.errors import InternalError, LimitExceeded, PlaitError, ProtocolError
from plait.wire import messages as m
from plait.wire.packets import Buffer, Packet, Receiver, pack

if TYPE_CHECKING:
    from plait.server.host import Server

log = logging.getLogger("plait.server")


class Connection(asyncio.BufferedProtocol):
    """Created by the listener; lives as long as its socket."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._receiver = Receiver(server.shared_buffer)
        self._transport: asyncio.Transport | None = None
        #: Said hello; nothing else is served before.
        self.client = ""
        #: Its attached consumers by session.
        self.consumers: dict[int, Consumer] = {}
        self.heard = server.clock.monotonic()
        #: Bytes of received frames whose fate is open.
        self.in_flight = 0
        self._reading_paused = False
        #: The socket takes no more: pulls wait here until it does.
        self.writing_paused = False
        self.delayed: list[Packet] = []
        self._partial = 0
        self.closed = False

    # --- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by inheritance, only by what they do.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.server.limits.outgoing_bytes_per_connection)
        if len(self.server.connections) >= self.server.limits.connections:
            self.fail(0, LimitExceeded(f"this server has its {self.server.limits.connections} connections"))
            self.close()
            return
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.server.partial_bytes -= self._partial
        self._partial = 0
        self.server.connections.discard(self)
        for session, consumer in self.consumers.items():
            self.server.membership.disconnected(consumer, session)
        self.consumers.clear()
        self.delayed.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = self.server.now
        try:
            packets = self._receiver.received(nbytes)
            for packet in packets:
                self.server.handlers.handle(self, packet)
            self._account_partial()
        except PlaitError as error:
            self.fail(0, error)
            self.close()
        except Exception as error:
            # A defect of ours must cost one connection, not the server; the log has what is needed to mend it.
            log.exception("a request of %s failed", self.client or "a new client")
            self.fail(0, InternalError(f"the server failed on this request ({type(error).__name__}); see its log"))
            self.close()

    def _account_partial(self) -> None:
        partial = self._receiver.partial_size
        if partial != self._partial:
            self.server.partial_bytes += partial - self._partial
            self._partial = partial
            if self.server.partial_bytes > self.server.limits.partial_bytes_total:
                raise LimitExceeded("too many bytes of unfinished packets on this server; connect again later")

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        delayed, self.delayed = self.delayed, []
        for packet in delayed:
            self.server.handlers.handle(self, packet)

    # --- sending --------------------------------------------------------------------------------

    def answer(self, correlation: int, message: m.Message, payload: Sequence[Buffer] = (), size: int = 0) -> None:
        """Write a packet; nothing when the client is gone."""
        if self.closed or self._transport is None:
            return
        head = pack(message.KIND, correlation, m.encode(message), size)
        if payload:
            self._transport.writelines([head, *payload])
        else:
            self._transport.write(head)

    def fail(self, correlation: int, error: PlaitError) -> None:
        self.answer(correlation, m.failure_of(error))

    def close(self) -> None:
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
        limit = self.server.limits.in_flight_bytes_per_connection
        if self.in_flight > limit and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def settled(self, size: int) -> None:
        """A frame's fate is known."""
        self.in_flight -= size
        limit = self.server.limits.in_flight_bytes_per_connection
        if self._reading_paused and self.in_flight <= limit // 2 and not self.closed:
            self._reading_paused = False
            assert self._transport is not None
            self._transport.resume_reading()

    def require_hello(self) -> None:
        if not self.client:
            raise ProtocolError("the first packet must be a hello")
