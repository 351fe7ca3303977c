"""Management requests by name, and what they answer."""

from __future__ import annotations

from typing import Any

import msgspec

from plait.client.node import Node
from plait.wire import messages as m


class Calls:
    """What every part of ``client.admin`` is built on."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def _run(self, operation: str, kind: Any, **arguments: Any) -> Any:
        reply: m.AdminReply = await self._node.request(m.Admin(operation, arguments))
        return msgspec.msgpack.decode(reply.result, type=kind)
