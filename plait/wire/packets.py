"""Packets: bytes in, packets out, no I/O.

A packet is a 16-byte header, a msgpack head padded to 8 bytes, and a payload of frames. The receiver provides the
buffer for the next bytes: small packets use one buffer that all connections of a loop share; a large packet gets a
buffer of its own, so that its payload is received in place.

Arbitrary bytes give packets or ``ProtocolError``, with the same result for every split into pieces, and never take more
memory than twice the bytes received.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from plait.errors import ProtocolError
from plait.limits import FRAME_SIZE_MAX, KIB, MIB

#: Size of the packet, kind, reserved, correlation, size of the head.
HEADER = struct.Struct("<IHHII")
HEADER_SIZE = HEADER.size
#: A frame and its request; pull replies stay below this size too.
PACKET_SIZE_MAX = FRAME_SIZE_MAX + 1 * MIB
#: Size of the receive buffer that the connections of a loop share.
SHARED_SIZE = 256 * 1024
#: First size of a large packet's own buffer, which doubles as bytes arrive. A frame of ``send_many`` fits.
GROWTH_FIRST = 2 * MIB

#: Up to this size a copy costs less than a longer list of buffers.
JOIN_SIZE_MAX = 4 * KIB

Buffer = bytes | bytearray | memoryview


class Packet(NamedTuple):
    """One request, reply or notice."""

    kind: int
    correlation: int
    head: memoryview
    payload: memoryview


def pack(kind: int, correlation: int, head: bytes, payload_size: int = 0) -> bytes:
    """The header and head of a packet; the caller writes the buffers of the payload after it."""
    padding = -len(head) & 7
    size = HEADER_SIZE + len(head) + padding + payload_size
    if size > PACKET_SIZE_MAX:
        raise ProtocolError(f"a packet of {size} bytes is over the limit of {PACKET_SIZE_MAX}")
    return HEADER.pack(size, kind, 0, correlation, len(head)) + head + b"\0" * padding


def send(transport: asyncio.WriteTransport, head: bytes, payload: Sequence[Buffer], size: int) -> None:
    """Write a packet whose payload has ``size`` bytes."""
    if not payload:
        transport.write(head)
    elif size <= JOIN_SIZE_MAX:
        transport.write(b"".join((head, *payload)))
    else:
        transport.writelines([head, *payload])


class Receiver:
    """The reading side of one connection. It must not be used after a ``ProtocolError``."""

    __slots__ = ("_filled", "_growth_first", "_own", "_rest", "_shared", "_size")

    def __init__(self, shared: memoryview, growth_first: int | None = None) -> None:
        self._shared = shared
        self._growth_first = growth_first or GROWTH_FIRST
        self._rest = b""
        self._own: memoryview | None = None
        self._filled = 0
        self._size = 0

    @property
    def partial_size(self) -> int:
        """Bytes received of the packet that is still incomplete."""
        return self._filled if self._own is not None else len(self._rest)

    def buffer(self) -> memoryview:
        """The buffer for the next bytes."""
        if self._own is None:
            return self._shared
        if self._filled == len(self._own):
            grown = memory(min(self._size, 2 * len(self._own)))
            grown[: self._filled] = self._own
            self._own = grown
        return self._own[self._filled :]

    def received(self, count: int) -> Iterator[Packet]:
        """Yield the packets that are complete after ``count`` bytes arrived in ``buffer``; each owns its memory.

        The caller must take all of them before it asks for the next buffer.
        """
        if self._own is not None:
            self._filled += count
            if self._filled == self._size:
                whole, self._own = self._own, None
                yield _packet(whole)
            return
        data: memoryview = self._shared[:count]
        if self._rest:
            data = memoryview(self._rest + data)
            self._rest = b""
        position, end = 0, len(data)
        while end - position >= HEADER_SIZE:
            size = int.from_bytes(data[position : position + 4], "little")
            if not HEADER_SIZE <= size <= PACKET_SIZE_MAX:
                raise ProtocolError(f"packet size {size} is outside {HEADER_SIZE} to {PACKET_SIZE_MAX}")
            if position + size > end:
                self._begin_own(data[position:], size)
                return
            yield _packet(memoryview(bytes(data[position : position + size])))
            position += size
        self._rest = bytes(data[position:])

    def _begin_own(self, data: memoryview, size: int) -> None:
        self._size = size
        self._filled = len(data)
        # Do not allocate the declared size at once: a peer that only declares a size must not cost memory.
        room = min(size, max(self._growth_first, 2 * len(data)))
        self._own = memory(room)
        self._own[: len(data)] = data


def memory(size: int) -> memoryview:
    """Uninitialised memory: zeroing a large buffer costs as much as receiving into it."""
    empty: Any = np.empty(size, np.uint8)
    return memoryview(empty).cast("B")


def _packet(data: memoryview) -> Packet:
    _, kind, _, correlation, head_size = HEADER.unpack_from(data)
    start = HEADER_SIZE + head_size + (-head_size & 7)
    if start > len(data):
        raise ProtocolError(f"packet head of {head_size} bytes passes the packet's end")
    # Bypass the Python-level constructor of the NamedTuple: this runs for every packet.
    return tuple.__new__(Packet, (kind, correlation, data[HEADER_SIZE : HEADER_SIZE + head_size], data[start:]))
