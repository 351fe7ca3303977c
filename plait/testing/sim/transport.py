"""A simulated TCP connection: two ``Endpoint``s, which are asyncio transports, and a ``Pipe`` in each direction.

A pipe does the work of the two kernels. It accepts as many bytes as the window allows and delivers them in order after
the network's latency. During a cut of the network it holds the bytes. It resends them when the cut ends, and gives up
after a time. It also works while a process is paused. When a process is killed, the pipe sends an end of stream, or a
reset if the process left bytes unread.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

if TYPE_CHECKING:
    from plait.testing.sim.machine import Machine
    from plait.testing.sim.network import Network
    from plait.testing.sim.timeline import Later

#: asyncio's default limit of a write buffer.
HIGH_DEFAULT = 64 * 1024
#: The most bytes that ``Protocol.data_received`` gets.
READ_MAX = 256 * 1024
#: The shortest time between two deliveries of one pipe, so that they are never at the same time.
INSTANT = 1e-9

Address = tuple[str, int]
Loop = asyncio.AbstractEventLoop

FIN = "end of stream"
RESET = "reset"


class SimSegment:
    """Bytes in flight that were written at one time, or the end of the stream."""

    __slots__ = ("data", "end", "written")

    def __init__(self, written: float, data: bytes = b"", end: str = "") -> None:
        self.written = written
        self.data = [data]
        self.end = end


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, source: Endpoint, target: Endpoint, window: int) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._window = window
        #: Bytes that the writer wrote and the reader has not read.
        self.outstanding = 0
        self._last: SimSegment | None = None
        self._arrival = 0.0
        #: Segments that a cut stopped. The pipe resends them when the cut ends.
        self.held: deque[SimSegment] = deque()
        self._retrying = False

    @property
    def room(self) -> int:
        return max(self._window - self.outstanding, 0)

    def push(self, data: bytes) -> None:
        """Send bytes. Bytes that are written at the same time are sent as one segment."""
        self.outstanding += len(data)
        last, now = self._last, self._network.timeline.now
        if last is not None and last.written == now and not last.end:
            last.data.append(data)
        else:
            self._send(SimSegment(now, data))

    def end(self, how: str) -> None:
        """End the stream, with ``FIN`` or ``RESET``."""
        self._send(SimSegment(self._network.timeline.now, end=how))

    def _send(self, segment: SimSegment) -> None:
        simulation = self._network.timeline
        self._last = segment
        latency = self._network.latency()
        self._arrival = max(self._arrival + INSTANT, simulation.now + latency)
        simulation.call_later(self._arrival - simulation.now, self._arrived, segment)

    def _arrived(self, segment: SimSegment) -> None:
        if segment is self._last:
            self._last = None
        if self.held or self._network.is_cut(self._source.machine, self._target.machine):
            self.held.append(segment)
            self._network.holding[self] = None
            self._source.unanswered()
            return
        self._deliver(segment)

    def retry(self) -> None:
        """Resend the held segments after a pause, because a cut may have ended."""
        if self.held and not self._retrying:
            self._retrying = True
            pause = self._network.random.uniform(0.0, self._network.retry_seconds)
            self._network.timeline.call_later(pause, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        if self._network.is_cut(self._source.machine, self._target.machine):
            if self.held:
                self._network.holding[self] = None
            return
        held, self.held = self.held, deque()
        for segment in held:
            self._deliver(segment)

    def _deliver(self, segment: SimSegment) -> None:
        source, target = self._source, self._target
        if not target.takes:
            if not target.machine.powered:
                source.unanswered()
            elif segment.end != RESET:
                # The target closed the connection.
                target.out.end(RESET)
            return
        if self._network.is_cut(target.machine, source.machine):
            # The segment arrives, but its confirmation does not.
            source.unanswered()
        if segment.end:
            target.ended(segment.end)
        else:
            target.arrived(b"".join(segment.data))


class Endpoint(asyncio.Transport):
    """One end of a connection: the transport of its process."""

    def __init__(self, network: Network, loop: Loop, machine: Machine, name: Address, peer: Address) -> None:
        super().__init__({"sockname": name, "peername": peer})
        self._network = network
        self.loop = loop
        self.machine = machine
        #: The pipe to the peer; set when both ends exist.
        self.out: Pipe = cast(Pipe, None)
        self.into: Pipe = cast(Pipe, None)
        self._protocol: asyncio.BaseProtocol | None = None
        #: True until the kernel's socket is closed.
        self.kernel_open = True
        self._unread: deque[memoryview] = deque()
        self._unread_size = 0
        #: ``FIN`` once the end of the stream has arrived. The process notices it after it has read everything.
        self._end = ""
        self._error: OSError | None = None
        self._giving_up: Later | None = None
        self._buffer: deque[bytes] = deque()
        self._buffer_size = 0
        self._high, self._low = HIGH_DEFAULT, HIGH_DEFAULT // 4
        self._writing_paused = False
        self._write_scheduled = False
        self._write_ended = False
        self._reading_paused = False
        self._read_scheduled = False
        self._closing = False

    def __repr__(self) -> str:
        return f"<simulated connection {self.get_extra_info('sockname')} to {self.get_extra_info('peername')}>"

    @property
    def takes(self) -> bool:
        """Whether the socket accepts arriving bytes."""
        return self.kernel_open and self._error is None

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._look()

    # --- the kernel's side ----------------------------------------------------------------------

    def arrived(self, data: bytes) -> None:
        self._network.timeline.trace.mix(b"%s %d %d" % (self.machine.label, len(data), crc32(data)))
        self._unread.append(memoryview(data))
        self._unread_size += len(data)
        self._look()

    def ended(self, how: str) -> None:
        """Called when an end of stream or a reset of the peer arrives."""
        if how == RESET:
            self.broke(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        else:
            self._end = how
            self._look()

    def broke(self, error: OSError) -> None:
        """Break the connection. The process notices it when it reads or writes."""
        self._answered()
        self._error = error
        self._look()
        if self._buffer:
            self.loop.call_soon(self._fatal, error)

    def unanswered(self) -> None:
        """Give up the connection after a time, because sent bytes are not confirmed."""
        if self._giving_up is None:
            seconds = self._network.random.uniform(*self._network.give_up_seconds)
            self._giving_up = self._network.timeline.call_later(seconds, self._give_up)

    def _answered(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = None
        self.out.held.clear()
        if self.kernel_open:
            self._network.timeline.log(self.machine.name, f"{self!r} times out")
            self.broke(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))

    def healed(self) -> None:
        """Called when neither direction is cut any more."""
        self._answered()
        self.write_soon()

    def vanish(self, *, silent: bool) -> None:
        """Close the socket of a dead process. ``silent``: its machine lost power, so the peer is not notified."""
        if self.kernel_open:
            self._buffer.clear()
            self._buffer_size = 0
            self._close_kernel(silent=silent)

    def _close_kernel(self, *, silent: bool = False) -> None:
        self.kernel_open = False
        self._answered()
        self._network.closed(self)
        if silent:
            self.out.held.clear()
        if silent or self._error is not None:
            return
        if self._unread_size or self._network.random.random() < self._network.reset_odds:
            self.out.end(RESET)
        elif not self._write_ended:
            self.out.end(FIN)

    # --- reading --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Let the process read if there are unread bytes and reading is not paused."""
        if self._read_scheduled or self._reading_paused or self._closing or self._protocol is None:
            return
        if self._unread or self._end or self._error is not None:
            self._read_scheduled = True
            self.loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_scheduled = False
        if self._reading_paused or self._closing:
            return
        if self._unread:
            self._read_some()
            self._look()
        elif self._error is not None:
            self._fatal(self._error)
        elif self._end:
            self._end = ""
            assert isinstance(self._protocol, asyncio.Protocol | asyncio.BufferedProtocol)
            if not self._protocol.eof_received():
                self.close()

    def _read_some(self) -> None:
        size = self._network.chunk(min(self._unread_size, READ_MAX))
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            buffer = memoryview(cast(Any, protocol.get_buffer(-1))).cast("B")
            data = self._take(min(size, len(buffer)))
            buffer[: len(data)] = data
            protocol.buffer_updated(len(data))
        else:
            assert isinstance(protocol, asyncio.Protocol)
            protocol.data_received(self._take(size))

    def _take(self, size: int) -> bytes:
        pieces: list[memoryview] = []
        left = size
        while left:
            piece = self._unread.popleft()
            if len(piece) > left:
                self._unread.appendleft(piece[left:])
                piece = piece[:left]
            pieces.append(piece)
            left -= len(piece)
        self._unread_size -= size
        self.into.outstanding -= size
        self._network.window_opened(self)
        return b"".join(pieces)

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._look()

    # --- writing --------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._write_ended:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._closing or not self.kernel_open:
            return
        if self._error is not None:
            self.loop.call_soon(self._fatal, self._error)
            return
        piece = bytes(data)
        if not self._buffer and (room := self.out.room):
            self.out.push(piece[:room])
            piece = piece[room:]
        if piece:
            self._buffer.append(piece)
            self._buffer_size += len(piece)
            if self._buffer_size > self._high and not self._writing_paused:
                self._writing_paused = True
                assert self._protocol is not None
                self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_soon(self) -> None:
        """Write more soon, because the peer has read bytes or a cut has ended."""
        if self._buffer and not self._write_scheduled:
            self._write_scheduled = True
            self.loop.call_soon(self._write_more)

    def _write_more(self) -> None:
        self._write_scheduled = False
        while self._buffer and (room := self.out.room):
            piece = self._buffer.popleft()
            if len(piece) > room:
                self._buffer.appendleft(piece[room:])
                piece = piece[:room]
            self._buffer_size -= len(piece)
            self.out.push(piece)
        if self._writing_paused and self._buffer_size <= self._low:
            self._writing_paused = False
            assert self._protocol is not None
            self._protocol.resume_writing()
        if not self._buffer:
            if self._closing:
                self.loop.call_soon(self._lost, None)
            elif self._write_ended:
                self.out.end(FIN)

    def write_eof(self) -> None:
        if not self._write_ended and not self._closing:
            self._write_ended = True
            if not self._buffer:
                self.out.end(FIN)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_DEFAULT if low is None else 4 * low
        self._high, self._low = high, high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._buffer_size

    # --- ending ---------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._buffer:
                self.loop.call_soon(self._lost, None)

    def abort(self) -> None:
        self._fatal(None)

    def _fatal(self, error: Exception | None) -> None:
        if self._buffer:
            self._buffer.clear()
            self._buffer_size = 0
        elif self._closing:
            # Already scheduled.
            return
        self._closing = True
        self.loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        if not self.kernel_open:
            return
        self._close_kernel()
        if self._protocol is not None:
            self._protocol.connection_lost(error)
