"""Packets, and a client's connection to a server.

A packet is a 16-byte header, a message as a msgpack head padded to 8 bytes, and a payload of frames. ``Receiver``
splits received bytes into packets, or fails with a ``ProtocolError``, however the bytes were split into reads. It
provides the buffer for the next bytes: all connections of a loop share one buffer for small packets, and a large packet
gets its own buffer, so that its payload is not copied.

``Link`` is the client's end of a socket: it sends requests and matches the answers to them. It never reconnects. When
the connection is lost, every request without an answer fails with ``Unavailable``, and the owner of the link decides
what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from plait.errors import InvalidArgument, PlaitError, ProtocolError, Unavailable, VersionMismatch
from plait.limits import KIB, MIB, PACKET_SIZE_MAX
from plait.wire import messages as m
from plait.wire.codec import ANSWERS, DECODERS, OPEN_HEAD_SIZE_MAX, UNDECODABLE, decode, encode, error_of, undecodable

DEFAULT_PORT = 7450
SCHEME = "plait://"

#: Size of the packet, kind, a reserved field, correlation, size of the head.
HEADER = struct.Struct("<IHHII")
HEADER_SIZE = HEADER.size
_unpack_header = HEADER.unpack_from
#: Pads a head, by the last three bits of its size.
_PADDING = [bytes(-size & 7) for size in range(8)]
#: Size of the receive buffer that the connections of a loop share.
SHARED_SIZE = 256 * 1024
#: The first size of a large packet's own buffer. A frame of ``send_many`` fits; for a larger packet the buffer doubles
#: each time it is full.
GROWTH_FIRST = 2 * MIB

#: A payload up to this size is copied into one buffer with its head, which costs less than passing several buffers.
JOIN_SIZE_MAX = 4 * KIB

Buffer = bytes | bytearray | memoryview

#: Called once with the answer and its payload, or with the error.
OnAnswer = Callable[[Any, memoryview, PlaitError | None], None]

_EMPTY = memoryview(b"")
_FAILURE = m.ErrorReply.KIND
_NO_CALL: tuple[OnAnswer | None, int] = (None, 0)


class Packet(NamedTuple):
    """One request, reply or notice."""

    message: m.PacketHead
    correlation: int
    payload: memoryview
    #: Bytes of the whole packet.
    size: int


def pack(kind: int, correlation: int, head: bytes, payload_size: int = 0) -> bytes:
    """The header and head of a packet; the caller writes the buffers of the payload after it."""
    length = len(head)
    size = HEADER_SIZE + (length + 7 & -8) + payload_size
    if size > PACKET_SIZE_MAX:
        raise ProtocolError(f"a packet of {size} bytes is over the limit of {PACKET_SIZE_MAX}")
    return HEADER.pack(size, kind, 0, correlation, length) + head + _PADDING[length & 7]


def write(transport: asyncio.WriteTransport, head: bytes, payload: Sequence[Buffer], size: int) -> None:
    """Write the result of ``pack``, and a payload of ``size`` bytes."""
    if size <= JOIN_SIZE_MAX:
        transport.write(b"".join((head, *payload)))
    else:
        transport.writelines([head, *payload])


class Receiver(asyncio.BufferedProtocol):
    """The reading side of a connection; the base of ``Link`` and ``Connection``. After a ``failure`` it is unusable."""

    def __init__(self, shared: memoryview, growth_first: int | None = None) -> None:
        self._shared = shared
        self._growth_first = growth_first or GROWTH_FIRST
        self._rest = b""
        self._own: memoryview | None = None
        self._filled = 0
        self._size = 0
        #: The number of bytes received of a packet that is not complete yet.
        self.partial_size = 0
        #: The error, once the receiver got bytes that are not a packet; None before.
        self.failure: ProtocolError | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes (``asyncio.BufferedProtocol``)."""
        if self._own is None:
            return self._shared
        if self._filled == len(self._own):
            grown = memory(min(self._size, 2 * len(self._own)))
            grown[: self._filled] = self._own
            self._own = grown
        return self._own[self._filled :]

    def received(self, count: int) -> list[Packet]:
        """The packets that are complete now that ``count`` bytes arrived in the buffer. Each packet owns its memory.

        Sets ``failure`` if the bytes after these packets are not a packet.
        """
        packets: list[Packet] = []
        data: memoryview = self._shared[:count]
        own = self._own
        if own is not None:
            self._filled += count
            self.partial_size = self._filled
            if self._filled < self._size:
                return packets
            data, self._own = own, None
        elif self._rest:
            data = memoryview(self._rest + data)
        position, end = 0, len(data)
        while end - position >= HEADER_SIZE:
            size, kind, _, correlation, head_size = _unpack_header(data, position)
            if not HEADER_SIZE <= size <= PACKET_SIZE_MAX:
                self.failure = ProtocolError(f"packet size {size} is outside {HEADER_SIZE} to {PACKET_SIZE_MAX}")
                return packets
            stop = position + size
            if stop > end:
                self._rest = b""
                left = data[position:]
                self._size, self._filled = size, len(left)
                self.partial_size = self._filled
                # Do not allocate the declared size at once, so that a peer cannot use up memory by only declaring one.
                self._own = memory(min(size, max(self._growth_first, 2 * len(left))))
                self._own[: len(left)] = left
                return packets
            start = HEADER_SIZE + (head_size + 7 & -8)
            if start > size:
                self.failure = ProtocolError(f"packet head of {head_size} bytes passes the packet's end")
                return packets
            # Bytes have cheaper slices than a memoryview, and most packets are small.
            whole = data if own is not None else data[position:stop].tobytes()
            head = whole[HEADER_SIZE : HEADER_SIZE + head_size]
            try:
                # A small head of a known kind needs no Python call.
                decoder = DECODERS.get(kind) if head_size <= OPEN_HEAD_SIZE_MAX else None
                message = decode(kind, head) if decoder is None else decoder(head)
            except (ProtocolError, *UNDECODABLE) as error:
                self.failure = error if isinstance(error, ProtocolError) else undecodable(kind, error)
                return packets
            payload = memoryview(whole)[start:] if start < size else _EMPTY
            # Bypass the Python-level constructor of the NamedTuple: this runs for every packet.
            packets.append(tuple.__new__(Packet, (message, correlation, payload, size)))
            position = stop
        if position == end:
            self._rest, self.partial_size = b"", 0
        else:
            self._rest = bytes(data[position:])
            self.partial_size = len(self._rest)
        return packets

    def end_packet(self) -> None:
        """Free the memory of an incomplete packet. The caller closes the connection, because the rest may yet come."""
        self._own, self._rest = None, b""
        self.partial_size = 0


