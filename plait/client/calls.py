"""Management requests by name, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plait.client.node import Node
from plait.errors import InvalidArgument
from plait.wire import messages as m


class Calls:
    """What every part of ``client.admin`` is built on."""

    def __init__(self, node: Node, now: Callable[[], int]) -> None:
        self._node = node
        #: Microseconds since 1970: what times from now on are counted from.
        self._now = now

    async def _run(self, operation: str, kind: Any, **arguments: Any) -> Any:
        request = m.Admin(operation, arguments)
        try:
            m.encode(request)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise InvalidArgument(f"{operation} cannot be asked for with these arguments: {error}") from None
        reply: m.AdminReply = await self._node.request(request)
        return msgspec.msgpack.decode(reply.result, type=kind)
