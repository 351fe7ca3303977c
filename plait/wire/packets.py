"""Splits received bytes into packets, and packs messages into packets. Does no I/O.

A packet is a 16-byte header, a message as a msgpack head padded to 8 bytes, and a payload of frames. The receiver
provides the buffer for the next bytes. All connections of a loop share one buffer for small packets. A large packet
gets its own buffer, so that its payload is not copied.

The receiver turns any bytes into packets or a ``ProtocolError``. The result does not depend on how the bytes were split
into reads.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from plait.errors import ProtocolError
from plait.limits import KIB, MIB, PACKET_SIZE_MAX
from plait.wire.codec import DECODERS, OPEN_HEAD_SIZE_MAX, UNDECODABLE, decode, undecodable
from plait.wire.messages import PacketHead

#: Size of the packet, kind, a reserved field, correlation, size of the head.
HEADER = struct.Struct("<IHHII")
HEADER_SIZE = HEADER.size
#: Size of the receive buffer that the connections of a loop share.
SHARED_SIZE = 256 * 1024
#: The first size of a large packet's own buffer. A frame of ``send_many`` fits; for a larger packet the buffer doubles
#: each time it is full.
GROWTH_FIRST = 2 * MIB

#: A payload up to this size is copied into one buffer with its head, which costs less than passing several buffers.
JOIN_SIZE_MAX = 4 * KIB

Buffer = bytes | bytearray | memoryview


class Packet(NamedTuple):
    """One request, reply or notice."""

    message: PacketHead
    correlation: int
    payload: memoryview
    #: Bytes of the whole packet.
    size: int


def pack(kind: int, correlation: int, head: bytes, payload_size: int = 0) -> bytes:
    """The header and head of a packet; the caller writes the buffers of the payload after it."""
    padding = -len(head) & 7
    size = HEADER_SIZE + len(head) + padding + payload_size
    if size > PACKET_SIZE_MAX:
        raise ProtocolError(f"a packet of {size} bytes is over the limit of {PACKET_SIZE_MAX}")
    return HEADER.pack(size, kind, 0, correlation, len(head)) + head + b"\0" * padding


def write(transport: asyncio.WriteTransport, head: bytes, payload: Sequence[Buffer], size: int) -> None:
    """Write the result of ``pack``, and a payload of ``size`` bytes."""
    if size <= JOIN_SIZE_MAX:
        transport.write(b"".join((head, *payload)))
    else:
        transport.writelines([head, *payload])


class Receiver:
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
            size, kind, _, correlation, head_size = HEADER.unpack_from(data, position)
            if not HEADER_SIZE <= size <= PACKET_SIZE_MAX:
                self.failure = ProtocolError(f"packet size {size} is outside {HEADER_SIZE} to {PACKET_SIZE_MAX}")
                return packets
            stop = position + size
            if stop > end:
                self._rest = b""
                self._begin_own(data[position:], size)
                return packets
            start = HEADER_SIZE + head_size + (-head_size & 7)
            if start > size:
                self.failure = ProtocolError(f"packet head of {head_size} bytes passes the packet's end")
                return packets
            whole = data if own is not None else memoryview(bytes(data[position:stop]))
            head = whole[HEADER_SIZE : HEADER_SIZE + head_size]
            try:
                # A small head of a known kind needs no Python call.
                decoder = DECODERS.get(kind) if head_size <= OPEN_HEAD_SIZE_MAX else None
                message = decode(kind, head) if decoder is None else decoder(head)
            except (ProtocolError, *UNDECODABLE) as error:
                self.failure = error if isinstance(error, ProtocolError) else undecodable(kind, error)
                return packets
            # Bypass the Python-level constructor of the NamedTuple: this runs for every packet.
            packets.append(tuple.__new__(Packet, (message, correlation, whole[start:], size)))
            position = stop
        self._rest = bytes(data[position:])
        self.partial_size = len(self._rest)
        return packets

    def end_packet(self) -> None:
        """Free the memory of an incomplete packet. The caller closes the connection, because the rest may yet come."""
        self._own, self._rest = None, b""
        self.partial_size = 0

    def _begin_own(self, data: memoryview, size: int) -> None:
        self._size = size
        self._filled = self.partial_size = len(data)
        # Do not allocate the declared size at once, so that a peer cannot use up memory by only declaring a size.
        room = min(size, max(self._growth_first, 2 * len(data)))
        self._own = memory(room)
        self._own[: len(data)] = data


def memory(size: int) -> memoryview:
    """Uninitialised memory, because filling a large buffer with zeros costs as much as receiving into it."""
    empty: Any = np.empty(size, np.uint8)
    return memoryview(empty).cast("B")