def memory(size: int) -> memoryview:
    """Uninitialised memory, because filling a large buffer with zeros costs as much as receiving into it."""
    empty: Any = np.empty(size, np.uint8)
    return memoryview(empty).cast("B")


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of ``plait://host[:port]``."""
    text = address.strip().removeprefix(SCHEME).rstrip("/")
    host, _, port = text.rpartition(":") if ":" in text and not text.endswith("]") else (text, "", "")
    host = host.strip("[]")
    if not _is_host(host) or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise InvalidArgument(f"address {address!r} is not understood; write plait://host:port")
    return host, int(port) if port else DEFAULT_PORT


def _is_host(host: str) -> bool:
    """Whether a resolver accepts the text as a host name or address."""
    try:
        return bool(host.encode("idna")) and host.isprintable() and not set(host) & set("/@?# ")
    except UnicodeError:
        return False


class Link(Receiver):
    """One connection, open or lost."""

    def __init__(self) -> None:
        # A client trusts the packet sizes that its server declares, and allocates them at once.
        super().__init__(memory(SHARED_SIZE), PACKET_SIZE_MAX)
        self._transport: asyncio.Transport | None = None
        #: Correlation → (callback, expected packet kind of the answer).
        self._calls: dict[int, tuple[OnAnswer, int]] = {}
        self._next = 1
        #: The packets without a payload that were sent in this turn of the loop. They are written together.
        self._heads: list[bytes] = []
        self._resume: asyncio.Future[None] | None = None
        self.welcome: m.Welcome | None = None
        self.closed = False
        self.error: PlaitError | None = None
        #: The number of bytes received so far.
        self.received_bytes = 0
        #: Called once when the connection is lost.
        self.on_lost: Callable[[], None] = lambda: None

    # --- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop have the interface of asyncio.Transport, but do not inherit from it.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * 1024 * 1024)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(self.error or Unavailable("the connection to the server was lost"))

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        try:
            for message, correlation, payload, _ in self.received(nbytes):
                kind = message.KIND
                call, due = self._calls.get(correlation, _NO_CALL)
                if kind != due and kind != _FAILURE and call is not None:
                    # The call stays registered and fails when the connection closes.
                    raise ProtocolError(
                        f"the server answered with packet kind {kind} instead of {due}; is it a Plait server?"
                    )
                self._calls.pop(correlation, None)
                if isinstance(message, m.ErrorReply):
                    error = error_of(message)
                    if correlation == 0:
                        self.error = error
                        self.abort()
                        return
                    if call is not None:
                        call(None, _EMPTY, error)
                elif call is not None:
                    call(message, payload, None)
            if self.failure is not None:
                raise self.failure
        except ProtocolError as error:
            self.error = error
            self.abort()

    def pause_writing(self) -> None:
        if self._resume is None:
            self._resume = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._resume is not None:
            if not self._resume.done():
                self._resume.set_result(None)
            self._resume = None

    def _lose(self, error: PlaitError) -> None:
        if self.closed:
            return
        self.closed = True
        self.error = error
        self.resume_writing()
        calls, self._calls = self._calls, {}
        # Only this connection has failed, so the caller may repeat the requests on another connection.
        lost = error if isinstance(error, Unavailable) else Unavailable(f"the server closed the connection: {error}")
        for call, _ in calls.values():
            call(None, _EMPTY, lost)
        self.on_lost()

    # --- requests -------------------------------------------------------------------------------

    def call(self, message: m.PacketHead, on_answer: OnAnswer, payload: Sequence[Buffer] = (), size: int = 0) -> None:
        """Send a request. ``on_answer`` is called from the loop, or immediately when the connection is closed."""
        if self.closed or self._transport is None:
            on_answer(None, _EMPTY, self.error or Unavailable("not connected"))
            return
        number = self._next
        head = pack(message.KIND, number, encode(message), size)
        if payload:
            if self._heads:
                # Write the earlier packets first, to preserve the order.
                self._write_heads()
            write(self._transport, head, payload, size)
        else:
            if not self._heads:
                asyncio.get_running_loop().call_soon(self._write_heads)
            self._heads.append(head)
        # Register the call only now: a message that could not be packed must not leave a call that gets no answer.
        self._next = number + 1 if number < 0xFFFF_FFFF else 1
        self._calls[number] = (on_answer, ANSWERS[message.KIND])

    def _write_heads(self) -> None:
        """Write the collected packets with one system call, which costs more than the rest of a request."""
        heads, self._heads = self._heads, []
        if heads and not self.closed and self._transport is not None:
            self._transport.write(heads[0] if len(heads) == 1 else b"".join(heads))

    def notify(self, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0) -> None:
        """Send a packet that has no answer."""
        if not self.closed and self._transport is not None:
            self._write_heads()
            write(self._transport, pack(message.KIND, 0, encode(message), size), payload, size)

    async def request(self, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0) -> Any:
        """Send a request and wait for its answer; raises the error that the server answers with."""
        answer, _ = await self.request_payload(message, payload, size)
        return answer

    def request_payload(
        self, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0
    ) -> asyncio.Future[tuple[Any, memoryview]]:
        """Send a request. The future's result is the answer and its payload."""
        future: asyncio.Future[tuple[Any, memoryview]] = asyncio.get_running_loop().create_future()

        def answered(answer: Any, received: memoryview, error: PlaitError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result((answer, received))

        self.call(message, answered, payload, size)
        return future

    async def drained(self) -> None:
        """Wait until the socket accepts more data."""
        if self._resume is not None:
            await asyncio.shield(self._resume)

    def close(self) -> None:
        self._write_heads()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def dial(address: str, client: str, seconds: float) -> Link:
    """Connect and exchange hello packets within ``seconds``; raises ``Unavailable`` or the server's error."""
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    link: Link | None = None
    try:
        async with asyncio.timeout(seconds):
            _, link = await loop.create_connection(Link, host, port)
            link.welcome = await link.request(m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, client))
            if link.welcome.version != m.PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"the server chose protocol {link.welcome.version}, this client has {m.PROTOCOL_VERSION}; "
                    "use the same version of Plait"
                )
    except TimeoutError:
        if link is not None:
            link.abort()
        raise Unavailable(
            f"no answer from {SCHEME}{host}:{port} within {seconds:g} s", addresses=[f"{SCHEME}{host}:{port}"]
        ) from None
    except OSError as error:
        refusals = str(error).count(f"[Errno {errno.ECONNREFUSED}]")
        raise Unavailable(
            f"cannot connect to {SCHEME}{host}:{port} ({error.strerror or error}); is 'plait serve' running there?",
            addresses=[f"{SCHEME}{host}:{port}"],
            # asyncio joins the errors of several addresses into one text.
            refused=isinstance(error, ConnectionRefusedError) or 0 < refusals == str(error).count("[Errno "),
        ) from None
    except Unavailable as lost:
        if link is None:
            raise
        link.abort()
        # If the server sent an error about the hello, raise that: it is more specific.
        raise (link.error or lost) from None
    except BaseException:
        if link is not None:
            with contextlib.suppress(RuntimeError):
                link.abort()
        raise
    return link
