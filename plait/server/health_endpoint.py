"""Health over HTTP: ``GET /health`` for a process monitor.

The reply is 200 with the server's facts as JSON while it serves, and 503 once storage has failed or cannot be read. The
endpoint changes nothing, and like the server itself it listens on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import Any

import msgspec

from plait.errors import InvalidArgument
from plait.server.broker_host import BrokerHost

#: A larger request head is refused.
REQUEST_SIZE_MAX = 8 * 1024
#: A client must send its request within this time.
REQUEST_SECONDS = 5.0
#: The most connections without a complete request; one more closes the oldest.
CONNECTIONS_MAX = 64

_encoder = msgspec.json.Encoder()


class HealthEndpoint:
    """The HTTP listener. ``port`` is set by ``start``."""

    def __init__(self, host: BrokerHost, interface: str, port: int) -> None:
        if not 0 <= port < 65536:
            raise InvalidArgument(f"HTTP port {port} is invalid; use 0 to 65535")
        self._host = host
        self._interface = interface
        self.port = port
        self._listener: asyncio.Server | None = None
        #: Connections without a complete request, the oldest first.
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._serve, self._interface, self.port, limit=REQUEST_SIZE_MAX)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > CONNECTIONS_MAX:
            # A monitor sends its request at once; idle connections must not keep it out.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            # No reply to an incomplete request.
            pass
        finally:
            self._open.pop(writer, None)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET and HEAD are served"})
        if path != b"/health":
            return _response(HTTPStatus.NOT_FOUND, {"error": "not found; use /health"})
        failure = self._host.broker.turn.failed
        if failure is not None:
            return _failed(failure.message)
        try:
            facts = self._host.describe()
        except OSError as error:
            return _failed(f"the data directory cannot be read: {error}")
        return _response(HTTPStatus.OK, {"status": "ready", **facts}, body=method == b"GET")


def _failed(error: str) -> bytes:
    return _response(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "failed", "error": error})


def _response(status: HTTPStatus, content: dict[str, Any], *, body: bool = True) -> bytes:
    encoded = _encoder.encode(content)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(encoded)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (encoded if body else b"")
